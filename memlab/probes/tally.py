"""The CPU probe: a lean dispatch mode that watches the storages operators make, and the ones alive before it.

Exact to the byte for storages that come out of operators. It does not see scratch inside operators, other Python threads,
compiled code, or memory that no tensor owns; `Tally.gaps` names those. It keeps no tensor alive and runs no operator of its
own. A user's operator must never fail because of it: what it does not understand is counted in `Tally.unseen`.
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
Tensor, Parameter, TensorBase = torch.Tensor, torch.nn.Parameter, torch._C.TensorBase
UNPLAIN_IDLE = 2_000
"""So many backward operators in a row without an older storage, and the search for them ends."""


class StorageRef(weakref.ref):
    """A weak reference to a storage with what its death must know."""

    __slots__ = ("block", "key", "nbytes")


class Table:
    """Texts numbered in the order of their first use."""

    def __init__(self) -> None:
        self.ids: dict[Any, int] = {}
        self.texts: list[str] = []

    def number(self, key: Any) -> int:
        """The number of a key, new or known; its text is str(key)."""
        known = self.ids.get(key)
        if known is None:
            self.texts.append(str(key))
            self.ids[key] = known = len(self.texts) - 1
        return known


class Rows:
    """Events in columns that grow, and thin themselves when there are too many.

    The operator, dtype and shape of a block stand in the row of its birth, so that dropping rows drops everything.
    """

    COLUMNS = (("time_ns", "q"), ("block", "q"), ("nbytes", "q"), ("kind", "b"), ("op", "i"), ("dtype", "i"), ("shape", "i"))

    def __init__(self, limit: int) -> None:
        self.limit, self.capacity = limit, 0
        self.time_ns, self.block, self.nbytes = array("q"), array("q"), array("q")
        self.kind, self.op, self.dtype, self.shape = array("b"), array("i"), array("i"), array("i")
        self.lost, self.lost_until_ns, self.lost_largest_bytes = 0, 0, 0
        self.grow()

    def grow(self) -> None:
        """Room for twice as many rows; the capacity is said last, so that an interrupt in between does no harm."""
        wanted = max(1 << 14, 2 * self.capacity)
        for name, code in self.COLUMNS:
            column = getattr(self, name)
            column.frombytes(bytes((wanted - len(column)) * array(code).itemsize))
        self.capacity = wanted

    def taken(self, count: int) -> dict[str, np.ndarray]:
        """Copies of the first `count` rows as numpy arrays."""
        return {name: np.array(getattr(self, name)[:count], dtype=code) for name, code in self.COLUMNS}

    def thin(self, count: int, peak_row: int) -> tuple[int, int]:
        """Drop the smallest blocks that were born and died in the older half; return the new count and peak row.

        Blocks alive at the peak stay, so the peak, who held it, and the bytes alive now remain exact; before
        `lost_until_ns` the curve in between lacks the blocks dropped.
        """
        columns = self.taken(count)
        keep = ~_expendable(columns, count // 2, peak_row)
        dropped = ~keep & (columns["kind"] == ALLOC)
        self.lost += int(count - keep.sum())
        self.lost_until_ns = int(columns["time_ns"][count // 2])
        self.lost_largest_bytes = max(self.lost_largest_bytes, int(columns["nbytes"][dropped].max(initial=0)))
        kept = int(keep.sum())
        for name, code in self.COLUMNS:
            setattr(self, name, array(code, columns[name][keep].tobytes()))
        self.capacity = kept
        self.limit = max(self.limit, 2 * kept)
        return kept, int(keep[: peak_row + 1].sum()) - 1


def _expendable(columns: dict[str, np.ndarray], half: int, peak_row: int) -> np.ndarray:
    """Which rows belong to blocks that lived only in the first `half` rows and not at the peak: the smaller half of them."""
    kind, block = columns["kind"], columns["block"]
    born, died = np.flatnonzero(kind[:half] == ALLOC), np.flatnonzero(kind[:half] == FREE)
    _, of_born, of_died = np.intersect1d(block[born], block[died], assume_unique=True, return_indices=True)
    born, died = born[of_born], died[of_died]
    short = (born > peak_row) | (died <= peak_row)
    born, died = born[short], died[short]
    smallest = np.argsort(columns["nbytes"][born], kind="stable")[: max(half // 4, 1)]
    rows = np.zeros(len(kind), bool)
    rows[born[smallest]] = rows[died[smallest]] = True
    return rows


class Tally(TorchDispatchMode):
    """Counts the bytes of CPU storages from `start` to `stop`, on the thread that starts it.

    `current_bytes`, `peak_bytes` and `base_bytes` may be read by any thread while it runs. A free is dated when it is noticed: at
    the next operator, `mark`, or reading of `current_bytes`; its place among the allocations is exact.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the handler, 1 microsecond per operator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile runs the user's code eagerly, which is not what they would measure

    def __init__(
        self, clock_ns: Callable[[], int] = time.time_ns, *, shapes: bool = False, max_events: int = 2_000_000
    ) -> None:
        super().__init__()
        if max_events < 64:
            raise ProbeError(f"max_events must be at least 64, got {max_events}: fewer cannot hold one training step")
        self._clock, self._shapes = clock_ns, shapes
        self._rows, self._row, self._block = Rows(max_events), 0, 0
        self._live: dict[int, StorageRef] = {}
        self._deaths: deque[StorageRef | int] = deque()
        # A C function as callback: Python code there would swallow Ctrl-C, which arrives between two bytecodes.
        self._bury = self._deaths.append
        self._ops, self._dtypes, self._shape_texts = Table(), Table(), Table()
        self._aliases: dict[Any, bool] = {}
        self._current = self._peak = self._base = 0
        self._peak_row, self._older, self._idle = -1, False, 0
        self._started_ns, self._thread, self._state = 0, 0, "new"
        self._late = self._borrowed = self._borrowed_bytes = 0
        self.saw_accelerator = False
        self.unseen: dict[str, int] = {}

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Adopt the storages alive now and watch the operators of this thread from here on."""
        if self._state != "new":
            raise ProbeError(f"this tally is {self._state}: a Tally runs once, make another")
        self._started_ns, self._thread = self._clock(), threading.get_ident()
        self._adopt_living()
        self._state = "running"
        _push(self)

    def stop(self) -> bool:
        """End it wherever it lies on the stack of modes; False when only its own thread could take it off."""
        removed = self._state != "running" or (threading.get_ident() == self._thread and _remove(self))
        self._settle()
        self._state = "stopped"
        self._live.clear()
        return removed

    def retire(self) -> bool:
        """Stop watching operators if nothing lies above on the stack; frees go on being counted. False: try again later."""
        if self._state != "running":
            return True
        if threading.get_ident() != self._thread or _top() is not self:
            return False
        _remove(self)
        self._state = "retired"
        return True

    def mark(self) -> int:
        """The time now, after which no event so far is dated; for marks of phases and modules (owner thread only)."""
        if self._deaths:
            self._settle()
        return self._clock()

    # --- live readings ------------------------------------------------------------------------------------------------

    @property
    def current_bytes(self) -> int:
        """Bytes alive now. Reading also dates the frees that no operator has noticed yet."""
        deaths = list(self._deaths)  # one call in C: no other thread gets in between
        if not deaths:
            return self._current
        if type(deaths[-1]) is not int:
            self._bury(self._clock())
        return self._current - sum(ref.nbytes for ref in deaths if type(ref) is not int)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once so far."""
        return self._peak

    @property
    def base_bytes(self) -> int:
        """Bytes that were alive at the start, as far as known by now."""
        return self._base

    @property
    def events(self) -> int:
        """How many events were noticed, those thinned away included."""
        return self._row + self._rows.lost

    def block_of(self, tensor: torch.Tensor) -> int:
        """The raw block id of a tensor's storage while it is watched, -1 if it is not (see `columns`, "block_id")."""
        try:
            with torch._C.DisableTorchFunction():
                ref = self._live.get(id(TensorBase.untyped_storage(tensor)))
        except Exception:
            return -1
        return -1 if ref is None else ref.block

    # --- the handler: every line here is paid for by every operator ---------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and _speak_for_themselves(types):
            return NotImplemented  # the subclass unwraps, and its inner operators come here
        try:
            op = func._op  # saves a Python frame
        except AttributeError:
            return self._higher_order(func, args, kwargs or {})
        out = op(*args, **kwargs) if kwargs else op(*args)
        try:
            if self._older:
                self._look_at_inputs(args)
            kind = type(out)
            if (kind is Tensor or kind is Parameter) and not _function_modes():
                storage = out.untyped_storage()
                if self._deaths:
                    self._settle()  # before the look-up: ids are used again
                known = self._live.get(id(storage))
                if known is None:
                    self._meet(storage, func, out)
                elif known.nbytes != storage.nbytes():
                    self._resized(known, storage, func, out)
            elif out is not None:
                self._see(out, func)
        except Exception as error:
            self._not_seen(f"{type(error).__name__} after {func}")
        return out

    def _see(self, out: Any, func: Any) -> None:
        """The slow way: lists, subclasses, and whatever comes while the user has a function mode on."""
        if isinstance(out, list | tuple):
            for item in out:
                self._see(item, func)
            return
        if not issubclass(type(out), Tensor):
            return
        with torch._C.DisableTorchFunction():
            try:
                storage = TensorBase.untyped_storage(out)
            except (NotImplementedError, RuntimeError):
                self._not_seen(f"{str(out.layout).removeprefix('torch.')} tensor of {type(out).__name__}")
                return
            if self._deaths:
                self._settle()
            known = self._live.get(id(storage))
            if known is None:
                self._meet(storage, func, out)
            elif known.nbytes != storage.nbytes():
                self._resized(known, storage, func, out)

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):
            self._not_seen(f"inside of higher-order operator {func}")
        try:
            self._see(out, func)
        except Exception as error:
            self._not_seen(f"{type(error).__name__} after {func}")
        return out

    def _not_seen(self, what: str) -> None:
        self.unseen[what] = self.unseen.get(what, 0) + 1

    # --- births and deaths --------------------------------------------------------------------------------------------

    def _meet(self, storage: Any, func: Any, tensor: Any) -> None:
        """A storage not known yet: new, or older and met for the first time in backward."""
        device = storage.device.type
        if device != "cpu":
            self.saw_accelerator = self.saw_accelerator or device != "meta"
            return
        is_alias = self._aliases.get(func)
        if is_alias is None:
            is_alias = self._aliases[func] = _returns_alias(func)
        if not is_alias:
            self._record(ALLOC, storage, func, tensor)
        elif is_alias == "nothing":
            return
        elif is_alias == "old" and torch._C._current_autograd_node() is not None:
            self._record(ADOPT, storage, func, tensor)
        else:
            self._borrow(storage, is_alias == "old")
            self._record(ALLOC, storage, func, tensor)

    def _borrow(self, storage: Any, late: bool) -> None:
        self._late += late
        if not storage.resizable():
            self._borrowed += 1
            self._borrowed_bytes += storage.nbytes()

    def _record(self, kind: int, storage: Any, func: Any, tensor: Any) -> None:
        """One block comes to life. After the clock nothing is called, so no interrupt can leave the books half done."""
        nbytes, key = storage.nbytes(), id(storage)
        if not nbytes:
            return
        op = self._ops.number(func) if func is not None else -1
        dtype = self._dtypes.number(tensor.dtype) if tensor is not None else -1
        shape = self._shape_texts.number(tensor.shape) if self._shapes and tensor is not None else -1
        if self._row >= self._rows.capacity:
            self._make_room()
        ref = StorageRef(storage, self._bury)
        row, rows, block = self._row, self._rows, self._block
        ref.block, ref.key, ref.nbytes = block, key, nbytes
        now = self._clock() if kind == ALLOC else self._started_ns
        rows.time_ns[row] = now
        rows.block[row] = block
        rows.nbytes[row] = nbytes
        rows.kind[row] = kind
        rows.op[row] = op
        rows.dtype[row] = dtype
        rows.shape[row] = shape
        self._live[key] = ref
        self._row, self._block = row + 1, block + 1
        self._current = current = self._current + nbytes
        if kind == ADOPT:
            self._base += nbytes  # it was there all along, at the peak too
            self._peak += nbytes
        elif current > self._peak:
            self._peak, self._peak_row = current, row

    def _settle(self) -> None:
        """Write down the deaths that weak references reported; an int among them dates those before it."""
        deaths, rows, live = self._deaths, self._rows, self._live
        now, first = self._clock(), self._row
        while deaths:
            ref = deaths[0]
            if type(ref) is int:
                self._date(first, ref)
                first = self._row
                del deaths[0]
                continue
            if self._row >= rows.capacity:
                self._make_room()
                first = min(first, self._row)
            row = self._row
            rows.time_ns[row] = now
            rows.block[row] = ref.block
            rows.nbytes[row] = ref.nbytes
            rows.kind[row] = FREE
            rows.op[row] = rows.dtype[row] = rows.shape[row] = -1
            del deaths[0]
            self._row = row + 1
            self._current -= ref.nbytes
            if live.get(ref.key) is ref:
                del live[ref.key]

    def _date(self, first: int, time_ns: int) -> None:
        """The frees from row `first` on happened before this moment (another thread saw them), not just now."""
        times = self._rows.time_ns
        for row in range(first, self._row):
            times[row] = max(time_ns, times[row - 1] if row else time_ns)

    def _resized(self, known: StorageRef, storage: Any, func: Any, tensor: Any) -> None:
        """A storage changed its size in place: as in c10, the new bytes come before the old ones go."""
        del self._live[known.key]
        self._record(ALLOC, storage, func, tensor)
        self._bury(known)
        self._settle()

    def _make_room(self) -> None:
        if self._row >= self._rows.limit:
            self._row, self._peak_row = self._rows.thin(self._row, self._peak_row)
        self._rows.grow()

    # --- what is older than the tally ---------------------------------------------------------------------------------

    def _adopt_living(self) -> None:
        for tensor in living_tensors():
            try:
                self._adopt(tensor)
            except (NotImplementedError, RuntimeError):
                self._not_seen(f"{type(tensor).__name__} without a storage of its own, alive before the start")

    def _adopt(self, tensor: Any) -> None:
        is_tensor = not isinstance(tensor, torch.UntypedStorage)
        with torch._C.DisableTorchFunction():
            storage = TensorBase.untyped_storage(tensor) if is_tensor else tensor
            if storage.device.type != "cpu" or id(storage) in self._live:
                return
            if is_tensor and TensorBase.requires_grad.__get__(tensor) and not TensorBase.is_leaf.__get__(tensor):
                self._older = True  # a graph is alive, and autograd may hold storages that no Python object shows
            self._borrow(storage, late=False)
            self._record(ADOPT, storage, None, tensor if is_tensor else None)

    def _look_at_inputs(self, args: Any) -> None:
        """In backward, storages that only an older graph held: they come as inputs, and die soon after."""
        if torch._C._current_autograd_node() is None:
            return
        self._idle += 1
        self._older = self._idle < UNPLAIN_IDLE
        for arg in args:
            if type(arg) is Tensor and not _function_modes():
                storage = arg.untyped_storage()
                if self._deaths:
                    self._settle()
                if id(storage) not in self._live and storage.device.type == "cpu" and storage.nbytes():
                    self._idle = 0
                    self._record(ADOPT, storage, None, arg)

    # --- results ------------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Any]:
        """Events and blocks as numpy arrays, the texts as tuples of str; adopted blocks come first.

        Per event: time_ns (the clock's), kind, block, nbytes. Per block: op, dtype, shape (numbers in the texts, -1 for
        none) and block_id, the raw id that `block_of` gave. `first_row` is the first event after the start; `peak_row` the
        event that reached the peak (the last adopted one if nothing rose above the base).
        """
        self._settle()
        rows = self._rows.taken(self._row)
        order = np.argsort(rows["kind"] != ADOPT, kind="stable")
        rows = {name: column[order] for name, column in rows.items()}
        births = rows["kind"] != FREE
        block_id, first = np.unique(rows["block"][births], return_index=True)
        blocks = {name: rows[name][births][first] for name in ("op", "dtype", "shape")}
        peak_row = int(np.flatnonzero(order == self._peak_row)[0]) if self._peak_row >= 0 else int((~births).argmax()) - 1
        return {
            "time_ns": rows["time_ns"],
            "kind": rows["kind"].astype("u1"),
            "block": np.searchsorted(block_id, rows["block"]).astype("i4"),
            "nbytes": rows["nbytes"],
            **blocks,
            "block_id": block_id,
            "first_row": int((rows["kind"] == ADOPT).sum()),
            "peak_row": peak_row,
            "texts": {
                "op": tuple(self._ops.texts),
                "dtype": tuple(text.removeprefix("torch.") for text in self._dtypes.texts),
                "shape": tuple(text.removeprefix("torch.Size") for text in self._shape_texts.texts),
            },
        }

    def gaps(self) -> tuple[tuple[str, str], ...]:
        """What this tally could not see, as (name, sentence)."""
        return tuple(self._gaps())

    def _gaps(self) -> Iterator[tuple[str, str]]:
        yield "operator scratch", "Working memory inside operators (oneDNN, MKL) is not seen; it adds to the peak."
        yield "other threads", "Tensors made in other Python threads or processes are seen only once this thread uses them."
        if _compiled_something():
            yield "compiled code", "Memory inside compiled functions is not seen; what they return is, once it is used."
        if self._borrowed:
            yield "borrowed memory", (
                f"{self._borrowed} storages of {self._borrowed_bytes} bytes were made outside operators (NumPy, files, shared "
                "memory); they count as long as a tensor uses them."
            )
        if self._late:
            yield "seen late", f"{self._late} storages were first seen some time after they were made."
        if self._rows.lost:
            yield "thinned", (
                f"{self._rows.lost} early events of blocks up to {self._rows.lost_largest_bytes} bytes were let go to "
                "bound memory; the peak and what held it are exact, the curve before it may be too low."
            )
        for what, times in self.unseen.items():
            yield "unseen", f"{what} ({times} times)"

    @property
    def lost(self) -> tuple[int, int]:
        """How many early events were thinned away, and the time (of the clock) until which that may be."""
        return self._rows.lost, self._rows.lost_until_ns


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


