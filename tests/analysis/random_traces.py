"""Traces of blocks that come and go at random, always the same for a seed."""

from __future__ import annotations

import dataclasses

import numpy as np
from scripted_traces import GPU, Script

from memlab.trace import Category, Device, Phase, Trace
from memlab.trace.columns import Recategorised


def recategorised(trace: Trace, *changes: tuple[int, int, Category]) -> Trace:
    """The same trace with changes (block, row, category)."""
    return dataclasses.replace(trace, recategorised=Recategorised(*np.array(changes, "i8").reshape(-1, 3).T))


def random_trace(seed: int) -> Trace:
    """Of two devices, some of it from before, with phases, modules, and categories that change now and then."""
    random, script = np.random.default_rng(seed), Script(GPU, Device(1, "second"))
    alive: list[int] = []
    for step in range(int(random.integers(60))):
        size = int(random.integers(1, 5000))
        known = {"requested": int(random.integers(size + 1)), "device": int(random.choice([0, 0, 1]))}
        what = random.choice(["alloc", "alloc", "free", "preexisting"])
        if what == "free" and alive:
            script.free(alive.pop(int(random.integers(len(alive)))))
        elif what == "preexisting" and step < 10:
            alive.append(script.preexisting(size, **known))
        else:
            known |= {
                "phase": Phase(size % 4),
                "category": int(random.integers(8)),
                "module": ["", "a", "b.c"][size % 3],
            }
            alive.append(script.alloc(size, **known))
    trace = script.trace()
    count, rows = len(trace.blocks), len(trace.events)
    changes = [random.integers((count, rows + 1, 8)) for _ in range(random.integers(12))] if count else []
    return recategorised(trace, *changes)
