"""Runs training programs on the pretend device (PyTorch's own allocator) and with pretend CUDA; prints where they part.

python both_sides.py NAME...        # in the environment of the pretend device; JSON on the last line
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from conftest_cards import card  # noqa: E402

from benchmarks.programs import PROGRAMS  # noqa: E402
from memlab.predictor.pretend import PretendCuda  # noqa: E402

Step = tuple[str, int, int]


def measured(program: Callable[[], None]) -> list[Step]:
    """("+" or "-", number of the block, bytes asked), as PyTorch's history says."""
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**7)
    program()
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    numbers: dict[int, int] = {}
    steps, count = [], 0
    for entry in entries:
        if entry["action"] == "alloc":
            numbers[entry["addr"]] = count
            steps.append(("+", count, entry["size"]))
            count += 1
        elif entry["action"] == "free_completed" and entry["addr"] in numbers:
            steps.append(("-", numbers.pop(entry["addr"]), entry["size"]))
    return steps


def predicted(program: Callable[[], None]) -> list[Step]:
    """The same from the log of pretend CUDA."""
    same = card(80 << 30, (8, 0))
    same.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    with PretendCuda(same) as pretend:
        program()
        columns = pretend.log.columns()
    kinds = ["+" if kind == 1 else "-" for kind in columns["kind"]]
    return list(zip(kinds, columns["block"].tolist(), columns["nbytes"].tolist(), strict=True))


def without_workspaces(steps: list[Step]) -> list[Step]:
    """Without what cuBLAS keeps: the blocks of its size that are never freed."""
    freed = {block for kind, block, _ in steps if kind == "-"}
    numbers: dict[int, int] = {}
    kept = []
    for kind, block, size in steps:
        if size != WORKSPACE or block in freed:
            kept.append((kind, numbers.setdefault(block, len(numbers)), size))
    return kept


WORKSPACE = 8_519_680


def compared(name: str) -> dict[str, Any]:
    """How long both agree, and what comes then."""
    real = without_workspaces(measured(PROGRAMS[name]))
    gc.collect()
    pretend = without_workspaces(predicted(PROGRAMS[name]))
    gc.collect()
    shared = next(
        (i for i, (a, b) in enumerate(zip(real, pretend, strict=False)) if a != b), min(len(real), len(pretend))
    )
    return {
        "measured": len(real), "predicted": len(pretend), "agree": shared,
        "then": [real[shared : shared + 3], pretend[shared : shared + 3]],
    }  # fmt: skip


if __name__ == "__main__":
    torch.cuda.init()
    print(json.dumps({name: compared(name) for name in sys.argv[1:]}))
