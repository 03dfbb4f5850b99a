"""The tensors that were alive at a peak, each with its name, or with what made it; alike ones are a group."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from memlab.analysis.breakdown import BEFORE, categories_at
from memlab.analysis.lines import backward_call_at, line_at
from memlab.analysis.modules import NUMBER, ranged
from memlab.analysis.peak import Peak, alive_at
from memlab.trace.columns import Category, Kind, Phase
from memlab.trace.trace import Trace

_LOOKED_UP = 200  # of how many, the largest, the line is looked up in the marks
_TORCH_FRAME = re.compile(r"[/\\]torch[/\\].*?([^/\\]+)\.py:\d+ (\w+)$")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one size whose names differ in numbers only: "net.0…999.weight"; or, without names, with one origin.

    `phase` is "before the run" for tensors that existed already. `operator`, `module` and `line` are "" where
    unknown, and for tensors with names, which say where they belong.
    """

    name: str
    category: str
    phase: str
    operator: str
    module: str
    line: str
    count: int
    tensor_bytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return self.count * self.tensor_bytes


def tensors_at(trace: Trace, device: int, at: Peak) -> tuple[TensorGroup, ...]:
    """What was alive at a peak, the largest group first."""
    rows, blocks = alive_at(trace, device, at.row), trace.blocks
    block, preexisting = trace.events.block[rows], trace.events.kind[rows] == Kind.PREEXISTING
    texts = ("name", "module", "line", "op", "stack")
    codes = (*(getattr(blocks, column) for column in texts), blocks.phase, categories_at(trace, at.row))
    size = trace.events.requested_bytes[rows]
    keys = np.stack([-size, preexisting, *(column[block].astype(np.int64) for column in codes)], axis=1)
    distinct, first, counts = np.unique(keys, axis=0, return_index=True, return_counts=True)  # the largest first
    alike: defaultdict[tuple[bool, str, int, str, str, str, str], list[tuple[str, str, int]]] = defaultdict(list)
    found = zip(distinct.tolist(), rows[first].tolist(), counts.tolist(), strict=True)
    for place, ((negative, is_older, *codes_of, phase_code, category_code), row, count) in enumerate(found):
        name, module, line, operator, stack = (trace.text(*one) for one in zip(texts, codes_of, strict=True))
        phase = BEFORE if is_older else Phase(phase_code).name.lower()
        if place < _LOOKED_UP and not (is_older or line or name):
            # Its thread has no Python frames: the line that waits for backward has started it.
            line = line_at(trace, row) or (backward_call_at(trace, row) if phase == "backward" else "")
        if name:  # which says where it belongs
            module, line, operator = "", "", ""
        elif not operator and (frame := _TORCH_FRAME.search(stack.partition("\n")[0])) is not None:
            operator = frame[1] if frame[2] == "forward" else frame[2]  # PyTorch's function that allocated: "linear"
        kind = Category(category_code).name.lower()
        pattern = NUMBER.sub("#", name or module)
        alike[name != "", pattern, -negative, kind, phase, line, operator].append((name, module, count))
    groups = []
    for (_, _, nbytes, category, phase, line, operator), members in alike.items():
        names, modules, counts_of = zip(*members, strict=True)
        texts_of = (ranged(names), category, phase, operator, ranged(modules), line)
        groups.append(TensorGroup(*texts_of, sum(counts_of), nbytes))
    return tuple(sorted(groups, key=lambda group: -group.nbytes))
