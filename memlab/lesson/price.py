"""What a saving costs: FLOPs, counted, or seconds; always as a ratio, never an absolute time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from memlab.errors import MemlabError

PAIRS = 5
"""How often both steps are timed, one after the other, so that other work on the machine meets both."""
Step = Callable[[], object]


def flops_ratio(before: Step, after: Step) -> float:
    """How many times the FLOPs of `before` those of `after` are."""
    counts = []
    for step in (before, after):
        with FlopCounterMode(display=False) as counter:
            step()
        counts.append(int(counter.get_total_flops()))
    gc.collect()  # optimizers and hooks refer to themselves, and the next peak would have what they hold
    if not counts[0]:
        raise MemlabError("the step without the saving has no FLOPs that PyTorch counts: compare seconds.")
    return counts[1] / counts[0]


def seconds_ratios(before: Step, after: Step) -> list[float]:
    """How many times as long `after` takes, in each pair, sorted."""
    before(), after()  # the first calls import and allocate
    ratios = sorted(_seconds(after) / _seconds(before) for _ in range(PAIRS))
    gc.collect()
    return ratios


def _seconds(step: Step) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
