"""Marks of phases and modules, without touching the user's code: global module and optimizer hooks, one engine entry.

One reference-counted marker per process. Hooks of modules inside a compiled region do not fire; the region stays
compiled and its memory counts for the module that was called. Work that other threads start has no marks, except on the
threads of the autograd engine.

Limits: a forward that is no `nn.Module` leaves no mark, nor does one that is compiled in place (`module.compile()`),
within a compiled function, or a compiled optimizer step; backward started from C++ alone is not seen. After an
interrupted forward the module counts as running until a later mark ends it: PyTorch calls no hook then.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
import warnings
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import time_ns
from typing import Any, Protocol

import numpy as np
import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memlab import seams
from memlab.names.roots import name_of
from memlab.seams import compiler
from memlab.seams.dispatch import DisableTorchFunction
from memlab.trace.columns import Array, Events, MarkKind, Marks
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE, Steps, recording, resolve
from memlab.trace.trace import Gap

MAX_MARKS = 2_000_000
"""How many marks are kept (20 bytes each); older ones go."""

_KINDS = len(MarkKind)
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class MarkColumns:
    """Marks in order of time: nanoseconds of the Unix clock, kind, name (index into `texts`)."""

    time_ns: Array
    kind: Array
    name: Array
    texts: tuple[str, ...]
    left_out: int = 0
    """How many marks of other threads' work are not among these."""

    def gaps(self) -> tuple[Gap, ...]:
        """What the work of other threads hides."""
        text = "other threads ran modules, optimizers or backwards too: their work has no phases, modules and lines of its own"
        return (Gap("other threads' work", text),) if self.left_out else ()

    def steps(self) -> tuple[Steps, Steps]:
        """The phase, and the innermost module, over time."""
        return resolve(self.time_ns, self.kind.tolist(), self.name.tolist(), self.texts)

    def recording(self) -> Steps:
        """Whether autograd recorded in the outermost module that was running, over time."""
        return recording(self.time_ns, self.kind.tolist(), self.name.tolist())

    def since(self, start_ns: int) -> MarkColumns:
        """The same marks with times since `start_ns`."""
        return dataclasses.replace(self, time_ns=self.time_ns - start_ns)

    def table(self, events: Events, first_row: int, start_ns: int) -> Marks:
        """The marks as a table of a trace: between which events each one fell; what is dated by a mark came before it."""
        times = self.time_ns - start_ns
        row = first_row + np.searchsorted(events.time_ns[first_row:], times, side="right")
        return Marks(row, times, self.kind, self.name)


