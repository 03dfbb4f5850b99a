"""Where the bytes of a language model's peak are: weights, gradients, optimizer, activations, logits, KV cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from memlab.analysis.breakdown import ROUNDING, categories_at, workspaces
from memlab.analysis.peak import alive_at, peak
from memlab.analysis.timeline import timeline
from memlab.trace.columns import MODULE_BEGINS, Array, Category, Phase
from memlab.trace.trace import Trace

WEIGHTS, LOGITS, CACHE = "weights", "logits", "KV cache"
_NAMES = {
    Category.PARAMETER: WEIGHTS,
    Category.BUFFER: WEIGHTS,
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer state",
    Category.ACTIVATION: "activations",
    Category.TEMPORARY: "temporaries",
    Category.INPUT: "other",
    Category.OTHER: "other",
}
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element by the dtypes that logits have."""


@dataclass(frozen=True, slots=True)
class Generated:
    """An inference: the peaks of *allocated* while the prompt is read and afterwards, and the KV cache in between."""

    prefill_bytes: int
    decode_bytes: int
    cache_bytes: int


def shares(trace: Trace, device: int, scores: Collection[int]) -> dict[str, int]:
    """Name -> bytes at the peak of *allocated*, summing to it, the largest first.

    Weights are parameters and buffers, and what was made with them before the first forward, as the scales of quantized ones.
    Logits are tensors with one of these numbers of `scores`, their gradients and copies too. The KV cache is what layers
    keep after a forward that autograd did not record.
    """
    at = peak(trace, device)
    return _shares(trace, device, scores, at.row, at.low_bytes)


def _shares(trace: Trace, device: int, scores: Collection[int], row: int, total_bytes: int) -> dict[str, int]:
    rows = alive_at(trace, device, row)
    block, size = trace.events.block[rows], trace.events.requested_bytes[rows]
    category, begins = categories_at(trace, row)[block], _forwards(trace)
    is_before = rows < (int(begins[0]) if len(begins) else len(trace.events))
    names = np.array([_NAMES[one] for one in Category], dtype=object)[category]
    is_other = category == Category.OTHER
    names[is_other & is_before] = WEIGHTS
    names[is_other & (trace.blocks.module[block] >= 0) & (trace.blocks.phase[block] == Phase.FORWARD)] = CACHE
    width = np.array([_WIDTHS.get(dtype, 0) for dtype in trace.texts["dtype"]] + [0])[trace.blocks.dtype[block]]
    is_made = np.isin(category, (Category.ACTIVATION, Category.TEMPORARY, Category.OTHER)) & ~is_before
    for count in scores:
        names[is_made & (width > 0) & (size == count * width)] = LOGITS
    names[workspaces(trace)[block]] = "workspaces"
    found = {str(name): int(size[names == name].sum()) for name in dict.fromkeys(names)}
    found[ROUNDING] = total_bytes - sum(found.values())
    return {name: count for name, count in sorted(found.items(), key=lambda one: -one[1]) if count}


def generated(trace: Trace, device: int, scores: Collection[int]) -> Generated:
    """The two parts of an inference whose first forward reads the prompt."""
    line, begins = timeline(trace, device), _forwards(trace)
    second = int(begins[1]) if len(begins) > 1 else len(trace.events)
    is_prefill = line.row < second
    decode = line.bytes[~is_prefill]
    after = _shares(trace, device, scores, second - 1, line.at_row(second - 1))
    return Generated(int(line.bytes[is_prefill].max()), int(decode.max(initial=0)), after.get(CACHE, 0))


def _forwards(trace: Trace) -> Array:
    """The rows at which a forward of the whole model begins."""
    begins = np.flatnonzero(np.isin(trace.marks.kind, MODULE_BEGINS))
    whole = begins[trace.marks.name[begins] == trace.marks.name[begins[0]]] if len(begins) else begins
    rows: Array = trace.marks.row[whole]
    return rows
