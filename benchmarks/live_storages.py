"""How long listing what is alive takes, for notebooks of several sizes: seconds of CPU time, and microseconds for each object.

    python -m benchmarks.live_storages                    # all of them
    python -m benchmarks.live_storages "100k tensors" -n 5

"list" is the quick listing without paths, "name" the listing with a path for each storage, "paths" every path of one tensor,
which looks through all modules too. Objects are those that Python's garbage collector knows when the notebook is filled.
It measures time only; the fastest of several rounds counts.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from memlab.references.live_storages import live_storages, paths, storages

ROUNDS = 3


class Thing:
    """An ordinary object with a list in it."""

    def __init__(self, number: int) -> None:
        self.number, self.items = number, [number]


def bare() -> dict[str, Any]:
    return {"x": torch.ones(3)}


def objects() -> dict[str, Any]:
    return {"x": torch.ones(3), "world": [Thing(number) for number in range(50_000)]}


def many_objects() -> dict[str, Any]:
    return {"x": torch.ones(3), "world": {str(i): {"a": [i], "b": (i, [])} for i in range(250_000)}}


def tensors() -> dict[str, Any]:
    return {"x": torch.ones(3), "batches": [torch.ones(2) for _ in range(100_000)]}


def graphs() -> dict[str, Any]:
    x = torch.ones(4, requires_grad=True)
    losses = []
    for _ in range(1000):
        y = x
        for _ in range(50):
            y = y * x + 1
        losses.append(y.sum())
    return {"x": x, "losses": losses}


NOTEBOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "bare": bare,
    "100k objects": objects,
    "1M objects": many_objects,
    "100k tensors": tensors,
    "100k nodes of graphs": graphs,
}


def seconds(action: Callable[[], object], rounds: int) -> float:
    """CPU time of the fastest round."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return min(taken)


def measure(fill: Callable[[], dict[str, Any]], rounds: int) -> tuple[int, float, float, float]:
    """The number of objects, and the seconds of a listing, of one with paths, and of every path to one tensor."""
    notebook, before = types.ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = notebook
    try:
        vars(notebook).update(fill())
        gc.collect()
        count = len(gc.get_objects())
        found = [seconds(action, rounds) for action in (storages, live_storages, lambda: paths(vars(notebook)["x"]))]
        return count, found[0], found[1], found[2]
    finally:
        sys.modules["__main__"] = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help=f"some of: {', '.join(NOTEBOOKS)}")
    parser.add_argument("-n", "--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    print(f"{'notebook':<22}{'objects':>10}{'list':>10}{'name':>10}{'paths':>10}{'us / object':>13}")
    for name in asked.notebooks or NOTEBOOKS:
        count, listed, named, every = measure(NOTEBOOKS[name], asked.rounds)
        row = f"{listed:>8.3f} s{named:>8.3f} s{every:>8.3f} s{1e6 * named / count:>13.2f}"
        print(f"{name:<22}{count:>10,}{row}", flush=True)


if __name__ == "__main__":
    main()
