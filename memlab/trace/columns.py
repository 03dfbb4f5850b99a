"""The columns of a trace: immutable tables of numpy arrays of equal length."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np

from memlab.errors import TraceError

Array = np.ndarray[Any, np.dtype[Any]]
# Columns of one dtype each, little-endian: `Columns` reads these annotations.
U1: TypeAlias = Array
I2: TypeAlias = Array
I4: TypeAlias = Array
I8: TypeAlias = Array
_DTYPES = {"U1": "u1", "I2": "<i2", "I4": "<i4", "I8": "<i8"}

WORKSPACE_OF = "workspace of "
"""The prefix of block names for library workspaces, which belong to no layer."""


class Kind(enum.IntEnum):
    """What happened in one row of the events."""

    PREEXISTING = 0
    """A block that was alive when the trace begins (or, on the CPU, an older one seen for the first time)."""
    ALLOC = 1
    FREE = 2
    """The block can be reused. After a FREE_PENDING it has no allocated bytes: those were subtracted then."""
    FREE_PENDING = 3
    """The owner freed it, so it is no longer *allocated*; another stream may still use it."""
    SEGMENT_ALLOC = 4
    SEGMENT_FREE = 5
    SEGMENT_MAP = 6
    SEGMENT_UNMAP = 7
    OOM = 8


class Phase(enum.IntEnum):
    """The part of a training step in which something happened."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class Category(enum.IntEnum):
    """What a block is for, derived from objects; OTHER if unknown."""

    OTHER = 0
    PARAMETER = 1
    BUFFER = 2
    GRADIENT = 3
    ACTIVATION = 4
    OPTIMIZER = 5
    INPUT = 6
    TEMPORARY = 7


class MarkKind(enum.IntEnum):
    """Kinds of marks between events; the `name` of a mark is a phase, a module path or a line ("cell:12")."""

    PHASE_BEGIN = 0
    PHASE_END = 1
    MODULE_BEGIN = 2
    MODULE_END = 3
    LINE = 4
    """A line of watched code begins; it lasts until the next one."""
    BACKWARD_OF = 5
    """Backward now works on the forward of this module."""
    MODULE_BEGIN_NO_GRAD = 6
    """A module's forward begins without autograd recording."""
    BACKWARD_CALL = 7
    """The user's line that is about to call backward."""


