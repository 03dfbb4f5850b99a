"""The price of a saving: FLOPs, counted, or seconds as a ratio with its spread; never an absolute time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from memlab.api.provenance import provenance_here
from memlab.errors import MemlabError

PAIRS = 5
"""How often both steps are timed, one after the other, so that other work on the machine meets both."""


@dataclass(frozen=True, slots=True)
class Price:
    """How many times as much `after` takes as `before`: the median of the pairs, the lowest and the highest."""

    sentence: str
    middle: float
    low: float
    source: str


def price(
    what: str, before: Callable[[], object], after: Callable[[], object], at_most: float, of: str, device: str
) -> Price:
    """Count or time both steps. Raises MemlabError for anything but "FLOPs" and "seconds"."""
    try:
        return _price(what, before, after, at_most, of, device)
    finally:
        gc.collect()  # optimizers and hooks refer to themselves, and the next peak would have what they hold


def _price(
    what: str, before: Callable[[], object], after: Callable[[], object], at_most: float, of: str, device: str
) -> Price:
    if of == "FLOPs":
        first, second = _flops(before), _flops(after)
        if not first:
            raise MemlabError("the step without the saving has no FLOPs that PyTorch counts: compare seconds.")
        ratio = second / first
        times = f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"
        return Price(f"{what}: {times} times the FLOPs (at most {at_most:g})", ratio, ratio, "computed")
    if of != "seconds":
        raise MemlabError(f'a price is in "FLOPs" or "seconds", got {of!r:.80}.')
    source = provenance_here([device])
    if source == "simulated":
        return Price(f"{what}: not measurable here: a simulated GPU has no times", 0.0, 0.0, source)
    before(), after()  # the first calls import and allocate
    ratios = sorted(_seconds(after) / _seconds(before) for _ in range(PAIRS))
    middle = statistics.median(ratios)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    sentence = f"{what}: {middle:.2f} times the seconds ({spread} in {PAIRS} pairs; at most {at_most:g})"
    return Price(sentence, middle, ratios[0], f"{source} on {device}")


def _flops(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def _seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
