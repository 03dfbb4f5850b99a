"""The CPU probe: a lean dispatch mode that watches the storages operators make, and the ones alive before it.

Exact to the byte for storages that come out of operators. It does not see scratch inside operators, other Python
threads, compiled code, or memory that no tensor owns; `Tally.gaps` names those. It keeps no tensor alive and runs no
operator of its own. A user's operator must never fail because of it: what it does not understand is counted in
`Tally.unseen`.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.errors import ProbeError
from memlab.trace import Kind

ADOPT, ALLOC, FREE = int(Kind.ADOPT), int(Kind.ALLOC), int(Kind.FREE)
Tensor, Parameter = torch.Tensor, torch.nn.Parameter
TensorBase: Any = torch._C.TensorBase  # its getters, which no subclass has replaced
GIVE_UP_AFTER = 2_000
"""So many backward operators in a row without a storage older than the tally, and the search for them ends."""
ROOM = 2048
"""So many entries of the log are written into the books at once."""
UNWRITTEN = 1023
"""The log is written at least once per so many births (a mask: one less than a power of two)."""


class StorageRef(weakref.ref[Any]):
    """A weak reference to a storage, with what the books need to know; `block` is -1 until its birth is written."""

    __slots__ = ("birth", "block", "key", "nbytes", "time_ns")
    birth: int
    block: int
    key: int
    nbytes: int
    time_ns: int


class Books:
    """The events in columns that grow, and that thin themselves out when there are too many.

    `write` takes from a log in which each StorageRef stands twice: at its birth, and where its weak reference reported
    the death. Numbers between them are moments, before which everything in front of them happened.
    """

    COLUMNS = (("time_ns", "q"), ("code", "q"), ("nbytes", "q"), ("birth", "i"))  # code: 4 * block + kind

    def __init__(self, limit: int, clock: Callable[[], int]) -> None:
        self.limit, self.clock = limit, clock
        self.time_ns, self.code, self.nbytes, self.birth = array("q"), array("q"), array("q"), array("i")
        self.capacity = self.row = self.blocks = self.adopted = 0
        self.current = self.peak = self.base = self.started_ns = 0
        self.peak_row, self.writing = -1, False
        self.lost, self.lost_until_ns, self.lost_largest_bytes = 0, 0, 0

    def write(self, log: deque[Any], live: dict[int, StorageRef]) -> None:
        """Enter what the log holds. Any thread may ask; a second one leaves it to the first."""
        if self.writing:
            return
        self.writing = True  # no call since the look at it: neither a thread nor Ctrl-C gets in between
        try:
            while log:
                if self.capacity - self.row < ROOM:
                    self._make_room()
                self._write_some(log, live)
        finally:
            self.writing = False

    def _write_some(self, log: deque[Any], live: dict[int, StorageRef]) -> None:
        """At most ROOM entries. Once an entry changes a value nothing is called, so Ctrl-C finds the books in order."""
        times, codes, sizes, births = self.time_ns, self.code, self.nbytes, self.birth
        undated = row = self.row
        for _ in range(min(len(log), ROOM)):
            item = log[0]
            if type(item) is int:
                while undated < row:
                    times[undated] = item
                    undated += 1
                del log[0]
                continue
            block, nbytes = item.block, item.nbytes
            if block == -1 and nbytes:
                time_ns = item.time_ns
                while undated < row and time_ns >= 0:
                    times[undated] = time_ns
                    undated += 1
                undated = row + 1
                item.block = block = self.blocks
                self.blocks = block + 1
                sizes[row], births[row] = nbytes, item.birth
                self.current = current = self.current + nbytes
                if time_ns < 0:  # adopted: it was there all along, at the peak too
                    times[row], codes[row] = self.started_ns, 4 * block + ADOPT
                    self.adopted += 1
                    self.base += nbytes
                    self.peak += nbytes
                else:
                    times[row], codes[row] = time_ns, 4 * block + ALLOC
                    if current > self.peak:
                        self.peak, self.peak_row = current, row
                self.row = row = row + 1
            elif block >= 0:
                times[row] = times[row - 1]  # until something dates it
                sizes[row], codes[row] = nbytes, 4 * block + FREE
                self.current -= nbytes
                self.row = row = row + 1
                key = item.key
                if key in live and live[key] is item:
                    del live[key]
                item.block = -2  # a block that gave way to another size is reported once more when its storage dies
            else:
                item.block = -2  # of no bytes, or reported before
            del log[0]
        now = self.clock()
        for late in range(undated, row):
            times[late] = now

    def _make_room(self) -> None:
        """Thin out at the limit, else grow."""
        if self.row >= self.limit:
            self._thin()
        wanted = self.row + max(2 * ROOM, min(max(self.row, 8 * ROOM), self.limit - self.row))
        for name, code in self.COLUMNS:
            column = getattr(self, name)
            column.frombytes(bytes(max(0, wanted - len(column)) * array(code).itemsize))
        self.capacity = wanted

    def _thin(self) -> None:
        """Drop the smallest blocks that were born and died in the older half.

        Blocks alive at the peak stay, so the peak, what held it, and the bytes alive now remain exact; before
        `lost_until_ns` the curve in between lacks the blocks dropped.
        """
        columns = self.columns()
        drop = _expendable(columns, self.row // 2, self.peak_row)
        keep, kept = ~drop, int((~drop).sum())
        self.lost += self.row - kept
        self.lost_until_ns = int(columns["time_ns"][self.row // 2])
        self.lost_largest_bytes = max(self.lost_largest_bytes, int(columns["nbytes"][drop].max(initial=0)))
        peak_row = int(keep[: self.peak_row + 1].sum()) - 1
        thinned = [array(code, columns[name][keep].tobytes()) for name, code in self.COLUMNS]
        self.time_ns, self.code, self.nbytes, self.birth = thinned
        self.capacity = self.row = kept
        self.peak_row = peak_row
        self.limit = max(self.limit, kept * 5 // 4)

    def columns(self) -> dict[str, np.ndarray]:
        """Copies of the rows so far."""
        return {name: np.array(getattr(self, name)[: self.row], dtype=code) for name, code in self.COLUMNS}


def _expendable(columns: dict[str, np.ndarray], half: int, peak_row: int) -> np.ndarray:
    """The rows of blocks that lived only within the first `half` rows and not at the peak: of the smaller ones."""
    block, kind = np.divmod(columns["code"][:half], 4)
    born, died = np.flatnonzero(kind == ALLOC), np.flatnonzero(kind == FREE)
    _, of_born, of_died = np.intersect1d(block[born], block[died], assume_unique=True, return_indices=True)
    born, died = born[of_born], died[of_died]
    passing = (born > peak_row) | (died <= peak_row)
    born, died = born[passing], died[passing]
    smallest = np.argsort(columns["nbytes"][born], kind="stable")[: max(half // 4, 1)]
    rows = np.zeros(len(columns["code"]), bool)
    rows[born[smallest]] = rows[died[smallest]] = True
    return rows


class Births:
    """Numbers for what storages are born as: (operator, dtype, shape), each a number in a table of texts."""

    def __init__(self) -> None:
        self.of_operator: dict[Any, dict[Any, int]] = {}
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.tables: tuple[dict[str, int], ...] = ({}, {}, {})

    def number(self, *texts: str) -> int:
        """The number of (operator, dtype, shape), where "" is unknown."""
        key = tuple(
            table.setdefault(text, len(table)) if text else -1 for table, text in zip(self.tables, texts, strict=True)
        )
        return self.numbers.setdefault((key[0], key[1], key[2]), len(self.numbers))

    def columns(self, births: np.ndarray) -> dict[str, np.ndarray]:
        """The op, dtype and shape of blocks, as numbers in the tables."""
        known = np.array(list(self.numbers), "i4").reshape(-1, 3)[births]
        return dict(zip(("op", "dtype", "shape"), known.T.copy(), strict=True))


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
        self._fresh, self._in_place = self._births.of_operator, dict[Any, bool]()
        self._live: dict[int, StorageRef] = {}
        self._plain: set[tuple[type, ...]] = {(Parameter,)}
        self._log: deque[Any] = deque()
        # A C function as the callback of weak references: Python code there would swallow Ctrl-C, which is raised
        # between two bytecodes, and lose the death with it.
        self._append = self._log.append
        self._count, self._older, self._idle = 0, False, 0
        self._thread, self._state = 0, "new"
        self._late = self._borrowed = self._borrowed_bytes = 0
        self.saw_accelerator = False
        self.unseen: dict[str, int] = {}

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt the storages alive now and watch the operators of this thread from here on."""
        if self._state != "new":
            raise ProbeError(f"this tally is {self._state}: a Tally runs once, make another")
        self._books.started_ns, self._thread = self._clock(), threading.get_ident()
        self._adopt_living()
        self._books.write(self._log, self._live)
        self._state = "running"
        _push(self)

    def stop(self) -> bool:
        """End it wherever it lies on the stack of modes; False where only its own thread could take it off."""
        removed = self._state != "running" or (threading.get_ident() == self._thread and _remove(self))
        self._books.write(self._log, self._live)
        self._state = "stopped"
        self._live.clear()
        return removed

    def retire(self) -> bool:
        """Stop watching operators, if this mode is the top of the stack; else False: try again later.

        Deaths of what it watches are noticed until `stop`.
        """
        if self._state != "running":
            return True
        if threading.get_ident() != self._thread or _top() is not self:
            return False
        _remove(self)
        self._state = "retired"
        return True

    def mark(self) -> int:
        """The time now; no event so far will be dated after it. For marks of phases and modules."""
        now = self._clock()
        self._append(now)
        return now

    # --- live readings ------------------------------------------------------------------------------------------------

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""
        self._books.write(self._log, self._live)
        return self._books.current

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once so far."""
        self._books.write(self._log, self._live)
        return self._books.peak

    @property
    def base_bytes(self) -> int:
        """Bytes that were alive at the start, as far as known by now."""
        self._books.write(self._log, self._live)
        return self._books.base

    @property
    def events(self) -> int:
        """How many storages came and went since the start, those thinned out included, those adopted not."""
        self._books.write(self._log, self._live)
        return self._books.row - self._books.adopted + self._books.lost

    @property
    def lost(self) -> tuple[int, int]:
        """How many early events were thinned out, and the time (of the clock) until which some are missing."""
        return self._books.lost, self._books.lost_until_ns

    def block_of(self, tensor: torch.Tensor) -> int:
        """The raw id of the block behind a tensor, -1 if it is not watched (see `columns`, "block_id")."""
        self._books.write(self._log, self._live)
        try:
            with torch._C.DisableTorchFunction():
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
            in_place = self._in_place.get(op)
            if in_place:
                return out  # as an optimizer's many: nothing is born
            if in_place is None:
                self._in_place[op] = _is_in_place(func)
            kind = type(out)
            if _function_modes():
                with torch._C.DisableTorchFunction():
                    self._look_around(out, func, op)
            elif kind is Tensor or kind is Parameter:
                self._look(out, func, op)
            elif out is not None:
                self._look_around(out, func, op)
        except Exception as error:
            self._not_seen(f"what {func} returned ({type(error).__name__})")
        return out

    def _look(self, tensor: Any, func: Any, op: Any) -> None:
        """Log the storage of a plain tensor if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known: Any = self._live.get(key)
        if known is not None and known() is storage:  # ids are used again
            if known.nbytes != storage.nbytes():
                self._resized(known, storage, func, tensor)
            return
        birth = self._fresh.get(op, NO_BIRTHS).get((tensor.dtype, tensor.shape) if self._shapes else tensor.dtype)
        if birth is None or not tensor.is_cpu:
            self._meet(storage, func, tensor)
        else:
            self._note(storage, key, birth, self._clock())

    def _look_around(self, out: Any, func: Any, op: Any) -> None:
        """The same for what is not one plain tensor: lists, subclasses, and things that hold no memory."""
        kind = type(out)
        if kind is Tensor:
            self._look(out, func, op)
        elif kind is tuple or kind is list:
            for item in out:
                self._look_around(item, func, op)
        elif issubclass(kind, Tensor):
            with torch._C.DisableTorchFunction():
                self._look_inside(out, func)

    def _look_inside(self, tensor: Any, func: Any) -> None:
        """A subclass may say of itself what it likes, as fake tensors do: ask its storage."""
        storage = TensorBase.untyped_storage(tensor)
        known: Any = self._live.get(id(storage))
        if known is None or known() is not storage:
            if _holds_memory(storage):
                self._meet(storage, func, tensor)
        elif known.nbytes != storage.nbytes():
            self._resized(known, storage, func, tensor)

    def _note(self, storage: Any, key: int, birth: int, time_ns: int) -> None:
        """Log a birth; the time is -1 for what is older than the tally. The log comes first: Ctrl-C may come next."""
        ref = StorageRef(storage, self._append)
        ref.key, ref.block, ref.birth, ref.nbytes, ref.time_ns = key, -1, birth, storage.nbytes(), time_ns
        self._append(ref)
        self._live[key] = ref
        self._count = count = self._count + 1
        if not count & UNWRITTEN:
            self._books.write(self._log, self._live)

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        try:
            if isinstance(func, torch._ops.HigherOrderOperator):
                self._not_seen(f"what happens inside {func}")
            self._look_around(out, func, func)
        except Exception as error:
            self._not_seen(f"what {func} returned ({type(error).__name__})")
        return out

    def _decline(self, types: Any) -> bool:
        """Whether a tensor class among these should unwrap, so that its inner operators come here.

        Not one that only renames Tensor; and not if modes lie below ours, which then could not speak before the class
        (torch's fake tensors need theirs to).
        """
        plain = torch._C._disabled_torch_dispatch_impl
        if all(kind is Parameter or kind.__torch_dispatch__ is plain for kind in types):
            self._plain.add(types)
            return False
        if not torch._C._len_torch_dispatch_stack():  # ours is off the stack while it handles
            return True
        if not any(kind.__module__.startswith("torch._subclasses.") for kind in types):
            self._not_seen(f"what happens inside operators of {types[0].__name__} while another mode is on")
        return False

    def _not_seen(self, what: str) -> None:
        self.unseen[what] = self.unseen.get(what, 0) + 1

    # --- storages met for the first time ------------------------------------------------------------------------------

    def _meet(self, storage: Any, func: Any, tensor: Any) -> None:
        """A storage not known yet: new, or older and met only now."""
        device = storage.device.type
        if device != "cpu":
            self.saw_accelerator = self.saw_accelerator or device != "meta"
            return
        origin = _origin(func)
        if origin == "no memory":
            return
        birth = self._birth(func, tensor)
        if origin == "new":
            what = (tensor.dtype, tensor.shape) if self._shapes else tensor.dtype
            self._fresh.setdefault(getattr(func, "_op", func), {})[what] = birth
        if origin == "older" and torch._C._current_autograd_node() is not None:
            self._note(storage, id(storage), birth, -1)
            return
        if origin != "new":
            self._borrow(storage)
            self._late += origin == "older"
        self._note(storage, id(storage), birth, self._clock())

    def _birth(self, func: Any, tensor: Any) -> int:
        op = "" if func is None else str(func)
        if tensor is None:
            return self._births.number(op, "", "")
        shape = str(tuple(tensor.shape)) if self._shapes else ""
        return self._births.number(op, str(tensor.dtype).removeprefix("torch."), shape)

    def _borrow(self, storage: Any) -> None:
        if not storage.resizable():
            self._borrowed += 1
            self._borrowed_bytes += storage.nbytes()

    def _resized(self, known: StorageRef, storage: Any, func: Any, tensor: Any) -> None:
        """A storage changed its size: as in c10, the new bytes come before the old ones go."""
        self._note(storage, known.key, self._birth(func, tensor), self._clock())
        self._append(known)

    def _adopt_living(self) -> None:
        for thing in living_tensors():
            try:
                with torch._C.DisableTorchFunction():
                    self._adopt(thing)
            except (NotImplementedError, RuntimeError):
                self._not_seen(f"a tensor without one storage of its own, older ({_describe(thing)})")

    def _adopt(self, thing: Any) -> None:
        tensor = None if isinstance(thing, torch.UntypedStorage) else thing
        storage = thing if tensor is None else TensorBase.untyped_storage(tensor)
        if storage.device.type != "cpu":
            return
        if tensor is not None and TensorBase.requires_grad.__get__(tensor) and not TensorBase.is_leaf.__get__(tensor):
            self._older = True  # a graph is alive, and autograd may hold storages that no Python object shows
        if id(storage) not in self._live and (type(tensor) in PLAIN or _holds_memory(storage)):
            self._borrow(storage)
            self._note(storage, id(storage), self._birth(None, tensor), -1)

    def _look_at_inputs(self, args: Any) -> None:
        """In backward, storages that only an older graph held: they come as inputs, and most die soon after."""
        if torch._C._current_autograd_node() is None:
            return
        self._idle += 1
        self._older = self._idle < GIVE_UP_AFTER
        for arg in args:
            if type(arg) is Tensor and not _function_modes() and arg.is_cpu:
                storage = arg.untyped_storage()
                known = self._live.get(id(storage))
                if known is None or known() is not storage:
                    self._idle = 0
                    self._note(storage, id(storage), self._birth(None, arg), -1)

    # --- results ------------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Any]:
        """Events and blocks as numpy arrays, and the texts as tuples of str; adopted blocks come first.

        Per event: time_ns (the clock's), kind, block, nbytes. Per block: op, dtype, shape (numbers in the texts, -1 for
        none), and block_id, the raw id that `block_of` gave, ascending. `first_row` is the first event after the start,
        `peak_row` the event that reached the peak (`first_row - 1` if nothing rose above the base).
        """
        self._books.write(self._log, self._live)
        rows = self._books.columns()
        block, kind = np.divmod(rows["code"], 4)
        order = np.argsort(kind != ADOPT, kind="stable")
        born = order[kind[order] != FREE]
        block_id, first = np.unique(block[born], return_index=True)
        first_row, peak_row = int((kind == ADOPT).sum()), self._books.peak_row
        return {
            "time_ns": np.maximum.accumulate(rows["time_ns"][order]),  # readers on other threads date by their own look
            "kind": kind[order].astype("u1"),
            "block": np.searchsorted(block_id, block[order]).astype("i4"),
            "nbytes": rows["nbytes"][order],
            "block_id": block_id,
            **self._births.columns(rows["birth"][born[first]]),
            "first_row": first_row,
            "peak_row": int(np.flatnonzero(order == peak_row)[0]) if peak_row >= 0 else first_row - 1,
            "texts": dict(zip(("op", "dtype", "shape"), map(tuple, self._births.tables), strict=True)),
        }

    def gaps(self) -> tuple[tuple[str, str], ...]:
        """What this tally could not see, as (name, sentence)."""
        return tuple(self._gaps())

    def _gaps(self) -> Iterator[tuple[str, str]]:
        yield "operator scratch", "Working memory inside operators (oneDNN, MKL) is not seen; it adds to the peak."
        yield "other threads", "Tensors made by other Python threads and processes are seen when this thread uses them."
        if _compiled_something():
            yield "compiled code", "Memory inside compiled functions is not seen; what they return is, once it is used."
        if self._borrowed:
            yield "borrowed memory", BORROWED.format(self._borrowed, self._borrowed_bytes)
        if self._late:
            yield "seen late", f"{self._late} storages were first seen some time after they were made."
        if self._books.lost:
            yield "thinned", THINNED.format(self._books.lost, self._books.lost_largest_bytes)
        for what, times in self.unseen.items():
            yield "unseen", f"Not counted: {what}, {times} times."


