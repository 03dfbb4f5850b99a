"""A lean dispatch mode that watches the CPU storages that operators make, and the ones alive before it.

Exact to the byte for storages that come out of operators. It does not see scratch inside operators, other Python
threads, compiled code, or memory that no tensor owns; `StorageTracker.gaps` names those. It keeps no tensor alive and runs no
operator of its own. A user's operator must never fail because of it: what it cannot handle is counted in
`StorageTracker.unseen`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memlab.errors import ProbeError
from memlab.probes.marks import marker
from memlab.probes.storage_log import ROOM, Births, Books, Replaced, StorageRef
from memlab.references.live_tensors import describe, holds_memory, is_leaf, live_tensors
from memlab.torch_internals import dispatch
from memlab.torch_internals.objects import function_of, function_or_itself, schema_if_any, schema_of
from memlab.torch_internals.replacement import Replacement
from memlab.trace.trace import Gap

GIVE_UP_AFTER = 2_000
"""The search for older storages in backward ends after this many operators without one."""
UNWRITTEN = 1023
"""The log is written at least once per this many allocations (a mask: one less than a power of two)."""
NOTHING: dict[Any, int] = {}
"""Marker for operators that return one of their arguments."""
RESIZE = "UntypedStorage.resize_"
NEW_THOUGH_ALIAS = frozenset({"aten::lift_fresh", "aten::lift", "aten::set_", "aten::resize_", "aten::resize_as_"})
"""Operators that return an alias of a storage that no operator has returned before: it counts as new there."""

function_modes = dispatch.function_mode_count
Tensor, Parameter = torch.Tensor, torch.nn.Parameter
TensorBase: Any = dispatch.TensorBase


class StorageTracker(dispatch.OperatorMode):
    """Counts the bytes of CPU storages from `start` to `stop`, in the thread that starts it; any thread may read the totals.

    The order of events is exact; a free gets the time at which it is noticed: at the next allocation, `mark` or reading.
    """

    supports_higher_order_operators = True

    def __init__(
        self, clock_ns: Callable[[], int] = time.time_ns, *, shapes: bool = False, max_events: int = 2_000_000
    ) -> None:
        super().__init__()
        if max_events < 16 * ROOM:
            raise ProbeError(f"max_events is {max_events}; give at least {16 * ROOM}, or the curve says little")
        self._clock, self._shapes = clock_ns, shapes
        self._books, self._births = Books(max_events, clock_ns), Births()
        self._born: dict[Any, dict[Any, int]] = {}
        self._live: dict[int, StorageRef] = {}
        self._plain: set[tuple[type, ...]] = {(Parameter,)}
        self._log: deque[Any] = deque()
        # A C function as the callback of weak references: Python code there would swallow Ctrl-C, which is raised
        # between two bytecodes, and lose the free with it.
        self._append = self._log.append
        self._had_graph = False
        self.older = 0  # how many blocks were found at the start
        self._count, self._older, self._idle, self._alive_last = 0, False, 0, 0
        self._thread, self._state, self._inferred = 0, "new", False
        self.saw_accelerator = self._saw_collective = False
        self.unseen: Counter[str] = Counter()  # what could not be handled
        self.resized = self._late = self._borrowed = self._borrowed_bytes = 0

    def start(self, live: Iterable[Any] | None = None) -> None:
        """Log the live storages (`live`, if just listed), then watch this thread's operators."""
        if self._state != "new":
            raise ProbeError(f"this tracker is {self._state}: a StorageTracker runs once, make another")
        self._books.started_ns, self._thread = self._clock(), threading.get_ident()
        self.add_preexisting(live_tensors() if live is None else live)
        self.older = self._count
        self._books.write(self._log)
        self._state = "running"
        # Trackers that another thread had to stop: only their own thread can reach its stack of modes.
        for mode in dispatch.modes():
            if isinstance(mode, StorageTracker) and mode._state == "stopped" and mode._may_remove():
                dispatch.remove_mode(mode)
        self._inferred = torch.is_inference_mode_enabled()
        resizes.follow(self)
        dispatch.push_mode(self)

    def stop(self) -> bool:
        """Stop, wherever it is on the stack of modes; False if only its own thread could remove it."""
        resizes.forget(self)
        removed = self._state != "running" or (self._may_remove() and dispatch.remove_mode(self))
        for known in list(self._live.values()):  # storages resized without an operator and not checked since
            storage = known()
            if storage is not None and storage.nbytes() != known.nbytes:
                self._resize(known, storage, None, None)
        self._books.write(self._log)
        self._state = "stopped"
        self._live.clear()
        return removed

    def retire(self) -> bool:
        """Stop watching operators if this mode is on top of the stack, else return False. Frees are seen until `stop`."""
        if self._state != "running":
            return True
        if not self._may_remove() or dispatch.top_mode() is not self:
            return False
        dispatch.remove_mode(self)
        self._state = "retired"
        return True

    def _may_remove(self) -> bool:
        return threading.get_ident() == self._thread and dispatch.may_remove(self._inferred)

    def mark(self) -> int:
        """The time now, for marks of phases and modules; no earlier event will get a later time."""
        now = self._clock()
        try:
            if type(self._log[-1]) is int:
                return now  # earlier events get the earlier time
        except IndexError:
            pass
        self._append(now)
        return now

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""
        return self._books.write(self._log).current

    @property
    def peak_bytes(self) -> int:
        """The peak of bytes alive so far."""
        return self._books.write(self._log).peak

    @property
    def base_bytes(self) -> int:
        """Bytes that were alive at the start, as far as known by now."""
        return self._books.write(self._log).base

    @property
    def events(self) -> int:
        """How many allocations and frees there were since the start, including those thinned out."""
        totals = self._books.write(self._log)
        return totals.row - totals.preexisting + self._books.lost

    @property
    def lost(self) -> tuple[int, int]:
        """How many early events were thinned out, and the time until which some are missing."""
        return self._books.lost, self._books.lost_until_ns

    def columns(self) -> dict[str, Any]:
        """Events and blocks as numpy arrays, see `columns` of the storage log."""
        self._books.write(self._log)
        return self._books.columns(self._births)

    def gaps(self) -> tuple[Gap, ...]:
        """What this tracker could not see."""
        books = self._books
        named = {
            "operator scratch": "Working memory inside operators (oneDNN, MKL) is not seen; it adds to the peak.",
            "other threads": "Tensors made by other Python threads and processes are seen when this thread uses them.",
        }
        if dispatch.compiled_something():
            named["compiled code"] = (
                "Memory inside compiled functions is not seen; what they return is, once it is used."
            )
        if self._borrowed:
            named["borrowed memory"] = (
                f"{self._borrowed} storages of {self._borrowed_bytes} bytes were not made by an operator (NumPy arrays, "
                "loaded or mapped files, shared memory); they count while a tensor uses them."
            )
        if self._saw_collective:
            named["collectives"] = (
                "Buffers that collectives (gloo) make are seen at their end or not at all; they add to the peak while one runs."
            )
        if self._late:
            named["seen late"] = f"{self._late} storages were first seen some time after they were made."
        if self.resized:
            named["resized unseen"] = (
                f"{self.resized} times a storage was resized by no operator and outside of this thread, and noticed later: in "
                "between the bytes are unknown, and so is whether the peak was higher."
            )
        if books.lost:
            named["thinned"] = (
                f"{books.lost} early events of blocks up to {books.lost_largest_bytes} bytes were dropped to bound memory; "
                "the peak and what held it are exact, the curve in the early part can be too low."
            )
        unseen = (Gap("unseen", f"Not counted: {what}, {times} times.") for what, times in self.unseen.items())
        return (*(Gap(name, text) for name, text in named.items()), *unseen)

    # --- the handler: every line here costs time in every operator ---------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and log the storage it returns."""
        if types and types not in self._plain and self._decline(types):
            return NotImplemented
        try:
            op = function_of(func)  # saves a Python frame
        except AttributeError:
            return self._higher_order(func, args, kwargs or {})
        out = op(*args, **kwargs) if kwargs else op(*args)
        try:
            if self._older:
                self._look_at_inputs(args)
            births = self._born.get(op)
            if births is NOTHING:
                return out  # as an optimizer's many, which write in place
            if births is None:
                births = self._born[op] = NOTHING if gives_nothing_new(func) else {}
                self._saw_collective |= "c10d" in func.namespace
            kind = type(out)
            if function_modes():
                with dispatch.DisableTorchFunction():
                    self._look_around(out, func, births)
            elif kind is Tensor or kind is Parameter:
                self._look(out, func, births)
            elif out is not None:
                self._look_around(out, func, births)
        except Exception as error:
            self.unseen[f"what {func} returned ({type(error).__name__})"] += 1
        return out

    def _look(self, tensor: Any, func: Any, births: dict[Any, int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        known: Any = self._live.get(key)
        if known is not None and known() is storage:  # ids are used again
            if known.nbytes != storage.nbytes():
                self._resize(known, storage, func, tensor)
            return
        birth = births.get((tensor.dtype, tensor.shape) if self._shapes else tensor.dtype)
        if birth is None or not tensor.is_cpu:
            self._meet(storage, func, tensor)
        else:
            self._note(storage, birth, self._clock())

    def _look_around(self, out: Any, func: Any, births: dict[Any, int]) -> None:
        """The same for results that are not one plain tensor: lists, subclasses, and objects without memory."""
        kind = type(out)
        if kind is tuple or kind is list:
            for item in out:
                if type(item) is Tensor:
                    self._look(item, func, births)
                elif item is not None:
                    self._look_around(item, func, births)
        elif issubclass(kind, Tensor):
            # A subclass may misreport its device, as fake tensors do: check its storage.
            with dispatch.DisableTorchFunction():
                storage = TensorBase.untyped_storage(out)
                known: Any = self._live.get(id(storage))
                if known is None or known() is not storage:
                    if holds_memory(storage):
                        self._meet(storage, func, out)
                elif known.nbytes != storage.nbytes():
                    self._resize(known, storage, func, out)

    def _note(self, storage: Any, birth: int, time_ns: int) -> None:
        """Log an allocation; time -1: older than the tracker. The log is written first, as Ctrl-C may follow."""
        ref, key = StorageRef(storage, self._append), id(storage)
        ref.key, ref.birth, ref.nbytes, ref.time_ns = key, birth, storage.nbytes(), time_ns
        if not ref.nbytes:
            ref.block = -1
            self._live[key] = ref
            return
        ref.block = block = self._count
        self._count = block + 1
        self._append(ref)
        self._live[key] = ref
        if not block & UNWRITTEN:
            self._books.write(self._log)
            if len(self._live) > UNWRITTEN + 2 * self._alive_last:
                # References to freed storages are dropped here, as other threads would race with the handler.
                self._live = {key: ref for key, ref in self._live.items() if ref() is not None}
                self._alive_last = len(self._live)

    def resized_now(self, storage: Any) -> None:
        """A storage has been resized by no operator, just now."""
        if self._state != "running" or threading.get_ident() != self._thread:
            return
        known: Any = self._live.get(id(storage))
        if known is not None and known() is storage and known.nbytes != storage.nbytes():
            self._replace(known, storage, self._births.number(RESIZE, "", ""))

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        try:
            if isinstance(func, dispatch.HigherOrderOperator):
                self.unseen[f"what happens inside {func}"] += 1
            self._look_around(out, func, {})
        except Exception as error:
            self.unseen[f"what {func} returned ({type(error).__name__})"] += 1
        return out

    def _decline(self, types: Any) -> bool:
        """Whether a tensor class among these should unwrap first, so that its inner operators come here.

        Not a class that only renames Tensor; and not with other modes below ours, which must see the class first (such as
        FakeTensorMode).
        """
        plain = dispatch.plain_torch_dispatch
        if all(kind is Parameter or kind.__torch_dispatch__ is plain for kind in types):
            self._plain.add(types)
            return False
        if not dispatch.mode_count():  # our mode is off the stack inside its handler
            return True
        if not any(kind.__module__.startswith("torch._subclasses.") for kind in types):
            self.unseen[f"what happens inside operators of {types[0].__name__} while another mode is on"] += 1
        return False

    # --- storages seen for the first time -----------------------------------------------------------------------------

    def _meet(self, storage: Any, func: Any, tensor: Any) -> None:
        """A storage that is not known yet: new, or older and only seen now."""
        device = storage.device.type
        if device != "cpu":
            self.saw_accelerator = self.saw_accelerator or device != "meta"
            return
        origin = origin_of(func)
        if origin == "no memory":
            return
        birth = self._birth(func, tensor)
        if origin == "new":
            what = (tensor.dtype, tensor.shape) if self._shapes else tensor.dtype
            self._born.setdefault(function_or_itself(func), {})[what] = birth
        # Whether a storage that no operator here has made is the buffer of a collective, shown by the view of its end. Where a
        # graph was alive at the start it may as well be one of that, in backward.
        elif origin == "older" and self._saw_collective and not self._had_graph:
            self._note(storage, birth, self._clock())
            marker.tell("collective_ended", tensor)
            return
        elif origin == "older" and dispatch.current_autograd_node() is not None:
            self._note(storage, birth, -1)
            return
        else:
            self._borrow(storage)
            self._late += origin == "older"
        self._note(storage, birth, self._clock())

    def _borrow(self, storage: Any) -> None:
        """Count the storage if no operator made it: such memory cannot be resized."""
        if not storage.resizable():
            self._borrowed += 1
            self._borrowed_bytes += storage.nbytes()

    def _birth(self, func: Any, tensor: Any) -> int:
        op = "" if func is None else str(func)
        if tensor is None:
            return self._births.number(op, "", "")
        shape = str(tuple(tensor.shape)) if self._shapes else ""
        return self._births.number(op, str(tensor.dtype).removeprefix("torch."), shape)

    def _resize(self, known: StorageRef, storage: Any, func: Any, tensor: Any) -> None:
        """Log a resized storage. If no operator has done it, it is noticed late, and what happened in between is unknown."""
        self.resized += not may_resize(func)
        self._replace(known, storage, self._birth(func, tensor))

    def _replace(self, known: StorageRef, storage: Any, birth: int) -> None:
        """As in c10, the new bytes are allocated before the old ones are freed."""
        self._note(storage, birth, self._clock())
        if known.block >= 0:
            self._append(Replaced(known.block, known.nbytes))

    def add_preexisting(self, live: Iterable[Any]) -> None:
        """Take in the storages of tensors that were there before."""
        for thing in live:
            try:
                with dispatch.DisableTorchFunction():
                    is_storage = isinstance(thing, torch.UntypedStorage)
                    storage = thing if is_storage else TensorBase.untyped_storage(thing)
                    if storage.device.type != "cpu":
                        continue
                    if not is_storage and not is_leaf(thing):
                        # A live graph may hold storages that no Python object references.
                        self._older = self._had_graph = True
                    if id(storage) not in self._live and (type(thing) in (Tensor, Parameter) or holds_memory(storage)):
                        self._borrow(storage)
                        self._note(storage, self._birth(None, None if is_storage else thing), -1)
            except (NotImplementedError, RuntimeError):
                self.unseen[f"a tensor without one storage of its own, older ({describe(thing)})"] += 1

    def _look_at_inputs(self, args: Any) -> None:
        """In backward, find storages that only an older graph held: they appear as inputs, and most are freed soon after."""
        if dispatch.current_autograd_node() is None:
            return
        self._idle += 1
        self._older = self._idle < GIVE_UP_AFTER
        for arg in args:
            if type(arg) is Tensor and not function_modes() and arg.is_cpu:
                storage = arg.untyped_storage()
                known = self._live.get(id(storage))
                if known is None or known() is not storage:
                    self._idle = 0
                    self._note(storage, self._birth(None, arg), -1)


class Resizes:
    """Tells running trackers of `UntypedStorage.resize_`, by which FSDP makes and frees gathered parameters."""

    def __init__(self) -> None:
        self._lock, self.trackers = threading.Lock(), list[StorageTracker]()
        self._replaced: Replacement | None = None

    def follow(self, tracker: StorageTracker) -> None:
        """Tell this tracker too."""
        with self._lock:
            if not self.trackers:
                self._replaced = Replacement(torch.UntypedStorage, "resize_", _resize)
                self._replaced.put()
            self.trackers.append(tracker)

    def forget(self, tracker: StorageTracker) -> None:
        """Tell it no more; after the last one everything is as it was."""
        with self._lock:
            if tracker in self.trackers:
                self.trackers.remove(tracker)
                if not self.trackers and self._replaced is not None:
                    self._replaced.restore()

    def resize(self, storage: Any, *args: Any, **kwargs: Any) -> Any:
        """Resize a storage and tell."""
        assert self._replaced is not None  # also where ours stays, as somebody has wrapped it
        result = self._replaced.theirs(storage, *args, **kwargs)
        for tracker in tuple(self.trackers):
            try:
                tracker.resized_now(storage)
            except Exception as error:
                tracker.unseen[f"what {RESIZE} did ({type(error).__name__})"] += 1
        return result


def _resize(self: Any, *args: Any, **kwargs: Any) -> Any:
    return resizes.resize(self, *args, **kwargs)


resizes = Resizes()
"""The resizes of this process."""


# --- what an operator's schema says of the storages it returns ---------------------------------------------------------


def origin_of(func: Any) -> str:
    """The origin of a storage not seen before: "new", "handed in" (new, as an alias), "older" or "no memory"."""
    schema = schema_if_any(func)
    if schema is None:
        return "new"
    if schema.name == "aten::_efficientzerotensor":
        return "no memory"
    if all(result.alias_info is None for result in schema.returns):
        return "new"
    is_out = any(argument.is_out for argument in schema.arguments)
    return "handed in" if is_out or schema.name in NEW_THOUGH_ALIAS else "older"


def may_resize(func: Any) -> bool:
    """Whether an operator may resize a storage of an argument."""
    schema = schema_if_any(func)
    if schema is None:
        return False
    return schema.name == "aten::set_" or "resize" in schema.name or any(one.is_out for one in schema.arguments)


def gives_nothing_new(func: Any) -> bool:
    """Whether an operator returns an argument, at the same size (`add_`, but not `resize_`, `set_` or `add.out`).

    Views are excluded except `detach`, which autograd and optimizers call on every gradient: a storage made by no operator is often
    first seen in another view (`torch.from_numpy(a).permute(...)`).
    """
    schema = schema_of(func)
    if schema.name == "aten::detach":
        return True
    results = [result.alias_info for result in schema.returns]
    writes = bool(results) and all(alias is not None and alias.is_write for alias in results)
    return writes and origin_of(func) == "older" and "resize" not in schema.name
