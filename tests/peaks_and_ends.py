"""The peaks of *allocated* and *reserved* of a program, and both at its end: measured on a simulated GPU, or predicted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

import memlab

Steps = Callable[[], Any]
"""A program that returns what it keeps."""


def measured(step: Steps, card: memlab.Card) -> list[int]:
    """By PyTorch's counters."""
    kept = step()
    found = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    found += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    del kept
    return found


def predicted(step: Steps, card: memlab.Card, **how: Any) -> list[int]:
    """As the allocator counts, without the range that a prediction adds to *reserved*."""
    there: list[Any] = []
    facts = memlab.predict(lambda: there.append(step()), card, **how).trace.made_by.devices[0]
    return [
        facts.end_peak_allocated_bytes,
        facts.end_peak_reserved_bytes,
        facts.end_allocated_bytes,
        facts.end_reserved_bytes,
    ]


def print_and_leave(found: list[int]) -> None:
    """As JSON. Autograd's thread may still be at work, and ends the process with an error if Python ends first."""
    print(json.dumps(found), flush=True)
    os._exit(0)
