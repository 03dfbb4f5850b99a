"""Both sides of a comparison, each in a process of its own: `python -m kernel_calls.run_calls native|fake MODULE OUTPUT`.

Writes a JSON of case -> events: "+bytes#number" of each allocation and "-bytes#number" of each free, in order, or "!error";
what was allocated earlier has no number.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import torch

MULTIPROCESSORS = {(7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
"""Those of the simulated GPU."""
SETTLE_S = 0.01
"""The engine's thread frees the last gradients a moment after the call."""


def native(cases: Any) -> dict[str, list[str]]:
    torch.cuda.init()
    gc.freeze()
    return {name: _guarded(lambda setup=setup: _recorded(setup())) for name, setup in cases.items()}


def _recorded(body: Any) -> list[str]:
    body()
    gc.collect()
    time.sleep(SETTLE_S)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10**7, clear_history=True)
    body()
    time.sleep(SETTLE_S)
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    events, numbers, count = [], {}, itertools.count()
    for one in entries:
        if one["action"] == "alloc":
            numbers[one["addr"]] = next(count)
            events.append(f"+{one['size']}#{numbers[one['addr']]}")
        elif one["action"] == "free_requested":
            events.append(f"-{one['size']}#{numbers.pop(one['addr'], '')}")
    return events


def fake(cases: Any, capability: tuple[int, int]) -> dict[str, list[str]]:
    return {name: _guarded(lambda setup=setup: _predicted(setup, capability)) for name, setup in cases.items()}


def _predicted(setup: Any, capability: tuple[int, int]) -> list[str]:
    from memlab.fake_cuda import FakeCuda
    from memlab.trace.columns import Kind

    card = types.SimpleNamespace(
        name="fake", total_bytes=80 << 30, usable_bytes=80 << 30, compute_capability=capability, context_bytes=(0, 0),
        multiprocessors=MULTIPROCESSORS[capability],
    )  # fmt: skip
    gc.freeze()  # else each collection below walks torch
    with FakeCuda(card) as faking:
        body = setup()
        body()
        gc.collect()
        faking.log.record_frees()
        before, older = len(faking.log), len(faking.log.born_as)
        body()
        columns = faking.log.columns()
        del body
    rows = zip(*(columns[name][before:].tolist() for name in ("kind", "nbytes", "block")), strict=True)
    return [
        f"{'+' if kind == Kind.ALLOC else '-'}{size}#{block - older if block >= older else ''}"
        for kind, size, block in rows
    ]


def _guarded(run: Any) -> list[str]:
    try:
        return list(run())
    except Exception as error:
        return [f"!{type(error).__name__}: {str(error)[:200]}"]


def ordered(events: list[str]) -> list[str]:
    """Without numbers, and frees that follow each other in any order: two threads free memory."""
    out: list[str] = []
    frees: list[str] = []
    for event in (one.partition("#")[0] for one in events):
        if event[0] == "-":
            frees.append(event)
        else:
            out += [*sorted(frees), event]
            frees = []
    return out + sorted(frees)


def settled(events: list[str]) -> list[str]:
    """With the frees after the last allocation in any order: Python frees the program's objects."""
    end = max((number for number, event in enumerate(events, 1) if event[0] == "+"), default=0)
    return [*events[:end], *sorted(events[end:])]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    side, module, output, capability = sys.argv[1:5]
    table = importlib.import_module(f"kernel_calls.{module}").CASES
    major, minor = map(int, capability.split("."))
    found = native(table) if side == "native" else fake(table, (major, minor))
    Path(output).write_text(json.dumps(found), encoding="utf-8")
