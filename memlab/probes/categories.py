"""The category of every block: from the claims of objects where there are any, else from its phase and how long it lived.

Rules without a claim. Made in a forward: a temporary if it went before the forward was over (what follows up to the
backward included), else an activation, unless autograd recorded nothing. Made outside of any phase and freed by a
backward: an activation too. Made in backward or in an optimizer's step and gone with it: a temporary. The rest is other.
An input is what a module was given and no forward had made. What was there before and autograd had recorded is an
activation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from memlab.probes.claim_log import ClaimColumns
from memlab.probes.marks import MarkColumns
from memlab.trace.columns import WORKSPACE_OF, Array, Category, Events, Kind, MarkKind, Phase, Recategorised
from memlab.trace.spans import Steps
from memlab.trace.trace import Trace

NEVER = np.iinfo(np.int64).max
WORKSPACE = f"{WORKSPACE_OF}cuBLAS"
_ORDER = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.GRADIENT,
    Category.OPTIMIZER,
    Category.INPUT,
    Category.ACTIVATION,
)
_RANK = np.full(len(Category), len(_ORDER))
_RANK[[*_ORDER]] = np.arange(len(_ORDER))


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """Of each block: the row it came with and the row it went with (NEVER: still there), and their times."""

    born_row: Array
    died_row: Array
    born_ns: Array
    died_ns: Array

    @classmethod
    def of(cls, events: Events, first_row: int, count: int) -> Lives:
        """Read them off the events; what was there at the start was born at time -1."""
        born_row, died_row = np.zeros(count, np.int64), np.full(count, NEVER)
        comes = np.flatnonzero((events.kind == Kind.ADOPT) | (events.kind == Kind.ALLOC))
        goes = np.flatnonzero((events.kind == Kind.FREE) | (events.kind == Kind.FREE_PENDING))[::-1]
        born_row[events.block[comes]] = comes
        died_row[events.block[goes]] = goes  # backwards, so that the first of pending and completed is what stays
        born_ns = np.where(born_row < first_row, -1, _at(events.time_ns, born_row))
        return cls(born_row, died_row, born_ns, np.where(died_row == NEVER, NEVER, _at(events.time_ns, died_row)))


def _at(times: Array, rows: Array) -> Array:
    return times[np.minimum(rows, len(times) - 1)] if len(times) else np.zeros(len(rows), np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Claimed:
    """Claims that met a block: which, before which event row, and the number of the label."""

    block: Array
    row: Array
    label: Array


def claimed(trace: Trace, lives: Lives, claims: ClaimColumns, start_ns: int) -> Claimed:
    """Which block each claim is about: the one alive at that address at that time."""
    events = trace.events
    nothing = Claimed(*(np.empty(0, np.int64) for _ in range(3)))
    if not len(claims.key) or not len(lives.born_row):
        return nothing
    row = np.maximum(np.searchsorted(events.time_ns, claims.time_ns - start_ns, side="right"), trace.first_row)
    addresses, rank = np.unique(events.address[lives.born_row], return_inverse=True)
    place = rank.astype(np.int64) * (len(events) + 1) + lives.born_row
    order = np.argsort(place)
    key = np.minimum(np.searchsorted(addresses, claims.key), len(addresses) - 1)
    found = np.searchsorted(place[order], key * (len(events) + 1) + row, side="left") - 1
    block = order[np.maximum(found, 0)]
    is_it = (found >= 0) & (events.address[lives.born_row[block]] == claims.key)
    is_it &= (lives.born_row[block] < row) & (row <= lives.died_row[block])
    return Claimed(block[is_it], row[is_it], claims.label[is_it])


def categorised(trace: Trace, claims: ClaimColumns, marks: MarkColumns, start_ns: int) -> Trace:
    """The trace with categories, names, modules, dtypes and shapes of its blocks, as far as they can be told."""
    lives = Lives.of(trace.events, trace.first_row, len(trace.blocks))
    phase, _ = marks.since(start_ns).steps()
    category = _by_phase(trace, lives, phase, marks.since(start_ns).recording())
    found = claimed(trace, lives, claims, start_ns)
    codes = np.array([int(label.category) for label in claims.labels], np.int64)
    said, is_adopted = codes[found.label], lives.born_ns[found.block] < 0
    counts = (said != Category.INPUT) | (trace.blocks.phase[found.block] != Phase.FORWARD)
    counts &= (said != Category.ACTIVATION) | is_adopted  # of what was made since, its phase and its life tell more
    found = Claimed(found.block[counts], found.row[counts], found.label[counts])
    category, label, changes = _by_claims(category, found, codes, claims)
    return _named(trace, category, label, changes, claims)


def with_workspaces(trace: Trace, sizes: Collection[int]) -> Trace:
    """The trace in which the workspaces of the math library have their name and belong to no forward.

    They are told by their size and by never being freed: PyTorch makes one for each handle and stream, whenever the first
    product of matrices comes, and no object has it.
    """
    lives = Lives.of(trace.events, trace.first_row, len(trace.blocks))
    blocks = trace.blocks
    size = _at(trace.events.requested_bytes, lives.born_row)
    found = np.isin(size, list(sizes)) & (lives.died_row == NEVER) & (blocks.name < 0)
    if not found.any():
        return trace
    texts = {**trace.texts, "name": (*trace.texts["name"], WORKSPACE)}
    name = np.where(found, len(texts["name"]) - 1, blocks.name)
    category = np.where(found, int(Category.OTHER), blocks.category)
    return trace.with_blocks(
        blocks.replace(name=name, category=category, module=np.where(found, -1, blocks.module)), texts
    )


def _by_phase(trace: Trace, lives: Lives, phase: Steps, recording: Steps) -> Array:
    """The category of each block as its phase and its life tell."""
    made = trace.blocks.phase
    adopted = lives.born_ns < 0
    end_ns, _ = _stretch_end(phase, lives.born_ns)
    stays = (lives.died_ns > end_ns) | (lives.died_ns == NEVER)  # what a mark dates came before it
    category = np.full(len(made), int(Category.OTHER), np.uint8)
    category[~stays & (made != Phase.OTHER)] = Category.TEMPORARY
    kept = stays & (made == Phase.FORWARD) & ((recording.at(lives.born_ns) == 1) | _freed_in_backward(trace, lives))
    category[kept] = Category.ACTIVATION
    category[(made == Phase.OTHER) & _freed_in_backward(trace, lives)] = Category.ACTIVATION
    category[adopted] = Category.OTHER
    return category


def _stretch_end(phase: Steps, times_ns: Array) -> tuple[Array, Array]:
    """When the phase that was on at each of these times ended (NEVER: it did not), and which came next (-1: none)."""
    following = np.searchsorted(phase.time_ns, times_ns, side="right")
    ends = np.append(phase.time_ns, NEVER)
    values = np.append(phase.value.astype(np.int64), -1)
    return ends[following], values[following]


def _freed_in_backward(trace: Trace, lives: Lives) -> Array:
    """Whether a backward that began after the block was made let go of it."""
    begins = trace.marks.time_ns[_backward(trace, MarkKind.PHASE_BEGIN)]
    ends = trace.marks.time_ns[_backward(trace, MarkKind.PHASE_END)]
    if not len(begins):
        return np.zeros(len(lives.born_ns), bool)
    last = np.searchsorted(begins, np.minimum(lives.died_ns, NEVER - 1), side="left") - 1
    began = begins[np.maximum(last, 0)]
    ended = np.append(ends, NEVER)[np.searchsorted(ends, began)]
    return (last >= 0) & (began > lives.born_ns) & (lives.died_ns <= ended) & (lives.died_ns != NEVER)


def _backward(trace: Trace, kind: MarkKind) -> Array:
    texts = trace.texts["mark"]
    name = texts.index("backward") if "backward" in texts else -2
    return (trace.marks.kind == kind) & (trace.marks.name == name)


def _by_claims(
    category: Array, found: Claimed, codes: Array, claims: ClaimColumns
) -> tuple[Array, Array, Recategorised]:
    """Categories with the claims over them, the best label of each block (-1: none), and what changed on the way."""
    label = np.full(len(category), -1, np.int64)
    if not len(found.block):
        return category, label, Recategorised.empty()
    code = codes[found.label]
    first_block, first = _first_of_each(found, code, found.row)
    last_block, last = _first_of_each(found, code, -found.row)
    category = category.copy()
    category[first_block] = code[first]
    label[first_block] = _named_labels(found, code, claims, first_block, code[first])
    changed = code[last] != code[first]
    rows = [
        _since(found, code, block, now) for block, now in zip(last_block[changed], code[last[changed]], strict=True)
    ]
    return category, label, Recategorised(last_block[changed], np.array(rows, np.int64), code[last[changed]])


def _first_of_each(found: Claimed, code: Array, by: Array) -> tuple[Array, Array]:
    """(block, index of its first claim in the order of `by`); at the same moment the stronger category counts."""
    order = np.lexsort((_RANK[code], by, found.block))
    block, first = np.unique(found.block[order], return_index=True)
    return block, order[first]


def _named_labels(found: Claimed, code: Array, claims: ClaimColumns, blocks: Array, wanted: Array) -> Array:
    """Of each block a label of its category, one with a name if there is any."""
    nameless = np.array([not label.name for label in claims.labels], bool)[found.label]
    of_block = np.full(int(found.block.max()) + 1, -1, np.int64)
    of_block[blocks] = wanted
    fits = np.flatnonzero(of_block[found.block] == code)
    order = fits[np.lexsort((found.row[fits], nameless[fits], found.block[fits]))]
    _, first = np.unique(found.block[order], return_index=True)
    best: Array = found.label[order[first]]
    return best


def _since(found: Claimed, code: Array, block: int, now: int) -> int:
    """The row from which on a block was claimed as this."""
    return int(found.row[(found.block == block) & (code == now)].min())


def _named(trace: Trace, category: Array, label: Array, changes: Recategorised, claims: ClaimColumns) -> Trace:
    """The trace with what the labels say of its blocks."""
    texts, columns = dict(trace.texts), {}
    has = np.flatnonzero(label >= 0)
    for column in ("module", "name", "dtype", "shape"):
        table = {text: index for index, text in enumerate(texts[column])}
        said = [getattr(one, column) for one in claims.labels]
        number = np.array([table.setdefault(text, len(table)) if text else -1 for text in said] or [-1], np.int64)
        known = getattr(trace.blocks, column).copy()
        told = number[label[has]]
        known[has[told >= 0]] = told[told >= 0]
        texts[column], columns[column] = tuple(table), known
    return trace.with_blocks(trace.blocks.replace(category=category, **columns), texts, changes)