PLAIN = (Tensor, Parameter)
NO_BIRTHS: dict[Any, int] = {}
BORROWED = (
    "{} storages of {} bytes were not made by an operator (NumPy arrays, loaded or mapped files, shared memory); "
    "they count while a tensor uses them."
)
THINNED = (
    "{} early events of blocks up to {} bytes were let go to bound memory; the peak and what held it are exact, "
    "the curve in the early part can be too low."
)


def living_tensors() -> Iterator[Any]:
    """Every tensor and storage that the garbage collector knows, and gradients; asks no object what it claims to be."""
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would ask `__class__`, which proxies answer with code of their own
        if kind is torch.UntypedStorage:
            yield thing
        elif issubclass(kind, Tensor):
            yield thing
            grad = _grad(thing)
            if grad is not None:
                yield grad


def _grad(tensor: Any) -> Any:
    with torch._C.DisableTorchFunction():
        try:
            return TensorBase.grad.__get__(tensor) if TensorBase.is_leaf.__get__(tensor) else None
        except RuntimeError:
            return None


def _holds_memory(storage: Any) -> bool:
    """Whether there is anything behind a storage; tensors that wrap others have one with a size alone.

    Not for plain tensors, as asking for the address makes a lazily copied storage real.
    """
    try:
        return storage.device.type != "meta" and bool(storage.data_ptr())
    except RuntimeError:
        return False


