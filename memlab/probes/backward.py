"""Where backward is: marks that say for which module's forward, and for which line, it works from here on.

After each module's forward a prehook goes onto the node that made the output. It changes no gradient, keeps no graph
alive, and is taken off at the end of the track.

Limits: known are the moments at which backward reaches the output of a module; what was computed between two modules
counts for the one before it in the backward. Outputs that are subclasses of tensors or inside `torch.func` get none.
"""

from __future__ import annotations

import functools
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
from torch.compiler import is_dynamo_compiling

from memlab import seams
from memlab.probes.marks import marker
from memlab.seams import graph, nodes, sequence
from memlab.trace.columns import Array, MarkKind

LineOf = Callable[[FrameType, bool], int]
"""The watched line on, from a frame outwards, and whether the frame is of the thread whose lines are followed."""
MAX_REACHED = 1_000_000
"""So many moments are kept; the oldest half goes first."""
MAX_HOOKED = 10_000
"""So many nodes with hooks may be alive at once, where a node that was looked at stays (see `seams.graph.nodes_stay`)."""
MAX_WINDOWS = 500_000
"""So many runs of the engine are told apart from the lines that wait for them."""
_DEPTH = 2  # so many containers deep tensors are looked for in what a module returns


class Backward:
    """Marks backward while it is on; `reached` has the moments and the lines (-1 where no line was watched)."""

    def __init__(self, line_of: LineOf, clock: Callable[[], int]) -> None:
        self.failures = 0
        self.is_cut = False
        self.is_on = False
        self._line_of, self._clock = line_of, clock
        self._lock = threading.Lock()
        self._new: deque[tuple[int, int]] = deque()
        self._times, self._lines = array("q"), array("q")
        self._newest: dict[int, int] = {}
        self._handles: list[Any] = []
        self._hooks: dict[tuple[str, int], Callable[[Any], None]] = {}
        self._prune_at = 4096
        self._windows: list[tuple[int, int]] = []
        self._owner = 0
        self._outer: Any = None
        self._entry: Any = None
        self._users_engine: Any = None
        self._our_engine: Any = None

    def start(self) -> None:
        """Be told of outputs and of backward; others that were told before go on being told."""
        self.is_on, self._owner = True, threading.get_ident()
        self._outer, self._entry = marker.at_output, self.at_output
        marker.at_output = self._entry
        self._users_engine = seams.engine_entry()
        self._our_engine = self._engine(self._users_engine)
        seams.replace_engine_entry(self._our_engine)

    def stop(self) -> None:
        """Leave everything as it was, and take the hooks off whatever graph still lives."""
        self.is_on = False
        if self._entry is not None and marker.at_output is self._entry:
            marker.at_output = self._outer
        if (
            self._our_engine is not None and seams.engine_entry() is self._our_engine
        ):  # else ours stays inside of another one, and only passes calls on
            seams.replace_engine_entry(self._users_engine)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()

    def windows(self) -> list[tuple[int, int]]:
        """From when to when the engine ran for the thread that started this; one inside of another is part of that."""
        return self._windows

    def reached(self) -> tuple[Array, Array]:
        """When backward reached the output of a module, and the line that had called that module."""
        self._collect()
        order = np.argsort(np.array(self._times, np.int64), kind="stable")
        return np.array(self._times, np.int64)[order], np.array(self._lines, np.int64)[order]

    def _engine(self, users: Callable[..., Any]) -> Callable[..., Any]:
        """The entry of the engine with its begin and end dated, the end after all that backward let go."""
        is_inside = False

        @functools.wraps(users)
        def engine(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside or not self.is_on or threading.get_ident() != self._owner or len(self._windows) >= MAX_WINDOWS:
                return users(*args, **kwargs)
            is_inside = True
            begin = self._clock()
            try:
                return users(*args, **kwargs)
            finally:
                is_inside = False
                self._windows.append((begin, self._clock()))

        return engine

    # --- these run in the user's steps, and must never fail them --------------------------------------------------------

    def at_output(self, path: str, output: Any) -> None:
        """A module's forward has ended."""
        if self._outer is not None:
            self._outer(path, output)
        try:
            if self.is_on and nodes.can_hook() and self._has_room():
                self._hook(path, output)
        except Exception:
            self.failures += 1

    def _has_room(self) -> bool:
        """Whether more nodes may be looked at: where they stay, a long row of them cannot be freed (`seams.graph`)."""
        if not graph.nodes_stay or len(self._handles) < MAX_HOOKED or self.is_cut:
            return not self.is_cut
        self._prune()
        self.is_cut = len(self._handles) >= MAX_HOOKED
        return not self.is_cut

    def _hook(self, path: str, output: Any) -> None:
        thread = threading.get_ident()
        before = newest = self._newest.get(thread, -1)
        hook = None
        for tensor in (output,) if nodes.is_plain(output) else tensors_in(output):
            node = nodes.node_of(tensor)
            number = sequence.number_of(node) if node is not None else -1
            # Nodes are numbered as they are made. An older one belongs to a module inside of this one, or before it.
            if number > before:
                hook = hook or self._hook_of(path, self._line(thread))
                self._handles.append(node.register_prehook(hook))
                newest = max(newest, number)
        self._newest[thread] = newest
        if len(self._handles) > self._prune_at:
            self._prune()

    def _hook_of(self, path: str, line: int) -> Callable[[Any], None]:
        """The hook for the outputs of a module on a line; steps call the same ones again and again."""
        hook = self._hooks.get((path, line))
        if hook is None:
            hook = self._hooks[path, line] = self._new_hook(marker.setter(MarkKind.BACKWARD_OF, path), line)
        return hook

    def _new_hook(self, mark: Callable[[], int], line: int) -> Callable[[Any], None]:
        new = self._new

        # Backward has come to the node; in whichever thread. Where backward is compiled, nothing of this stays.
        def reached(gradients: Any) -> None:
            if is_dynamo_compiling():
                return
            if self.is_on:
                new.append((mark(), line))
                if len(new) > 1 << 16:
                    self._collect()

        return reached

    def _line(self, thread: int) -> int:
        """The watched line that is on."""
        return self._line_of(sys._getframe(3), thread == self._owner)

    def _prune(self) -> None:
        """Forget the handles whose graph has gone."""
        self._handles = [handle for handle in self._handles if nodes.is_alive(handle)]
        self._prune_at = max(4096, 2 * len(self._handles))

    def _collect(self) -> None:
        with self._lock:
            for _ in range(len(self._new)):
                moment, line = self._new.popleft()
                self._times.append(moment)
                self._lines.append(line)
            if len(self._times) > MAX_REACHED:
                del self._times[: MAX_REACHED // 2], self._lines[: MAX_REACHED // 2]


def tensors_in(output: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The plain tensors in what a module returned: in tuples, lists, dicts and dataclasses of exactly known kinds."""
    if nodes.is_plain(output):
        yield output
    elif depth:
        for item in _items(output):
            yield from tensors_in(item, depth - 1)


def _items(output: Any) -> list[Any]:
    """The items of a container, read without calling any method that a class of the user's could define."""
    kind = type(output)
    if issubclass(kind, tuple):
        return [tuple.__getitem__(output, index) for index in range(tuple.__len__(output))]
    if issubclass(kind, list):
        return [list.__getitem__(output, index) for index in range(list.__len__(output))]
    if issubclass(kind, dict):
        return list(dict.values(output))
    return _fields_of(output) if any("__dataclass_fields__" in _namespace(base) for base in _mro(kind)) else []


def _fields_of(output: Any) -> list[Any]:
    """What an instance holds by itself; one with slots is left alone."""
    try:
        values = object.__getattribute__(output, "__dict__")
    except AttributeError:
        return []
    return list(values.values()) if type(values) is dict else []


_mro: Any = type.__dict__["__mro__"].__get__
_namespace: Any = type.__dict__["__dict__"].__get__