class Watch(Protocol):
    """Who wants to know which modules, gradients and optimizers there are, in the thread that works."""

    def met(self, root: Any) -> None:
        """A module was called for the first time, from outside of any that was known."""

    def called(self, root: Any, args: Any, kwargs: Any) -> None:
        """The forward of an outermost module has ended, or failed."""

    def backward_ended(self) -> None:
        """The engine has finished, or failed."""

    def stepping(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""

    def everything_alive(self) -> None:
        """Look at all that is there."""


class Marker:
    """Sets marks while somebody uses it.

    Calls are made in the thread that works, if they are set: `quiet` after each optimizer step, `at_module` before each
    forward of a module, `at_output` after it with the module's path and its output, and those of `watch`. `clocks` are asked
    for the time of each mark, the last one counts: a tally dates by it what has happened so far.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.quiet: Callable[[], None] | None = None
        self.at_module: Callable[[], None] | None = None
        self.at_output: Callable[[str, Any], None] | None = None
        self.watch: Watch | None = None
        self._clocks: tuple[Callable[[], int], ...] = ()
        self._now: Callable[[], int] = time_ns
        self.watch_failures: Counter[str] = Counter()
        self._new: deque[tuple[int, int, int]] = deque()
        self._module_codes: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._key = -next(_numbers)
        self._hooks = self._module_hooks()
        self._reset()

    def _reset(self) -> None:
        self._new.clear()
        self._module_codes.clear()
        self._roots: set[int] = set()
        self.watch_failures.clear()
        self._times, self._codes, self._threads = array("q"), array("l"), array("Q")
        self._names: dict[str, int] = {}
        self._texts: list[str] = []
        self._handles: list[Any] = []
        self._callbacks: Any = None
        self._users_engine: Callable[..., Any] | None = None
        self._our_engine: Callable[..., Any] | None = None
        self.dropped = 0

    # --- on and off -------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Begin to mark, or join those who do."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                self._install()

    def release(self) -> None:
        """Stop with the last user; hooks and engine entry are then as before."""
        with self.lock:
            self.users -= 1
            if not self.users:
                self._remove()
                self._reset()

    def _install(self) -> None:
        step_before, step_after = self._optimizer_hooks()
        self._handles = [register_optimizer_step_pre_hook(step_before), register_optimizer_step_post_hook(step_after)]
        warnings.filters.insert(0, _HOOKS_WARNING)  # type: ignore[attr-defined]  # and not through filterwarnings, which shows old warnings again
        self._show()
        self._watch_compiler()
        self._users_engine = seams.engine_entry()
        self._our_engine = self._engine(self._users_engine)
        seams.replace_engine_entry(self._our_engine)

    def _remove(self) -> None:
        self._hide()
        for handle in self._handles:
            handle.remove()
        if self._callbacks is not None:
            compiler.forget_compilations(self._callbacks, self._hide, self._show)
        warnings.filters[:] = [one for one in warnings.filters if one is not _HOOKS_WARNING]  # type: ignore[index]
        # Somebody may have wrapped the entry after us; then ours stays inside theirs and only passes calls on.
        if self._users_engine is not None and seams.engine_entry() is self._our_engine:
            seams.replace_engine_entry(self._users_engine)

    # --- torch.compile guards on hooks: hidden from it or always the same ones, as its version needs -------------------

    def _watch_compiler(self) -> None:
        if compiler.HIDES_HOOKS:
            self._callbacks = compiler.watch_compilations(self._hide, self._show)

    def _hide(self, *_: Any) -> None:
        compiler.hide_module_hooks(self._key)

    def _show(self, *_: Any) -> None:
        if self.users:
            compiler.show_module_hooks(self._key, *self._hooks)

    @property
    def clocks(self) -> tuple[Callable[[], int], ...]:
        """Who is asked for the time of a mark; nobody: the clock of the machine."""
        return self._clocks

    @clocks.setter
    def clocks(self, clocks: tuple[Callable[[], int], ...]) -> None:
        self._clocks = clocks
        self._now = (clocks[0] if clocks else time_ns) if len(clocks) < 2 else self._ask_all

    def _ask_all(self) -> int:
        return [clock() for clock in self.clocks][-1]

    # --- the hooks: these run in the user's steps, a few hundred times each -------------------------------------------

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        add, codes, new_code, tell = self._new.append, self._module_codes, self._module_code, self.tell
        begin, end, no_grad = int(MarkKind.MODULE_BEGIN), int(MarkKind.MODULE_END), int(MarkKind.MODULE_BEGIN_NO_GRAD)

        # Where Dynamo traces the hooks all the same, the question is a constant to it, and nothing of them stays.
        def before(module: torch.nn.Module, inputs: Any) -> None:
            if is_dynamo_compiling():
                return
            code = codes.get(module)
            if code is None:
                code = new_code(module)
                tell("met", module)
            add((self._now(), code + (begin if is_grad_enabled() else no_grad), get_ident()))
            if self._callbacks is None and compiler.compiler_is_loaded():
                self._watch_compiler()
            if self.at_module is not None:
                self.at_module()

        # With the arguments by name and the output; after an error PyTorch leaves the names out.
        def after(module: torch.nn.Module, inputs: Any, *more: Any) -> None:
            if is_dynamo_compiling():
                return
            code = codes.get(module)
            code = new_code(module) if code is None else code
            add((self._now(), code + end, get_ident()))
            if code in self._roots:
                tell("called", module, inputs, more[0] if len(more) == 2 else None)
            if self.at_output is not None:
                self.at_output(self._texts[code // _KINDS], more[-1])

        return before, after

    def _optimizer_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        add = self._new.append
        plain, with_closure = self._code(OPTIMIZER), self._code(OPTIMIZER_WITH_CLOSURE)

        def code_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            return plain if closure is None else with_closure

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_dynamo_compiling():
                return
            self.tell("stepping", optimizer)
            add((self._now(), code_of(args, kwargs) + MarkKind.PHASE_BEGIN, get_ident()))

        def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_dynamo_compiling():
                return
            add((self._now(), code_of(args, kwargs) + MarkKind.PHASE_END, get_ident()))
            self.tell("stepped", optimizer)
            if self.quiet is not None:
                self.quiet()

        return before, after

    def _engine(self, users: Callable[..., Any]) -> Callable[..., Any]:
        add, code = self._new.append, self._code(BACKWARD)

        @functools.wraps(users)
        def engine(*args: Any, **kwargs: Any) -> Any:
            if not self.users:
                return users(*args, **kwargs)
            add((self._now(), code + MarkKind.PHASE_BEGIN, get_ident()))
            try:
                return users(*args, **kwargs)
            finally:
                add((self._now(), code + MarkKind.PHASE_END, get_ident()))
                self.tell("backward_ended")

        return engine

    def tell(self, what: str, *about: Any) -> None:
        """Tell the watch; what fails there is counted, and never the user's."""
        if self.watch is None:
            return
        try:
            with DisableTorchFunction():
                getattr(self.watch, what)(*about)
        except Exception as error:
            self.watch_failures[f"{what} ({type(error).__name__})"] += 1

    def add(self, kind: MarkKind, text: str) -> None:
        """Set a mark now."""
        self._new.append((self._now(), self._code(text) + kind, get_ident()))

    def setter(self, kind: MarkKind, text: str) -> Callable[[], int]:
        """A function that sets this mark and gives its moment, for places that are passed often; good while the marker is on."""
        add, code = self._new.append, self._code(text) + kind

        def set_mark() -> int:
            now = self._now()
            add((now, code, get_ident()))
            return now

        return set_mark

    # --- names ------------------------------------------------------------------------------------------------------

    def _code(self, text: str) -> int:
        number = self._names.get(text)
        if number is None:
            with self.lock:
                self._texts.append(text)
                number = self._names.setdefault(text, len(self._texts) - 1)
        return number * _KINDS

    def _module_code(self, module: torch.nn.Module) -> int:
        """Name a module that is met for the first time, and all below it, after what the notebook calls the outermost."""
        if module not in self._module_codes:
            self.know(module, name_of(module) or type(module).__name__)
        return self._module_codes[module]

    def know(self, root: torch.nn.Module, name: str) -> None:
        """Name a module and all below it that have no name yet; a second module of the same name gets a number."""
        if root not in self._module_codes:
            numbers = (f"{name}#{number}" for number in itertools.count(2))
            name = next(one for one in itertools.chain([name], numbers) if one not in self._names)
            self._roots.add(self._code(name))
        for path, child in root.named_modules():
            if child not in self._module_codes:
                self._module_codes[child] = self._code(f"{name}.{path}" if path else name)

    def path_of(self, module: torch.nn.Module) -> str:
        """What a module is called in the marks."""
        return self._texts[self._module_code(module) // _KINDS]

    # --- reading ----------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Move new marks to the columns; cheap, called by the sampler and at the end."""
        with self.lock:
            for _ in range(len(self._new)):
                moment, code, thread = self._new.popleft()
                self._times.append(moment)
                self._codes.append(code)
                self._threads.append(thread)
            if len(self._times) > MAX_MARKS:
                self._drop_oldest_half()

    def _drop_oldest_half(self) -> None:
        half = len(self._times) // 2
        for column in (self._times, self._codes, self._threads):
            del column[:half]
        self.dropped += half

    @property
    def count(self) -> int:
        """How many marks were ever collected."""
        return self.dropped + len(self._times)

    def columns(self, begin_ns: int, end_ns: int, owner: int, since: int = 0) -> MarkColumns:
        """The marks of a stretch of time that belong to the work of thread `owner`; `since` skips the first so many."""
        self.collect()
        with self.lock:
            skip = max(since - self.dropped, 0)
            times, codes, threads = (np.array(c[skip:]) for c in (self._times, self._codes, self._threads))
            texts = tuple(self._texts)
        inside = (times >= begin_ns) & (times <= end_ns)
        times, codes, threads = times[inside], codes[inside].astype(np.int64), threads[inside]
        order = np.argsort(times, kind="stable")
        keep = order[self._owned(codes[order], threads[order] == owner)]
        kinds, names = (codes[keep] % _KINDS).astype("u1"), (codes[keep] // _KINDS).astype("<i4")
        return MarkColumns(times[keep], kinds, names, texts, len(order) - len(keep))

    def _owned(self, codes: Array, by_owner: Array) -> Array:
        """The owner's marks, and those of any thread while the owner waits for the engine (it runs backward for it)."""
        code = self._names[BACKWARD] * _KINDS
        change = (codes == code + MarkKind.PHASE_BEGIN).astype(np.int64) - (codes == code + MarkKind.PHASE_END)
        in_backward = np.cumsum(change * by_owner) > 0
        return by_owner | in_backward


# Compiled modules warn of global hooks that would fire for them as well; ours are meant to, and the cell must not tell.
_HOOKS_WARNING = (
    "ignore",
    re.compile("Using `torch.compile.module.` when there are global hooks"),
    UserWarning,
    None,
    0,
)


marker = Marker()
"""The marker of this process."""
