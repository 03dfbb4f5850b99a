"""The CPU probe: a lean dispatch mode that watches the storages operators make, and the ones alive before it.

Exact to the byte for storages that come out of operators. It does not see scratch inside operators, other Python
threads, compiled code, or memory that no tensor owns; `Tally.gaps` names those. It keeps no tensor alive and runs no
operator of its own. A user's operator must never fail because of it: what it does not understand is counted in
`Tally.overlooked`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.errors import ProbeError
from memlab.names.living import describe, holds_memory, living_tensors
from memlab.probes.operators import gives_nothing_new, origin_of
from memlab.probes.overlooked import Overlooked
from memlab.probes.storage_log import ROOM, Births, Books, Replaced, StorageRef, tallied
from memlab.seams import dispatch

function_modes = dispatch.function_mode_count
Tensor, Parameter = torch.Tensor, torch.nn.Parameter
TensorBase: Any = dispatch.TensorBase
GIVE_UP_AFTER = 2_000
"""So many backward operators in a row without a storage older than the tally, and the search for them ends."""
UNWRITTEN = 1023
"""The log is written at least once per so many births (a mask: one less than a power of two)."""


class Tally(TorchDispatchMode):
    """Counts the bytes of CPU storages from `start` to `stop`, on the thread that starts it.

    `current_bytes`, `peak_bytes` and `base_bytes` may be read by any thread while it runs. The order of events is
    exact; a free is dated when something notices it: the next birth, `mark`, or a reading of these.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the handler, 1 microsecond per operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled: what would run instead is not what the user wants to measure."""
        return True

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
        # between two bytecodes, and lose the death with it.
        self._append = self._log.append
        self._count, self._older, self._idle, self._alive_last = 0, False, 0, 0
        self._thread, self._state, self._inferred = 0, "new", False
        self.saw_accelerator = False
        self.overlooked = Overlooked()

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt the storages alive now and watch the operators of this thread from here on."""
        if self._state != "new":
            raise ProbeError(f"this tally is {self._state}: a Tally runs once, make another")
        self._books.started_ns, self._thread = self._clock(), threading.get_ident()
        self._adopt_living()
        self._books.write(self._log)
        self._state = "running"
        _remove_left_behind()
        self._inferred = torch.is_inference_mode_enabled()
        dispatch.push_mode(self)

    def stop(self) -> bool:
        """End it wherever it lies on the stack of modes; False where only its own thread could take it off."""
        removed = self._state != "running" or (self._may_remove() and dispatch.remove_mode(self))
        self._notice_resized()
        self._books.write(self._log)
        self._state = "stopped"
        self._live.clear()
        return removed

    def retire(self) -> bool:
        """Stop watching operators, if this mode is the top of the stack; else False: try again later.

        Deaths of what it watches are noticed until `stop`.
        """
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
        """The time now; no event so far will be dated after it. For marks of phases and modules."""
        now = self._clock()
        try:
            if type(self._log[-1]) is int:
                return now  # what came before is dated by the earlier moment
        except IndexError:
            pass
        self._append(now)
        return now

    # --- live readings ------------------------------------------------------------------------------------------------

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""
        self._books.write(self._log)
        return self._books.totals.current

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once so far."""
        self._books.write(self._log)
        return self._books.totals.peak

    @property
    def base_bytes(self) -> int:
        """Bytes that were alive at the start, as far as known by now."""
        self._books.write(self._log)
        return self._books.totals.base

    @property
    def events(self) -> int:
        """How many storages came and went since the start, those thinned out included, those adopted not."""
        self._books.write(self._log)
        return self._books.totals.row - self._books.totals.adopted + self._books.lost

    @property
    def lost(self) -> tuple[int, int]:
        """How many early events were thinned out, and the time (of the clock) until which some are missing."""
        return self._books.lost, self._books.lost_until_ns

    def block_of(self, tensor: torch.Tensor) -> int:
        """The raw id of the block behind a tensor, -1 if it is not watched (see `columns`, "block_id")."""
        self._books.write(self._log)
        try:
            with dispatch.DisableTorchFunction():
                storage = TensorBase.untyped_storage(tensor)
        except (NotImplementedError, RuntimeError):
            return -1
        ref = self._live.get(id(storage))
        return ref.block if ref is not None and ref() is storage else -1

    # --- the handler: every line here is paid for by every operator ---------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note the storage it returns."""
        if types and types not in self._plain and self._decline(types):
            return NotImplemented
        try:
            op = func._op  # saves a Python frame
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
            kind = type(out)
            if function_modes():
                with dispatch.DisableTorchFunction():
                    self._look_around(out, func, births)
            elif kind is Tensor or kind is Parameter:
                self._look(out, func, births)
            elif out is not None:
                self._look_around(out, func, births)
        except Exception as error:
            self._not_seen(f"what {func} returned ({type(error).__name__})")
        return out

    def _look(self, tensor: Any, func: Any, births: dict[Any, int]) -> None:
        """Log the storage of a plain tensor if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known: Any = self._live.get(key)
        if known is not None and known() is storage:  # ids are used again
            if known.nbytes != storage.nbytes():
                self._resized(known, storage, func, tensor)
            return
        birth = births.get((tensor.dtype, tensor.shape) if self._shapes else tensor.dtype)
        if birth is None or not tensor.is_cpu:
            self._meet(storage, func, tensor)
        else:
            self._note(storage, key, birth, self._clock())

    def _look_around(self, out: Any, func: Any, births: dict[Any, int]) -> None:
        """The same for what is not one plain tensor: lists, subclasses, and things that hold no memory."""
        kind = type(out)
        if kind is tuple or kind is list:
            for item in out:
                if type(item) is Tensor:
                    self._look(item, func, births)
                elif item is not None:
                    self._look_around(item, func, births)
        elif issubclass(kind, Tensor):
            with dispatch.DisableTorchFunction():
                self._look_inside(out, func)

    def _look_inside(self, tensor: Any, func: Any) -> None:
        """A subclass may say of itself what it likes, as fake tensors do: ask its storage."""
        storage = TensorBase.untyped_storage(tensor)
        known: Any = self._live.get(id(storage))
        if known is None or known() is not storage:
            if holds_memory(storage):
                self._meet(storage, func, tensor)
        elif known.nbytes != storage.nbytes():
            self._resized(known, storage, func, tensor)

    def _note(self, storage: Any, key: int, birth: int, time_ns: int) -> None:
        """Log a birth; the time is -1 for what is older than the tally. The log comes first: Ctrl-C may come next."""
        ref = StorageRef(storage, self._append)
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
            self._forget_dead()

    def _forget_dead(self) -> None:
        """Let go of the references to storages that are gone; here, as other threads would race with the handler."""
        if len(self._live) > UNWRITTEN + 2 * self._alive_last:
            self._live = {key: ref for key, ref in self._live.items() if ref() is not None}
            self._alive_last = len(self._live)

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        try:
            if isinstance(func, dispatch.HigherOrderOperator):
                self._not_seen(f"what happens inside {func}")
            self._look_around(out, func, {})
        except Exception as error:
            self._not_seen(f"what {func} returned ({type(error).__name__})")
        return out

    def _decline(self, types: Any) -> bool:
        """Whether a tensor class among these should unwrap, so that its inner operators come here.

        Not one that only renames Tensor; and not if modes lie below ours, which then could not speak before the class
        (torch's fake tensors need theirs to).
        """
        plain = dispatch.plain_torch_dispatch
        if all(kind is Parameter or kind.__torch_dispatch__ is plain for kind in types):
            self._plain.add(types)
            return False
        if not dispatch.mode_count():  # ours is off the stack while it handles
            return True
        if not any(kind.__module__.startswith("torch._subclasses.") for kind in types):
            self._not_seen(f"what happens inside operators of {types[0].__name__} while another mode is on")
        return False

    def _not_seen(self, what: str) -> None:
        self.overlooked.unseen[what] += 1

    # --- storages met for the first time ------------------------------------------------------------------------------

    def _meet(self, storage: Any, func: Any, tensor: Any) -> None:
        """A storage not known yet: new, or older and met only now."""
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
            self._born.setdefault(getattr(func, "_op", func), {})[what] = birth
        if origin == "older" and dispatch.current_autograd_node() is not None:
            self._note(storage, id(storage), birth, -1)
            return
        if origin != "new":
            self.overlooked.borrow(storage)
            self.overlooked.late += origin == "older"
        self._note(storage, id(storage), birth, self._clock())

    def _birth(self, func: Any, tensor: Any) -> int:
        op = "" if func is None else str(func)
        if tensor is None:
            return self._births.number(op, "", "")
        shape = str(tuple(tensor.shape)) if self._shapes else ""
        return self._births.number(op, str(tensor.dtype).removeprefix("torch."), shape)

    def _resized(self, known: StorageRef, storage: Any, func: Any, tensor: Any) -> None:
        """A storage changed its size: as in c10, the new bytes come before the old ones go."""
        self._note(storage, known.key, self._birth(func, tensor), self._clock())
        self._append(Replaced(known.block, known.nbytes))

    def _notice_resized(self) -> None:
        """`untyped_storage().resize_` is no operator: what nothing has looked at since is found at the end."""
        for known in list(self._live.values()):
            storage = known()
            if storage is not None and storage.nbytes() != known.nbytes:
                self._resized(known, storage, None, None)
                self.overlooked.resized += 1

    def _adopt_living(self) -> None:
        for thing in living_tensors():
            try:
                with dispatch.DisableTorchFunction():
                    self._adopt(thing)
            except (NotImplementedError, RuntimeError):
                self._not_seen(f"a tensor without one storage of its own, older ({describe(thing)})")

    def _adopt(self, thing: Any) -> None:
        tensor = None if isinstance(thing, torch.UntypedStorage) else thing
        storage = thing if tensor is None else TensorBase.untyped_storage(tensor)
        if storage.device.type != "cpu":
            return
        if tensor is not None and TensorBase.requires_grad.__get__(tensor) and not TensorBase.is_leaf.__get__(tensor):
            self._older = True  # a graph is alive, and autograd may hold storages that no Python object shows
        if id(storage) not in self._live and (type(tensor) in PLAIN or holds_memory(storage)):
            self.overlooked.borrow(storage)
            self._note(storage, id(storage), self._birth(None, tensor), -1)

    def _look_at_inputs(self, args: Any) -> None:
        """In backward, storages that only an older graph held: they come as inputs, and most die soon after."""
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
                    self._note(storage, id(storage), self._birth(None, arg), -1)

    # --- results ------------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Any]:
        """Events and blocks as numpy arrays, as `storage_log.tallied` describes them."""
        self._books.write(self._log)
        return tallied(self._books, self._births)

    def gaps(self) -> tuple[tuple[str, str], ...]:
        """What this tally could not see, as (name, sentence)."""
        return tuple(self.overlooked.gaps(self._books))


PLAIN = (Tensor, Parameter)
NOTHING: dict[Any, int] = {}
"""What is born of operators that give back what they were given."""


def _remove_left_behind() -> None:
    """Take off tallies that another thread had to stop: only their own thread can reach its stack of modes."""
    for mode in dispatch.modes():
        if isinstance(mode, Tally) and mode._state == "stopped" and mode._may_remove():
            dispatch.remove_mode(mode)