MODULE_BEGINS = (int(MarkKind.MODULE_BEGIN), int(MarkKind.MODULE_BEGIN_NO_GRAD))  # millions of marks are compared


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns of equal length. A column may be given as any sequence; it becomes a read-only array of its dtype."""

    DTYPES: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls) -> None:
        cls.DTYPES = {name: _DTYPES[kind] for name, kind in cls.__annotations__.items() if kind in _DTYPES}

    def __post_init__(self) -> None:
        for name, dtype in self.DTYPES.items():
            column = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if column.ndim != 1:
                raise TraceError(f"column {name} of {type(self).__name__} must be flat, got shape {column.shape}")
            column = column.view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        lengths = {name: len(getattr(self, name)) for name in self.DTYPES}
        if len(set(lengths.values())) > 1:
            raise TraceError(f"columns of {type(self).__name__} differ in length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.DTYPES))))

    def arrays(self) -> dict[str, Array]:
        """Name -> array, in the order of the schema."""
        return {name: getattr(self, name) for name in self.DTYPES}

    def rows(self, selection: slice | Array) -> Self:
        """The same table with the selected rows only."""
        return type(self)(**{name: column[selection] for name, column in self.arrays().items()})

    def replace(self, **columns: Array) -> Self:
        """The same table with some columns replaced."""
        return dataclasses.replace(self, **columns)

    @classmethod
    def empty(cls) -> Self:
        """A table without rows."""
        return cls(**{name: np.empty(0, dtype) for name, dtype in cls.DTYPES.items()})

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """One table of all the rows of `parts`, in order."""
        if not parts:
            return cls.empty()
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.DTYPES})


@dataclass(frozen=True, slots=True, eq=False)
class Events(Columns):
    """One row per event, in order.

    `time_ns` since the start; `block` is the id of one allocation, never reused, -1 in segment and OOM rows; sizes are
    positive, the kind says whether they are allocated or freed (see `deltas`); in segment rows `allocated_bytes` is the size of the
    segment or of the mapped range, in OOM rows `requested_bytes` is the request and `allocated_bytes` what the driver
    had free. `device` is -1 for the CPU, else the accelerator's index; `stream` and `address` as the allocator gives them.
    """

    time_ns: I8
    kind: U1
    block: I4
    requested_bytes: I8
    allocated_bytes: I8
    device: I2
    stream: I8
    address: I8


@dataclass(frozen=True, slots=True, eq=False)
class Blocks(Columns):
    """One row per block (row number = block id): facts about an allocation as a whole.

    `category` and `phase` are codes of the enums; the others are indices into `trace.texts[column]`, -1 where unknown.
    `name` is that of the object the block is for: "model.fc.weight", "grad of model.fc.weight".
    """

    TEXTS: ClassVar[tuple[str, ...]] = ("module", "line", "stack", "op", "dtype", "shape", "name")
    category: U1
    phase: U1
    module: I4
    line: I4
    stack: I4
    op: I4
    dtype: I4
    shape: I4
    name: I4

    @classmethod
    def unknown(cls, count: int, **known: Array) -> Blocks:
        """A table of `count` blocks with only the given columns known."""
        nothing = {name: np.full(count, -1 if name in cls.TEXTS else 0, dtype) for name, dtype in cls.DTYPES.items()}
        return cls(**(nothing | known))


@dataclass(frozen=True, slots=True, eq=False)
class Marks(Columns):
    """Moments between events: `row` is the first event at or after the mark; `name` indexes `trace.texts["mark"]`."""

    row: I8
    time_ns: I8
    kind: U1
    name: I4


@dataclass(frozen=True, slots=True, eq=False)
class Recategorised(Columns):
    """A block whose category changes in time: from event `row` on, `block` is `category`."""

    block: I4
    row: I8
    category: U1


@dataclass(frozen=True, slots=True, eq=False)
class Samples(Columns):
    """Counters read by the live sampler; -1 where a counter was not read at that tick. `device` -1 is the host.

    `used_bytes` is what the whole device (or machine) has in use, `own_bytes` what this process has of it (on the host:
    its resident memory), `available_bytes` what is left. `allocated_bytes` and `reserved_bytes` are PyTorch's counters.
    """

    time_ns: I8
    device: I2
    allocated_bytes: I8
    reserved_bytes: I8
    used_bytes: I8
    own_bytes: I8
    available_bytes: I8

    def of(self, device: int, counter: str) -> Samples:
        """Those of a device in which this counter ("used_bytes") was read."""
        return self.rows((self.device == device) & (getattr(self, counter) >= 0))


_OF_BLOCKS, _OF_SEGMENTS = np.zeros((2, 256), np.int8)
_OF_BLOCKS[[Kind.PREEXISTING, Kind.ALLOC]], _OF_BLOCKS[[Kind.FREE, Kind.FREE_PENDING]] = 1, -1
_OF_SEGMENTS[[Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP]], _OF_SEGMENTS[[Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP]] = 1, -1


def deltas(events: Events, of: str) -> Array:
    """What each event adds to a quantity, in bytes: `of` is "allocated", "requested" or "reserved"."""
    if of not in ("allocated", "requested", "reserved"):
        raise TraceError(f'of must be "allocated", "requested" or "reserved", got {of!r}')
    size = events.requested_bytes if of == "requested" else events.allocated_bytes
    return size * (_OF_SEGMENTS if of == "reserved" else _OF_BLOCKS)[events.kind]
