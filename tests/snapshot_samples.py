"""Traces for tests of snapshots: a small one by hand, and long ones that the simulated allocator simulated."""

from __future__ import annotations

import functools

import numpy as np
from scripted_traces import GPU, Script

from memlab.allocator.replay import simulate
from memlab.trace import Category, MarkKind, Phase, Trace, deltas
from memlab.trace.columns import Array
from memlab.units import MiB


def small() -> Trace:
    """One block that was there, two that come, one that goes; every kind of text."""
    script = Script()
    script.segment(20 * MiB)
    script.preexisting(4096, 4000)
    script.blocks[0] |= {"category": Category.PARAMETER}
    script.here_it_starts()
    script.mark(MarkKind.PHASE_BEGIN, "backward", 1000)
    grad = script.alloc(
        8192, 2000, 8000, category=Category.GRADIENT, phase=Phase.BACKWARD, module="net.0 <b>", line="/a b/c:d.py:12"
    )
    script.alloc(512, 3000, 4, category=Category.OPTIMIZER)
    script.free(grad, 4000)
    return script.trace()


@functools.cache
def simulated(conf: str = "", seed: int = 0, rows: int = 600) -> Trace:
    """Requests at random on two streams, as the allocator of a card would have served them; some were there before."""
    random = np.random.default_rng(seed)
    script = Script(GPU)
    alive: list[int] = []
    for row in range(rows):
        if row == rows // 6:
            script.here_it_starts()
        if alive and random.random() < 0.45:
            script.free(alive.pop(int(random.integers(len(alive)))), at=row * 2000)
            continue
        large = random.random() < 0.3
        size = int(random.integers(1 << 20, 30 << 20) if large else random.integers(1, 1 << 20))
        alive.append(script.alloc(size, at=row * 2000, category=int(random.integers(8)), line=f"train.py:{row % 9}"))
        script.rows[-1] = (*script.rows[-1][:6], int(random.integers(2)) * 7, 0)
    trace = script.trace()
    return simulate(_streams(trace), 6 << 30, conf)


def _streams(trace: Trace) -> Trace:
    """Frees on the stream of their block."""
    events = trace.events
    stream = events.stream.copy()
    of_block = np.zeros(len(trace.blocks), np.int64)
    born = np.isin(events.kind, (0, 1))
    of_block[events.block[born]] = stream[born]
    stream[~born] = of_block[events.block[~born]]
    from dataclasses import replace

    return replace(trace, events=events.replace(stream=stream))


def levels(trace: Trace) -> tuple[Array, Array]:
    """What is allocated and reserved after every row of the run."""
    first = trace.first_row
    sums = (np.cumsum(deltas(trace.events, of)) for of in ("allocated", "reserved"))
    allocated, reserved = (column[max(first - 1, 0) :] if len(column) else np.zeros(1) for column in sums)
    return allocated, reserved
