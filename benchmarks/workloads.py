"""All workloads in all sizes: parameters, the peak of a training, seconds a step.

    python -m benchmarks.workloads --out docs/workloads.md          # every size
    python -m benchmarks.workloads --size tiny                      # one size, as text

"tiny" and "laptop" are measured on this machine's CPU; "card" is predicted for one card: no seconds.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import memlab
from memlab.api.workload_run import run_workload, work_of
from memlab.units import format_bytes
from memlab.workloads import SIZES, workloads
from memlab.workloads.job import Job, seeded

CARD, STEPS, TIMED = "H100 80GB", 2, 3
HEAD = "| workload | size | parameters | peak | seconds a step | settings |\n| --- | --- | ---: | ---: | ---: | --- |"


def parameters(name: str, size: str) -> int:
    """How many the model has, counted without making them."""
    with torch.device("meta"):
        model = workloads[name].sized(size)()[0]
    return sum(one.numel() for one in model.parameters())


def measured(name: str, size: str) -> tuple[str, str]:
    """The peak and the processor's seconds of a step, on one thread: others on the machine count little then."""
    run = run_workload(work_of(name, size), steps=STEPS, timed=False)
    with seeded():
        job = Job("cpu", 1)
        job.build(workloads[name].sized(size))
        times = [_seconds(job) for _ in range(1 + TIMED)][1:]
    vars(job).clear()  # its pieces are its own methods, a cycle
    return format_bytes(run.peak_allocated_bytes), f"{statistics.median(times):.2f}"


def _seconds(job: Job) -> float:
    start = time.process_time()
    job.run()
    return time.process_time() - start


def predicted(name: str, size: str) -> tuple[str, str]:
    """The peak on the card, and no seconds."""
    run = run_workload(work_of(name, size), steps=STEPS, on=memlab.cards[CARD])
    assert isinstance(run, memlab.Prediction)
    low, high = (format_bytes(one) for one in run.allocated_bytes)
    return low if low == high else f"{low} to {high}", ""


def rows(names: list[str], sizes: list[str]) -> Iterator[str]:
    for name in names:
        for size in sizes:
            start = time.perf_counter()
            peak, step_s = (predicted if size == "card" else measured)(name, size)
            settings = ", ".join(f"{key}={value}" for key, value in workloads[name].sizes[size].items())
            yield f"| {name} | {size} | {parameters(name, size):,} | {peak} | {step_s} | {settings} |"
            print(f"{name} {size}: {peak}, {step_s} s a step, {time.perf_counter() - start:.1f} s in all", flush=True)
            gc.collect()


def page(table: list[str]) -> str:
    return "\n".join(
        [
            "# The workloads",
            "",
            "Made by `python -m benchmarks.workloads --out docs/workloads.md`.",
            "",
            f"Peaks are of *allocated*, over the making of the model and {STEPS} training steps in float32. Sizes tiny and",
            f"laptop are measured on a CPU ({platform.machine()}, torch {torch.__version__}); seconds are the processor time of a",
            "warm step on one thread, the median of three. Size card, the model as published (the mlp has no publication), is",
            f"predicted for the {CARD}, as if it had memory enough.",
            "",
            HEAD,
            *table,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = list(rows(asked.names or list(workloads), asked.size or list(SIZES)))
    if asked.out:
        asked.out.write_text(page(table), encoding="utf-8")


if __name__ == "__main__":
    main()