def _speak_for_themselves(types: Any) -> bool:
    """Whether a tensor class among these handles operators itself; a class that only renames Tensor does not."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(kind is not Parameter and kind.__torch_dispatch__ is not plain for kind in types)


BIRTHS = frozenset({"aten::lift_fresh", "aten::lift", "aten::set_", "aten::resize_", "aten::resize_as_"})
"""Operators that return an alias of a storage which nothing has dispatched before: that is where it is new."""
EMPTY = frozenset({"aten::_efficientzerotensor"})
"""Operators whose result has a size and no memory."""


def _returns_alias(func: Any) -> str:
    """What an unknown storage that this operator returns is: "" new, "birth" new through an alias, "old", or "nothing"."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ""
    if schema.name in EMPTY:
        return "nothing"
    if not any(result.alias_info is not None for result in schema.returns):
        return ""
    is_out = any(argument.is_out for argument in schema.arguments)
    return "birth" if is_out or schema.name in BIRTHS else "old"


# --- SEAM: the stack of dispatch modes, torch._C._*_torch_dispatch_stack, seen in 2.12 and 2.13 ---------------------------
# Not `__enter__`: it notes flags which a mode that the user leaves on would restore wrongly after ours has gone.

_function_modes = torch._C._len_torch_function_stack


def _push(mode: TorchDispatchMode) -> None:
    torch._C._push_on_torch_dispatch_stack(mode)


def _top() -> Any:
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def _remove(mode: TorchDispatchMode) -> bool:
    """Take a mode off the stack of this thread, wherever it lies; the others stay in their order."""
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
