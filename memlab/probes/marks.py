"""Marks of phases and modules, set by global hooks on modules and optimizers and a wrapper of the autograd engine's entry.

There is one marker per process, shared by its users. A compiled module stays compiled: modules inside it get no marks, and
their memory counts for the module that was called. Other threads have no marks, except the autograd engine's.

Limits: a forward that is not an `nn.Module` has no mark, nor has one that is compiled in place (`module.compile()`) or within a
compiled function, nor a compiled optimizer step, nor backward started from C++. After an interrupted forward the module
counts as running until a later mark ends it: PyTorch calls no hook then.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import time_ns
from types import CellType, CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memlab import torch_internals
from memlab.probes.bounded_log import BoundedLog
from memlab.probes.rows import users_line
from memlab.references.named_models import name_of
from memlab.torch_internals import compiler
from memlab.torch_internals.dispatch import DisableTorchFunction
from memlab.torch_internals.frames import locals_of
from memlab.trace.columns import MODULE_BEGINS, Array, Events, MarkKind, Marks
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE, Steps, recording, resolve
from memlab.trace.trace import Gap

MAX_MARKS = 2_000_000
"""How many marks are kept (24 bytes each); older ones are dropped."""

_FRAMES_TO_OWNER = 8  # the hook, and what of torch is between it and the caller of a module
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
    bypassed: tuple[str, ...] = ()
    """Modules without marks whose class has a `__call__` of its own, which may run no hooks."""

    def gaps(self) -> tuple[Gap, ...]:
        """The gaps if other threads had marks, and if modules had none."""
        text = "other threads ran modules, optimizers or backwards too: their work has no phases, modules and lines of its own"
        gaps = [Gap("other threads' work", text)] if self.left_out else []
        if self.bypassed:
            first = ", ".join(self.bypassed[:3]) + (", ..." if len(self.bypassed) > 3 else "")
            text = f"{first}: a __call__ of its own runs no hooks; what was allocated in it counts for the module that calls it"
            gaps.append(Gap("modules", text))
        return tuple(gaps)

    def steps(self) -> tuple[Steps, Steps]:
        """The phase, and the innermost module, over time."""
        return resolve(self.time_ns, self.kind.tolist(), self.name.tolist(), self.texts)

    def recording(self) -> Steps:
        """Whether autograd recorded in the outermost running module, over time."""
        return recording(self.time_ns, self.kind.tolist(), self.name.tolist())

    def table(self, events: Events, first_row: int) -> Marks:
        """The marks as a table of a trace; events at the time of a mark precede it."""
        row = first_row + np.searchsorted(events.time_ns[first_row:], self.time_ns, side="right")
        return Marks(row, self.time_ns, self.kind, self.name)


def _owner_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module whose method called this one, its part, from outside of any forward, as Lightning's `training_step` does."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_OWNER):
        frame = frame.f_back if frame is not None else None
        if frame is None or not frame.f_code.co_argcount:
            continue
        first = frame.f_code.co_varnames[0]
        owner = next((value for name, value in locals_of(frame) if name == first), None)
        owner = owner.cell_contents if type(owner) is CellType else owner
        if isinstance(owner, torch.nn.Module) and owner is not module:
            return owner if any(part is module for part in owner.modules()) else None
    return None


class Marker:
    """Sets marks while it has users, and calls its listeners in the working thread.

    `quiet` is called after each optimizer step and backward, and after a module once the time that it returned has come;
    `at_module` before each forward of a module. The `backwards` get `at_output` after it, with the module's path and output,
    and `at_engine` before and after the engine runs (see `backward.Backward`).
    `watch` is notified of objects (see `tell` and `tensor_labels.TensorLabels`). The time of a mark is that of the last of
    `clocks`, all of which are called: a tracker dates its events so far with it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.quiet = None
        self.at_module: tuple[Callable[[], None], ...] = ()
        self.backwards: tuple[Any, ...] = ()
        self.watch: Any = None
        self._clocks: tuple[Callable[[], int], ...] = ()
        self._now: Callable[[], int] = time_ns
        self.watch_failures: Counter[str] = Counter()
        self.log = BoundedLog(MAX_MARKS, 3, self.thinned)  # time, code, thread
        # By id, and a reference that takes the id away when the module is gone: a WeakKeyDictionary makes a reference and
        # compares it at every look, and there are two for each module of each step.
        self.module_codes: dict[int, int] = {}
        self.modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._key = -next(_numbers)
        self._hooks = self._module_hooks()
        self._reset()

    def _reset(self) -> None:
        self.log.clear()
        self.module_codes.clear()
        self.modules.clear()
        self._roots: set[int] = set()
        self._own_calls: set[int] = set()  # names of modules that override `__call__`
        self.watch_failures.clear()
        self._names: dict[str, int] = {}
        self._texts: list[str] = []
        self._handles: list[Any] = []
        self._callbacks: Any = None
        self._users_engine: Callable[..., Any] | None = None
        self._our_engine: Callable[..., Any] | None = None

    def thinned(self, rows: Array) -> Array:
        """The newer half, and of the older one the steps of optimizers, by which the ranks of a job are aligned."""
        half = len(rows) // 2
        of_steps = [self._names.get(name, -1) for name in (OPTIMIZER, OPTIMIZER_WITH_CLOSURE)]
        steps = np.isin(rows[:half, 1] // _KINDS, of_steps)
        older = rows[:half][steps][-len(rows) // 4 :]
        return np.concatenate([older, rows[half:]])

    def acquire(self) -> None:
        """Start marking, or join the other users."""
        with self.lock:
            self.users += 1
            if self.users > 1:
                return
            before, after = self._optimizer_hooks()
            self._handles = [
                register_optimizer_step_pre_hook(before),
                register_optimizer_step_post_hook(after),
                register_module_parameter_registration_hook(
                    lambda _, __, parameter: self.tell("registered", parameter)
                ),
            ]
            # Not by filterwarnings, which shows old warnings again.
            warnings.filters.insert(0, _HOOKS_WARNING)  # type: ignore[attr-defined]
            self._show()
            self._watch_compiler()
            self._users_engine = torch_internals.engine_entry()
            self._our_engine = self._engine(self._users_engine)
            torch_internals.replace_engine_entry(self._our_engine)

    def release(self) -> None:
        """Stop with the last user: restore hooks and engine entry."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
            self._hide()
            for handle in self._handles:
                handle.remove()
            if self._callbacks is not None:
                compiler.forget_compilations(self._callbacks, self._hide, self._show)
            warnings.filters[:] = [one for one in warnings.filters if one is not _HOOKS_WARNING]  # type: ignore[index]
            # Other code may have wrapped the entry after us; then ours stays inside theirs and only forwards calls.
            if self._users_engine is not None and torch_internals.engine_entry() is self._our_engine:
                torch_internals.replace_engine_entry(self._users_engine)
            self._reset()

    # torch.compile guards on hooks: hidden from it or always the same ones, as its version needs.

    def _watch_compiler(self) -> None:
        if compiler.HIDES_HOOKS:
            self._callbacks = compiler.watch_compilations(self._hide, self._show)

    def _hide(self, *_: Any) -> None:
        compiler.hide_module_hooks(self._key)

    def _show(self, *_: Any) -> None:
        if self.users:
            compiler.show_module_hooks(self._key, *self._hooks)

    @property
    def quiet(self) -> Callable[[str], int] | None:
        """What is called in a quiet moment; it gives the time from which modules are such moments again."""
        return self._quiet

    @quiet.setter
    def quiet(self, quiet: Callable[[str], int] | None) -> None:
        self._quiet, self._quiet_from_ns = quiet, sys.maxsize if quiet is None else 0

    @property
    def clocks(self) -> tuple[Callable[[], int], ...]:
        """The functions that are called for the time of a mark."""
        return self._clocks

    @clocks.setter
    def clocks(self, clocks: tuple[Callable[[], int], ...]) -> None:
        self._clocks = clocks
        alone = clocks[0] if clocks else time_ns
        self._now = alone if len(clocks) < 2 else lambda: [clock() for clock in clocks][-1]

    # --- the hooks: these run in the user's steps, a few hundred times each -------------------------------------------

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        add, new_code, tell = self.log.append, self._module_code, self.tell
        code_of, loaded, hides = self.module_codes.get, sys.modules, compiler.HIDES_HOOKS
        begin, end, no_grad = int(MarkKind.MODULE_BEGIN), int(MarkKind.MODULE_END), int(MarkKind.MODULE_BEGIN_NO_GRAD)

        # If Dynamo still traces the hooks, this condition is a constant to it, and they compile to nothing.
        def before(module: torch.nn.Module, inputs: Any) -> None:
            if is_dynamo_compiling():
                return
            code = code_of(id(module))
            if code is None:
                code = new_code(module)
                tell("met", module)
            add((self._now(), code + (begin if is_grad_enabled() else no_grad), get_ident()))
            if hides and self._callbacks is None and compiler.COMPILER_MODULE in loaded:
                self._watch_compiler()
            for call in self.at_module:
                call()

        # With the arguments by name and the output; after an error PyTorch leaves the names out.
        def after(module: torch.nn.Module, inputs: Any, *more: Any) -> None:
            if is_dynamo_compiling():
                return
            code = code_of(id(module))
            code = new_code(module) if code is None else code
            add((now := self._now(), code + end, get_ident()))
            if code in self._roots:
                tell("called", module, inputs, more[0] if len(more) == 2 else None)
            for one in self.backwards:
                one.at_output(self._texts[code // _KINDS], more[-1])
            if now > self._quiet_from_ns:
                self._let_read("module")

        return before, after

    def _optimizer_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        add, plain, with_closure = self.log.append, self.code_of(OPTIMIZER), self.code_of(OPTIMIZER_WITH_CLOSURE)

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
            self._let_read(OPTIMIZER)

        return before, after

    def _engine(self, users: Callable[..., Any]) -> Callable[..., Any]:
        add, code = self.log.append, self.code_of(BACKWARD)

        @functools.wraps(users)
        def engine(*args: Any, **kwargs: Any) -> Any:
            if not self.users:
                return users(*args, **kwargs)
            for one in self.backwards:
                one.at_engine(begins=True)
            try:  # an interrupt may arrive anywhere below
                if line := users_line(sys._getframe(1)):  # the engine's allocations have no Python frames
                    add((self._now(), self.code_of(line) + MarkKind.BACKWARD_CALL, get_ident()))
                add((self._now(), code + MarkKind.PHASE_BEGIN, get_ident()))
                try:
                    return users(*args, **kwargs)
                finally:
                    add((self._now(), code + MarkKind.PHASE_END, get_ident()))
                    self.tell("backward_ended")
                    self._let_read(BACKWARD)
            finally:
                for one in self.backwards:
                    one.at_engine(begins=False)

        return engine

    def tell(self, what: str, *about: Any) -> None:
        """Notify the watch. An error there is counted and never reaches the user."""
        if self.watch is None:
            return
        try:
            with DisableTorchFunction():
                getattr(self.watch, what)(*about)
        except Exception as error:
            self.watch_failures[f"{what} ({type(error).__name__})"] += 1

    def _let_read(self, after: str) -> None:
        """Between two operators the listener may read the allocator's history. An error there never reaches the user."""
        if self._quiet is None:
            return
        try:
            self._quiet_from_ns = self._quiet(after)
        except Exception as error:
            self.watch_failures[f"reading history ({type(error).__name__})"] += 1

    def setter(self, kind: MarkKind, text: str) -> Callable[[], int]:
        """A fast function that sets this mark and returns its time; it works as long as the marker has users."""
        add, code = self.log.append, self.code_of(text) + kind

        def set_mark() -> int:
            now = self._now()
            add((now, code, get_ident()))
            return now

        return set_mark

    def code_of(self, text: str) -> int:
        """The number under which the log keeps a text."""
        number = self._names.get(text)
        if number is None:
            with self.lock:
                self._texts.append(text)
                number = self._names.setdefault(text, len(self._texts) - 1)
        return number * _KINDS

    def _module_code(self, module: torch.nn.Module) -> int:
        """The code of a module. A new one and all modules in it are named after the variable that holds it."""
        if id(module) not in self.module_codes:
            owner = _owner_of(module) if not name_of(module) else None
            if owner is not None:  # itself it is never called: its parts are the outermost modules
                self.know(owner, name_of(owner) or type(owner).__name__)
                self._roots.update(self.module_codes[id(part)] for part in owner.children())
                self.tell("met", owner)
            self.know(module, name_of(module) or type(module).__name__)
        return self.module_codes[id(module)]

    def know(self, root: torch.nn.Module, name: str) -> None:
        """Name a module and its unnamed submodules; a second module of the same name gets a number."""
        if id(root) not in self.module_codes:
            numbers = (f"{name}#{number}" for number in itertools.count(2))
            name = next(one for one in itertools.chain([name], numbers) if one not in self._names)
            self._roots.add(self.code_of(name))
        for path, child in root.named_modules():
            if id(child) not in self.module_codes:
                code = self.code_of(f"{name}.{path}" if path else name)
                self._number_module(child, code)
                if type(child).__call__ is not torch.nn.Module.__call__:
                    self._own_calls.add(code // _KINDS)

    def _number_module(self, module: torch.nn.Module, code: int) -> None:
        """Note the code of a module as long as it is alive."""
        key, codes, modules = id(module), self.module_codes, self.modules

        def gone(_: Any) -> None:
            codes.pop(key, None)
            modules.pop(key, None)

        modules[key] = weakref.ref(module, gone)
        codes[key] = code

    def path_of(self, module: torch.nn.Module) -> str:
        """The name of a module in the marks."""
        return self._texts[self._module_code(module) // _KINDS]

    def columns(self, begin_ns: int, end_ns: int, owner: int, since: int = 0) -> MarkColumns:
        """The marks of a time range that belong to thread `owner`, without the first `since`."""
        with self.lock:
            rows, texts = self.log.columns(since), tuple(self._texts)
        rows = rows[:, (rows[0] >= begin_ns) & (rows[0] <= end_ns)]
        times, codes, threads = rows[:, np.argsort(rows[0], kind="stable")]
        # The owner's marks, and those of any thread while the owner waits for the engine (it runs backward for it).
        by_owner, backward = threads == owner, self._names[BACKWARD] * _KINDS
        change = (codes == backward + MarkKind.PHASE_BEGIN).astype(np.int64) - (codes == backward + MarkKind.PHASE_END)
        is_kept = by_owner | (np.cumsum(change * by_owner) > 0)
        names, kinds = np.divmod(codes[is_kept], _KINDS)
        called = {texts[name] for name in np.unique(names[np.isin(kinds, MODULE_BEGINS)])} if self._own_calls else set()
        missing = sorted(texts[name] for name in tuple(self._own_calls) if texts[name] not in called)
        bypassed = tuple(one for one in missing if any(f"{caller}." == one[: len(caller) + 1] for caller in called))
        columns = (times[is_kept], kinds.astype("u1"), names.astype("<i4"), texts, int((~is_kept).sum()))
        return MarkColumns(*columns, bypassed)


# Compiled modules warn about global hooks; ours are intended, and the cell must not show a warning.
_HOOKS_TEXT = re.compile("Using `torch.compile.module.` when there are global hooks")
_HOOKS_WARNING = ("ignore", _HOOKS_TEXT, UserWarning, None, 0)


marker = Marker()
"""The marker of this process."""

ENGINE_CODE: CodeType = next(
    one for one in Marker._engine.__code__.co_consts if getattr(one, "co_name", "") == "engine"
)
"""The code of what wraps the autograd engine's entry, whose frame is in the traceback of an error in backward."""
