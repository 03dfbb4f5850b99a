"""The category of every block: from its labels, else from the phase in which it was made and how long it lived.

Without a label, a block of a forward is a temporary if it was freed before the forward ended (including the loss, up to the
backward), else an activation, unless autograd recorded nothing. A block made outside any phase and freed by a backward
is an activation, one of a backward or an optimizer's step that was freed within it a temporary. One that a module's
conversion made (`to`, `cuda`, `half`), where the stack shows it, is a parameter. The rest is other. An
input label must not come from a forward, and an activation label without a name must be older than the track.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from memlab.probes.marks import MarkColumns
from memlab.probes.tensor_labels import LabelColumns, tensor_labels
from memlab.trace.columns import (
    I8,
    WORKSPACE_OF,
    Array,
    Blocks,
    Category,
    Columns,
    Events,
    Kind,
    MarkKind,
    Phase,
    Recategorised,
)  # fmt: skip
from memlab.trace.spans import Steps
from memlab.trace.trace import MadeBy, Trace

NEVER = np.iinfo(np.int64).max
CONVERSION = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py:\d+ _apply$", re.MULTILINE)
"""The frame of a stack in which a module moves or converts what it has."""
WORKSPACE = f"{WORKSPACE_OF}cuBLAS"
_HANDLES = 2
"""How many workspaces of cuBLAS a stream has."""
_ORDER = (
    Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER, Category.INPUT, Category.ACTIVATION,
)  # fmt: skip
_RANK = np.full(len(Category), len(_ORDER))
_RANK[[*_ORDER]] = np.arange(len(_ORDER))


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """The rows and times at which each block was made and freed (NEVER: still alive)."""

    born_row: Array
    died_row: Array
    born_ns: Array
    died_ns: Array

    @classmethod
    def of(cls, events: Events, first_row: int, count: int) -> Lives:
        """Derive them from the events; older blocks were made at time -1."""
        born_row, died_row = np.zeros(count, np.int64), np.full(count, NEVER)
        comes = np.flatnonzero((events.kind == Kind.PREEXISTING) | (events.kind == Kind.ALLOC))
        goes = np.flatnonzero((events.kind == Kind.FREE) | (events.kind == Kind.FREE_PENDING))[::-1]
        born_row[events.block[comes]] = comes
        died_row[events.block[goes]] = goes  # backwards, so that the first of pending and completed wins
        times = np.append(events.time_ns, NEVER)
        born_ns = np.where(born_row < first_row, -1, times[born_row])
        return cls(born_row, died_row, born_ns, times[np.minimum(died_row, len(events))])


def assemble(
    events: Events,
    births: Mapping[str, Array],
    texts: Mapping[str, tuple[str, ...]],
    made_by: MadeBy,
    first_row: int,
    marks: MarkColumns,
    start_ns: int,
    labels_from_ns: int,
    workspace_sizes: Collection[int] = (),
) -> Trace:
    """The trace of logged events, with times relative to `start_ns`.

    `births` are columns of blocks (op, dtype, shape, stack, line: indices into `texts`). Blocks also get the phase and the
    module in which they were made, and a category and a name from the labels since `labels_from_ns`.
    """
    marks = dataclasses.replace(marks, time_ns=marks.time_ns - start_ns)
    phase, module = marks.steps()
    made = np.flatnonzero(events.kind == Kind.ALLOC)
    moment, block = events.time_ns[made], events.block[made]
    count = len(next(iter(births.values())))
    in_phase, in_module = np.zeros(count, "u1"), np.full(count, -1)
    in_phase[block], in_module[block] = phase.at(moment), module.at(moment)
    trace = Trace(
        events,
        Blocks.unknown(count, **births, phase=in_phase, module=in_module),
        made_by,
        first_row=first_row,
        marks=marks.table(events, first_row),
        texts={**texts, "module": marks.texts, "mark": marks.texts},
    )
    lives = Lives.of(events, first_row, count)
    category = _by_phase(trace, lives, phase, marks.recording())
    labels = tensor_labels.columns(labels_from_ns, time.time_ns())
    trace = _with_buckets(_labeled(trace, lives, category, labels, start_ns), lives, tensor_labels.buckets())
    trace = _with_temporaries(trace, tensor_labels.optimizers_of_flat())
    return _with_workspaces(trace, lives, workspace_sizes).with_gaps(*tensor_labels.gaps(), *marks.gaps())


def _with_buckets(trace: Trace, lives: Lives, buckets: Mapping[str, tuple[int, ...]]) -> Trace:
    """The trace with the buckets of DistributedDataParallel, which no Python object references, named.

    They are recognized by their size: without a label, and made before the run, outside of modules and not a temporary, or by
    a forward of the wrapper itself, which makes nothing else.
    """
    blocks, events = trace.blocks, trace.events
    size = np.append(events.requested_bytes, 0)[lives.born_row]
    names, category, module = blocks.name.copy(), blocks.category.copy(), blocks.module.copy()
    texts = [*trace.texts["name"]]
    for path, sizes in buckets.items():
        own = trace.texts["module"].index(path) if path in trace.texts["module"] else -2
        is_there = (lives.born_ns < 0) | ((module == -1) & (category == Category.OTHER)) | (module == own)
        found = np.isin(size, list(sizes)) & is_there & (names < 0)
        if found.any() and own >= 0:
            names[found], category[found], module[found] = len(texts), int(Category.GRADIENT), own
            texts.append(f"gradient buckets of {path}")
    return trace.with_blocks(
        blocks.replace(name=names, category=category, module=module), {**trace.texts, "name": tuple(texts)}
    )


def _with_temporaries(trace: Trace, optimizers: tuple[str, ...]) -> Trace:
    """The trace with what optimizers of flat parameters made within a step and freed in it, named after them.

    It is as large as the flat parameter, often a quarter of the peak, and belongs to no module.
    """
    blocks = trace.blocks
    found = (blocks.phase == Phase.OPTIMIZER) & (blocks.category == Category.TEMPORARY)
    found &= (blocks.name < 0) & (blocks.module < 0)
    if not optimizers or not found.any():
        return trace
    texts = {**trace.texts, "name": (*trace.texts["name"], f"temporary of {', '.join(optimizers)}")}
    return trace.with_blocks(blocks.replace(name=np.where(found, len(texts["name"]) - 1, blocks.name)), texts)


def _with_workspaces(trace: Trace, lives: Lives, sizes: Collection[int]) -> Trace:
    """The trace, with cuBLAS workspaces named and outside any module.

    PyTorch makes one per handle and stream at the first matrix product, and no object holds it: they are recognized by
    their size and by never being freed. The threads of forward and backward have a handle each; more blocks of that size are
    tensors, as of a graph that is kept.
    """
    blocks, events = trace.blocks, trace.events
    size = np.append(events.requested_bytes, 0)[lives.born_row]
    found = np.isin(size, list(sizes)) & (lives.died_row == NEVER) & (blocks.name < 0)
    of_stream: Counter[tuple[int, int]] = Counter()
    for block in np.flatnonzero(found)[np.argsort(lives.born_row[found], kind="stable")]:
        row = lives.born_row[block]
        stream = int(events.device[row]), int(events.stream[row])
        of_stream[stream] += 1
        found[block] = of_stream[stream] <= _HANDLES
    if not found.any():
        return trace
    texts = {**trace.texts, "name": (*trace.texts["name"], WORKSPACE)}
    name = np.where(found, len(texts["name"]) - 1, blocks.name)
    category = np.where(found, int(Category.OTHER), blocks.category)
    return trace.with_blocks(
        blocks.replace(name=name, category=category, module=np.where(found, -1, blocks.module)), texts
    )


def _by_phase(trace: Trace, lives: Lives, phase: Steps, recording: Steps) -> Array:
    """The category of each block by the phase in which it was made and how long it lived."""
    made, born_ns, died_ns = trace.blocks.phase, lives.born_ns, lives.died_ns
    # When the phase in which it was made ended (NEVER: it did not); events at the time of a mark precede it.
    end_ns = np.append(phase.time_ns, NEVER)[np.searchsorted(phase.time_ns, born_ns, side="right")]
    stays = (died_ns > end_ns) | (died_ns == NEVER)
    # Whether a backward that began after the block was made freed it.
    names = trace.texts["mark"]
    is_backward = trace.marks.name == (names.index("backward") if "backward" in names else -2)
    begins = trace.marks.time_ns[is_backward & (trace.marks.kind == MarkKind.PHASE_BEGIN)]
    ends = np.append(trace.marks.time_ns[is_backward & (trace.marks.kind == MarkKind.PHASE_END)], NEVER)
    last = np.searchsorted(begins, np.minimum(died_ns, NEVER - 1), side="left") - 1
    began = np.append(begins, -1)[last]
    ended = ends[np.searchsorted(ends, began)]
    freed = (last >= 0) & (began > born_ns) & (died_ns <= ended) & (died_ns != NEVER)
    category = np.full(len(made), int(Category.OTHER), np.uint8)
    category[~stays & (made != Phase.OTHER)] = Category.TEMPORARY
    category[stays & (made == Phase.FORWARD) & ((recording.at(born_ns) == 1) | freed)] = Category.ACTIVATION
    category[(made == Phase.OTHER) & freed] = Category.ACTIVATION
    converts = np.array([CONVERSION.search(text) is not None for text in trace.texts["stack"]] + [False])
    category[(made == Phase.OTHER) & converts[trace.blocks.stack]] = Category.PARAMETER
    category[born_ns < 0] = Category.OTHER
    return category


@dataclass(frozen=True, slots=True, eq=False)
class Labeled(Columns):
    """Labels of blocks: which block had which label before which event row."""

    block: I8
    row: I8
    label: I8


def _met(trace: Trace, lives: Lives, labels: LabelColumns, start_ns: int, until_next: bool = False) -> Labeled:
    """The block of each label: the one alive at that address at that time."""
    events = trace.events
    if not len(labels.key) or not len(lives.born_row):
        return Labeled.empty()
    row = np.maximum(np.searchsorted(events.time_ns, labels.time_ns - start_ns, side="right"), trace.first_row)
    addresses, rank = np.unique(events.address[lives.born_row], return_inverse=True)
    place = rank.astype(np.int64) * (len(events) + 1) + lives.born_row
    order = np.argsort(place)
    key = np.minimum(np.searchsorted(addresses, labels.key), len(addresses) - 1)
    found = np.searchsorted(place[order], key * (len(events) + 1) + row, side="left") - 1
    block = order[np.maximum(found, 0)]
    is_it = (found >= 0) & (events.address[lives.born_row[block]] == labels.key)
    is_it &= (lives.born_row[block] < row) & (until_next | (row <= lives.died_row[block]))
    return Labeled(block, row, labels.label).rows(is_it)


def _labeled(trace: Trace, lives: Lives, category: Array, labels: LabelColumns, start_ns: int) -> Trace:
    """The trace with categories, names, modules, dtypes and shapes of its blocks, as far as known."""
    codes = np.array([int(label.category) for label in labels.labels], np.int64)
    met = _met(trace, lives, labels, start_ns)
    code, is_preexisting = codes[met.label], lives.born_ns[met.block] < 0
    counts = (code != Category.INPUT) | (trace.blocks.phase[met.block] != Phase.FORWARD)
    nameless = np.array([not label.name for label in labels.labels], bool)
    # For newer blocks phase and lifetime say more, unless somebody told what it is.
    counts &= (code != Category.ACTIVATION) | is_preexisting | ~nameless[met.label]
    met, code = met.rows(counts), code[counts]
    if not len(met):
        return trace.with_blocks(trace.blocks.replace(category=category))
    blocks, first = _first_of_each(met.block, met.row, _RANK[code])
    _, last = _first_of_each(met.block, -met.row, _RANK[code])
    category[blocks] = code[first]
    # For each block a label of its category, preferably one with a name.
    fits = np.flatnonzero(category[met.block] == code)
    named, best = _first_of_each(met.block[fits], nameless[met.label[fits]], met.row[fits])
    told = met.label[fits[best]]
    # The row from which a block has its later label.
    now, changed = code[last], code[last] != code[first]
    rows = [
        int(met.row[(met.block == block) & (code == became)].min())
        for block, became in zip(blocks[changed], now[changed], strict=True)
    ]
    changes = Recategorised(blocks[changed], np.array(rows, np.int64), now[changed])
    columns, texts = _told(trace, named, told, labels, ("module", "name", "dtype", "shape"))
    return trace.with_blocks(trace.blocks.replace(category=category, **columns), texts, changes)


def with_shapes(trace: Trace, labels: LabelColumns, start_ns: int) -> Trace:
    """The trace with dtype and shape of the blocks made in it that had none: each from the first label after it was made."""
    lives = Lives.of(trace.events, trace.first_row, len(trace.blocks))
    met = _met(trace, lives, labels, start_ns, until_next=True)
    met = met.rows(lives.born_row[met.block] >= trace.first_row)
    block, first = np.unique(met.block, return_index=True)  # labels are in order of time
    columns, texts = _told(trace, block, met.label[first], labels, ("dtype", "shape"), replaces=False)
    return trace.with_blocks(trace.blocks.replace(**columns), texts)


def _told(
    trace: Trace, block: Array, label: Array, labels: LabelColumns, names: Iterable[str], replaces: bool = True
) -> tuple[dict[str, Array], dict[str, tuple[str, ...]]]:
    """These columns of the blocks with what a label says of each of these blocks, and the tables of their texts."""
    texts, columns = dict(trace.texts), {}
    for name in names:
        table = {text: index for index, text in enumerate(texts[name])}
        said = [getattr(one, name) for one in labels.labels]
        number = np.array([table.setdefault(text, len(table)) if text else -1 for text in said], np.int64)[label]
        column = getattr(trace.blocks, name).copy()
        fills = (number >= 0) & (replaces | (column[block] < 0))
        column[block[fills]] = number[fills]
        columns[name], texts[name] = column, tuple(table)
    return columns, texts


def _first_of_each(block: Array, by: Array, then: Array) -> tuple[Array, Array]:
    """(block, index of its first row in the order of `by`, and `then`): of each block there is."""
    order = np.lexsort((then, by, block))
    found, first = np.unique(block[order], return_index=True)
    return found, order[first]
