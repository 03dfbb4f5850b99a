"""Marks for the module whose backward is running, and the line that had called that module.

After each forward the node that made the output gets a prehook. It changes no gradient, keeps no graph alive, and is
removed at the end of the track.

Limits: only the output of a module is a mark; what was computed between two modules counts for the one that backward
reached before it. Outputs that are tensor subclasses, or inside `torch.func`, get no hook.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
from torch.compiler import is_dynamo_compiling

from memlab.probes.bounded_log import BoundedLog
from memlab.probes.marks import marker
from memlab.torch_internals import graph
from memlab.trace.columns import Array, MarkKind

LineOf = Callable[[FrameType, bool], int]
"""(frame, whether lines of its thread are followed) -> the innermost watched line from there outwards."""
MAX_REACHED = 1_000_000
"""How many times are kept; the older half is dropped first."""
MAX_HOOKED = 10_000
"""How many nodes with hooks may be alive if nodes that Python has seen stay (`torch_internals.graph.nodes_stay`)."""
MAX_WINDOWS = 500_000
"""How many engine runs are kept."""
_DEPTH = 2  # the depth of containers searched in the output of a module


class Backward:
    """Marks backward from `start` to `stop`.

    `windows` are the intervals in which the engine ran for the thread that started this; nested runs are merged.
    """

    def __init__(self, line_of: LineOf, clock: Callable[[], int]) -> None:
        self.failures = 0
        self.is_cut = False
        self.is_on = False
        self.windows: list[tuple[int, int]] = []
        self._line_of, self._clock = line_of, clock
        self._log = BoundedLog(MAX_REACHED, 2)  # time, line
        self._newest: dict[int, int] = {}
        self.handles: list[Any] = []
        self._hooks: dict[tuple[str, int], Callable[[Any], None]] = {}
        self.prune_at = 4096
        self._owner = self._depth = self._begin_ns = 0

    def start(self) -> None:
        """Start: the marker reports outputs and backward."""
        self.is_on, self._owner = True, threading.get_ident()
        marker.backwards = (*marker.backwards, self)

    def stop(self) -> None:
        """Stop, and remove the hooks from graphs that are still alive."""
        self.is_on = False
        marker.backwards = tuple(one for one in marker.backwards if one is not self)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._hooks.clear()

    def reached(self) -> tuple[Array, Array]:
        """When backward reached the output of a module, and the line that had called that module (-1: none watched)."""
        times, lines = self._log.columns()
        order = np.argsort(times, kind="stable")
        return times[order], lines[order]

    # --- these run in the user's steps, and must never fail them --------------------------------------------------------

    def at_engine(self, begins: bool) -> None:
        """The engine starts, or has ended and freed its memory; a nested run belongs to the outer one."""
        if begins:
            self._log.collect()  # for any thread's backward; before the depth changes, as an interrupt may follow
        if threading.get_ident() != self._owner or not (begins or self._depth):
            return
        self._depth += 1 if begins else -1
        if begins and self._depth == 1:
            self._begin_ns = self._clock()
        elif not self._depth and len(self.windows) < MAX_WINDOWS:
            self.windows.append((self._begin_ns, self._clock()))

    def at_output(self, path: str, output: Any) -> None:
        """A module's forward has ended."""
        try:
            if not self.is_on or not graph.can_hook():
                return
            # If nodes that Python has seen stay, a long chain of them cannot be freed (`torch_internals.graph`).
            if graph.nodes_stay and len(self.handles) >= MAX_HOOKED and not self.is_cut:
                self.prune()
                self.is_cut = len(self.handles) >= MAX_HOOKED
            if not self.is_cut:
                self._hook(path, output)
        except Exception:
            self.failures += 1

    def _hook(self, path: str, output: Any) -> None:
        thread = threading.get_ident()
        before = newest = self._newest.get(thread, -1)
        hook = None
        for tensor in (output,) if graph.is_plain(output) else tensors_in(output):
            node = graph.node_of(tensor)
            number = graph.number_of(node) if node is not None else -1
            # Nodes are numbered in order. An older one belongs to a module inside this one, or before it.
            if number > before:
                if hook is None:
                    line = self._line_of(sys._getframe(2), thread == self._owner)
                    hook = self._hooks.get((path, line))  # steps call the same ones again and again
                    if hook is None:
                        mark = marker.setter(MarkKind.BACKWARD_OF, path)
                        hook = self._hooks[path, line] = self._new_hook(mark, line)
                self.handles.append(node.register_prehook(hook))
                newest = max(newest, number)
        self._newest[thread] = newest
        if len(self.handles) > self.prune_at:
            self.prune()

    def _new_hook(self, mark: Callable[[], int], line: int) -> Callable[[Any], None]:
        log = self._log

        # Backward has reached the node, in any thread. In compiled backward this has no effect.
        def reached(gradients: Any) -> None:
            if is_dynamo_compiling():
                return
            if self.is_on:
                log.append((mark(), line))

        return reached

    def prune(self) -> None:
        """Drop the handles of nodes that are gone."""
        self.handles = [handle for handle in self.handles if graph.is_alive(handle)]
        self.prune_at = max(4096, 2 * len(self.handles))


def tensors_in(output: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The plain tensors in the output of a module: also in tuples, lists, dicts and dataclasses.

    It calls no method that a user's class could define.
    """
    if graph.is_plain(output):
        yield output
    if not depth or graph.is_plain(output):
        return
    kind, items = type(output), list[Any]()
    if issubclass(kind, tuple):
        items = [tuple.__getitem__(output, index) for index in range(tuple.__len__(output))]
    elif issubclass(kind, list):
        items = [list.__getitem__(output, index) for index in range(list.__len__(output))]
    elif issubclass(kind, dict):
        items = list(dict.values(output))
    elif any("__dataclass_fields__" in _namespace(base) for base in _mro(kind)):
        try:
            values = object.__getattribute__(output, "__dict__")
        except AttributeError:  # instances with slots are skipped
            values = None
        items = list(values.values()) if type(values) is dict else []
    for item in items:
        yield from tensors_in(item, depth - 1)


_mro: Any = type.__dict__["__mro__"].__get__
_namespace: Any = type.__dict__["__dict__"].__get__