def _describe(tensor: Any) -> str:
    with torch._C.DisableTorchFunction():
        layout = str(TensorBase.layout.__get__(tensor)).removeprefix("torch.")
    return f"{type(tensor).__name__}, {layout}"


NEW_THOUGH_ALIAS = frozenset({"aten::lift_fresh", "aten::lift", "aten::set_", "aten::resize_", "aten::resize_as_"})
"""Operators that return an alias of a storage which no operator has returned before: that is where it is new."""


def _origin(func: Any) -> str:
    """Of a storage not known before: "new", "handed in" (new, by an alias), "older" (or made unseen), "no memory"."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "new"
    if schema.name == "aten::_efficientzerotensor":
        return "no memory"
    if all(result.alias_info is None for result in schema.returns):
        return "new"
    is_out = any(argument.is_out for argument in schema.arguments)
    return "handed in" if is_out or schema.name in NEW_THOUGH_ALIAS else "older"


def _is_in_place(func: Any) -> bool:
    """Whether an operator returns what it wrote to, at the size it had (`add_`, not `resize_`, `set_` or `add.out`)."""
    schema = func._schema
    results = [result.alias_info for result in schema.returns]
    writes = bool(results) and all(alias is not None and alias.is_write for alias in results)
    return writes and _origin(func) == "older" and "resize" not in schema.name


# --- SEAM: the stacks of modes, torch._C._*_torch_dispatch_stack and _len_torch_function_stack, seen in 2.12 and 2.13 -
# Not `__enter__`: it notes flags that a mode which the user leaves on would restore wrongly after ours has gone.

_function_modes = torch._C._len_torch_function_stack


def _push(mode: TorchDispatchMode) -> None:
    torch._C._push_on_torch_dispatch_stack(mode)


def _top() -> Any:
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def _remove(mode: TorchDispatchMode) -> bool:
    """Take a mode off the stack of this thread, wherever it lies; the others stay, in their order."""
    above = []
    try:
        while torch._C._len_torch_dispatch_stack():
            top = torch._C._pop_torch_dispatch_stack(None)
            if top is mode:
                return True
            above.append(top)
        return False
    finally:
        for other in reversed(above):
            torch._C._push_on_torch_dispatch_stack(other)


# SEAM: torch._dynamo.utils.counters["frames"]["ok"], seen in 2.12 and 2.13
def _compiled_something() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"]["ok"])
