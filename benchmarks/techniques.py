"""What techniques are said to save beside what they save: every technique, with the workload that shows it.

    python -m benchmarks.techniques                        # predict, measure on the CPU, write docs/techniques.md
    python -m benchmarks.techniques measure FILE           # where CUDA is, a GPU or a simulated GPU: its own allocator
    python -m benchmarks.techniques table                  # docs/techniques.md anew from what was measured before

*Predicted* is what `memlab.advise` says of the technique for a GPU like the one of `benchmarks/results/techniques-cuda.json`,
without having measured anything. *Measured* are the same jobs run with the caching allocator of CUDA, and on the CPU. Time
is that of steps of both jobs in turn on one thread of the CPU, as a ratio: it holds for that CPU and these small sizes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import memlab
from benchmarks.prediction import device_facts, in_child
from benchmarks.ranks import in_a_process
from memlab.api.advise.search import agreement
from memlab.api.workload_run import WORLD_SIZE, baseline_patterns_of, run_workload, work_of
from memlab.prediction.cards import Card
from memlab.saving_techniques import Technique, techniques
from memlab.units import GiB, MiB
from memlab.workloads.job import Job, seeded
from memlab.workloads.workload import Workload

RESULTS = Path(__file__).parent / "results"
HERE, CUDA = RESULTS / "techniques.json", RESULTS / "techniques-cuda.json"
TABLE = Path(__file__).parent.parent / "docs" / "techniques.md"
ROUNDS, ROUNDS_S = 15, 4.0
"""So many pairs of steps are timed at most, and no more are begun after so many seconds."""
SIMULATED_GPU = {"name": "FakeGPU sm_80", "total_bytes": 8 * GiB, "capability": [8, 0], "multiprocessors": 108}
Record = dict[str, Any]


def workload_of(one: Technique) -> tuple[Workload, str]:
    """The workload that shows it, and its size."""
    if isinstance(one.demo.workload, str):
        return memlab.workloads[one.demo.workload], one.demo.size  # type: ignore[index]
    return Workload(f"one for {one.name}", "", one.demo.workload, {"own": {}}), "own"


def card_like(facts: Record) -> Card:
    """A card with the facts of a device, of which nothing but tensors and the allocator counts."""
    total = facts["total_bytes"]
    return Card(facts["name"], total, tuple(facts["capability"]), (0, 0), total, total, facts["multiprocessors"])


# --- said ----------------------------------------------------------------------------------------------------------------


def said(one: Technique, card: Card) -> Record:
    """What the advisor says of it."""
    workload, size = workload_of(one)
    advice = memlab.advise(
        workload, 1 if one.demo.of == "reserved" else None, card=card, techniques=[one.name],
        habits=baseline_patterns_of([one.name]),
        size=size, steps=one.demo.steps, world_size=WORLD_SIZE if one.shards else 1,
    )  # fmt: skip
    found = advice.findings.tried[0]
    if found.failed:
        return {"error": found.failed}
    before, after = (sum(of) // 2 for of in (advice.findings.before_bytes, found.peak_bytes))
    return {"before": before, "after": after, "saved": found.saved_bytes, "name": workload.name}


# --- measured -------------------------------------------------------------------------------------------------------------


def measured(one: Technique, on: str) -> Record:
    """Its two jobs, tracked."""
    plain, changed = (_run(one, on, names, habits) for names, habits in _both(one))
    before, after = (_peak(one, run) for run in (plain, changed))
    verdict, why, is_wrong = agreement(plain, changed, [one.name])
    return {"before": before, "after": after, "results": verdict, "why": why, "is_wrong": is_wrong}


def measured_on_cuda(one: Technique) -> Record:
    """The same, with each peak from a process of its own: cuBLAS's workspaces stay from one job to the next.

    What CUDA's allocator has to be told is said before it starts; then the job itself is the plain one.
    """
    (plain, habits), (chosen, none) = _both(one)
    if one.shards:
        rank = in_a_process("measured", f"{one.name} as a technique", 0)
        told = in_child(_single(functools.partial(_alone, one, "", plain, habits)))
        return told if "error" in told else {"before": told["peak"], "after": rank["allocated"]}
    settings = [("", plain, habits), (one.conf, [], habits) if one.conf else ("", chosen, none)]
    told = [in_child(_single(functools.partial(_alone, one, *each))) for each in settings]
    if failed := next((record for record in told if "error" in record), None):
        return failed
    found = {"before": told[0]["peak"], "after": told[1]["peak"]}
    return found if one.conf else {**in_child(_single(functools.partial(measured, one, "cuda"))), **found}


def _peak(one: Technique, run: Any) -> int:
    return int(getattr(run, f"peak_{one.demo.of}_bytes"))


def _both(one: Technique) -> tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]]:
    return ([], baseline_patterns_of([one.name])), ([one.name], [])


def _run(one: Technique, on: str, names: list[str], habits: list[str]) -> Any:
    workload, size = workload_of(one)
    work = work_of(workload, size)
    return run_workload(work, names, habits, on=on, steps=one.demo.steps, timed=False)


def _alone(one: Technique, conf: str, names: list[str], habits: list[str]) -> Record:
    """The peak of one job, where the allocator was told `conf` before it started."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = conf
    return {"peak": _peak(one, _run(one, "cuda", names, habits))}


# --- time -----------------------------------------------------------------------------------------------------------------


def timed(one: Technique) -> Record:
    """Steps of both jobs in turn: the median of the ratios of each pair, and their middle half."""
    jobs = [_job(one, names, habits) for names, habits in _both(one)]
    _round(jobs)
    ratios: list[float] = []
    start = time.perf_counter()
    while len(ratios) < ROUNDS and (len(ratios) < 3 or time.perf_counter() - start < ROUNDS_S):
        first, second = _round(jobs if len(ratios) % 2 == 0 else jobs[::-1])
        ratios.append(second / first if len(ratios) % 2 == 0 else first / second)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "low": low, "high": high, "rounds": len(ratios)}


def _job(one: Technique, names: list[str], habits: list[str]) -> Job:
    job = Job("cpu", 1)
    workload, size = workload_of(one)
    with seeded():
        techniques.prepare(job, workload.sized(size), names, habits)
    return job


def _round(jobs: list[Job]) -> list[float]:
    taken = []
    for job in jobs:
        start = time.perf_counter()
        job.run()
        taken.append(time.perf_counter() - start)
    return taken


# --- what is no technique of memlab -----------------------------------------------------------------------------------------


def resize_once() -> Record:
    """Peaks of two steps on pictures that are kept large and resized in each step, and on pictures that are kept small."""
    before, after = (_on_pictures(keep_large) for keep_large in (True, False))
    return {"cpu": {"before": before, "after": after}}


def _on_pictures(keep_large: bool) -> int:
    with seeded(), memlab.track(show=False) as run:
        pictures, labels = torch.randn(8, 3, 64, 64), torch.randint(8, (8,))
        if keep_large:
            pictures = functional.interpolate(pictures, scale_factor=2, mode="nearest")
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16 * 16, 8))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            x = functional.avg_pool2d(pictures, 2) if keep_large else pictures
            functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
    return run.peak_allocated_bytes


PRACTICES = {"resize_once": resize_once}
"""Name of the record -> what measures it, for docs/tips.md."""


# --- all of them ----------------------------------------------------------------------------------------------------------


def _known(file: Path, only: str, **facts: Any) -> Record:
    """What stays in a file if `only` one technique is measured, else these facts and no techniques."""
    found: Record = json.loads(file.read_text()) if only else facts | {"techniques": {}}
    return found


def here(only: str) -> Record:
    """Said, measured on the CPU, and timed; `only` one technique, or all."""
    facts = json.loads(CUDA.read_text())["device"] if CUDA.exists() else SIMULATED_GPU
    card = card_like(facts)
    found = _known(HERE, only, made_by=made_by(), card=facts)
    for one in [techniques[only]] if only else techniques.values():
        work: dict[str, Callable[[], Record]] = {"said": functools.partial(said, one, card)}
        if one.demo.device == "cpu":
            work |= {"cpu": functools.partial(measured, one, "cpu"), "time": functools.partial(timed, one)}
        found["techniques"][one.name] = {name: in_child(_single(each)) for name, each in work.items()}
        progress(one.name, found["techniques"][one.name])
    if not only:
        found["techniques"] |= {name: in_child(_single(work)) for name, work in PRACTICES.items()}
    return found


def on_cuda(file: Path, only: str) -> Record:
    """Measured where CUDA is."""
    found = _known(file, only, made_by=made_by(), device=in_child(device_facts))
    for one in [techniques[only]] if only else techniques.values():
        found["techniques"][one.name] = measured_on_cuda(one)
        progress(one.name, found["techniques"][one.name])
    return found


def _single(work: Callable[[], Record]) -> Callable[[], Record]:
    def alone() -> Record:
        torch.set_num_threads(1)
        return work()

    return alone


def made_by() -> str:
    """The versions."""
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"


def progress(name: str, record: Record) -> None:
    """One line for each technique."""
    print(f"{name}: {json.dumps(record)[:300]}", file=sys.stderr, flush=True)


# --- the table ------------------------------------------------------------------------------------------------------------


HEAD = """\
# Techniques: predicted and measured savings

Generated by `python -m benchmarks.techniques`. Figures are for the small workload that demonstrates each technique, compared with
the common code that it replaces; `memlab.techniques` has all of this as values, and [advise](advise.md) tries them on your work.
Practices without a switch (pinned memory, seeds, loader workers) are in the [lessons](../notebooks/README.md).

- *Predicted*: what `memlab.advise` says for {card}, by running the changed step without a GPU. Predicted with {here}.
- *Allocator*: the same jobs with CUDA's real caching allocator, on {name}. Measured with {there}
- *CPU*: the same jobs measured on the CPU, every storage counted. There are no cuBLAS workspaces (up to 16 MiB of the small peaks
  on a GPU), so shares are larger.
- *Time*: the ratio of steps with and without the technique, alternating, on one CPU thread; quartiles in brackets. On a GPU the
  ratio differs.
- *Results*: `memlab.compare` on the CPU of losses and trained weights, or of the output.

All sizes are MiB of the peak of *allocated*, unless another peak is named.
"""


def share(record: Record | None) -> float | None:
    """The saving as a share of the peak before."""
    if not record or "error" in record or not record.get("before"):
        return None
    return (record["before"] - record["after"]) / record["before"]


def lines(found: Record, cuda: Record) -> Iterator[str]:
    """The page."""
    name = cuda["device"]["name"]
    note = " That is a simulated GPU: sizes are real, kernels do not run." if name.startswith("FakeGPU") else ""
    yield HEAD.format(card=found["card"]["name"], here=found["made_by"], name=name, there=f"{cuda['made_by']}.{note}")
    yield from _summary(found, cuda)
    savings = [one for one in techniques.values() if one.kind == "saving"]
    yield "\n## Savings\n"
    yield from _figures(savings, found, cuda)
    yield "\n## Myths\n"
    yield "A myth is often said to save memory, and does not.\n"
    yield from _figures([one for one in techniques.values() if one.kind == "myth"], found, cuda)
    yield "\n## What each does, what it costs, and when it does not help\n"
    for kind, heading in (("saving", "Savings"), ("myth", "Myths")):
        yield f"\n### {heading}\n"
        yield "| technique | idea | attacks | results | price | when not | tips |"
        yield "|---|---|---|---|---|---|---|"
        for one in techniques.values():
            if one.kind == kind:
                cells = (
                    one.name,
                    one.idea,
                    ", ".join(one.attacks),
                    str(one.equality),
                    one.price,
                    one.not_when,
                    ", ".join(one.tips),
                )
                yield f"| {' | '.join(map(_cell, cells))} |"


def _summary(found: Record, cuda: Record) -> Iterator[str]:
    names = [one.name for one in techniques.values() if one.kind == "saving"]
    both = [
        (found["techniques"][name]["said"], cuda["techniques"][name])
        for name in names
        if share(found["techniques"].get(name, {}).get("said")) is not None
        and share(cuda["techniques"].get(name)) is not None
    ]
    if both:
        off = [_distance(*one) for one in both]
        others = [one for one in off if one]
        rest = f"; the others are at most {_percent(max(others), 2)} of the peak outside" if others else ""
        exact = sum(mine["saved"][0] == mine["saved"][1] for mine, _ in both)
        yield (
            f"Of {len(names)} savings {len(both)} were predicted and measured with CUDA's allocator, each job in its own process.\n"
            f"{off.count(0.0)} lie within the predicted interval, which is a single number for {exact} of them{rest}.\n"
            "Intervals come from cuDNN workspaces, which a prediction only bounds, and which a simulated GPU does not have."
        )


def _distance(mine: Record, real: Record) -> float:
    """How far what was measured is outside of what was said, as a share of the measured peak before."""
    low, high = mine["saved"]
    found = real["before"] - real["after"]
    return max(low - found, found - high, 0) / real["before"]


def _figures(some: list[Technique], found: Record, cuda: Record) -> Iterator[str]:
    yield "| technique | workload | before | predicted | allocator | CPU before | CPU | time | results | claimed |"
    yield "|---|---|--:|--:|--:|--:|--:|---|---|---|"
    for one in some:
        record, real = found["techniques"].get(one.name, {}), cuda["techniques"].get(one.name)
        mine, cpu = record.get("said"), record.get("cpu")
        workload = one.demo.workload if isinstance(one.demo.workload, str) else "its own"
        of = "" if one.demo.of == "allocated" else f" ({one.demo.of})"
        cells = (
            one.name + of, workload, _mib(mine, "before"), _saving(mine), _saving(real), _mib(cpu, "before"), _saving(cpu),
            _time(record.get("time")), (cpu or {}).get("results", "not checked"), one.equality.kind,
        )  # fmt: skip
        yield f"| {' | '.join(map(_cell, cells))} |"


def _mib(record: Record | None, key: str) -> str:
    return f"{record[key] / MiB:.2f}" if record and key in record else "–"


def _saving(record: Record | None) -> str:
    if record and "error" in record:
        return record["error"].split("\n")[0][:120]
    part = share(record)
    return (
        "–"
        if part is None or record is None
        else f"−{(record['before'] - record['after']) / MiB:.2f} ({_percent(part)})".replace("−-", "+")
    )


def _percent(part: float, digits: int = 0) -> str:
    text = f"{100 * part:.{digits}f}"
    return f"{text.removeprefix('-') if not float(text) else text} %"


def _time(record: Record | None) -> str:
    return f"{record['ratio']:.2f} ({record['low']:.2f}–{record['high']:.2f})" if record and "ratio" in record else "–"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("all", "measure", "table"), nargs="?", default="all")
    parser.add_argument("file", nargs="?", type=Path, default=CUDA)
    parser.add_argument("--only", default="", help="one technique; the records of the others stay as they are")
    asked = parser.parse_args()
    gc.collect()
    if asked.what == "measure":
        asked.file.write_text(json.dumps(on_cuda(asked.file, asked.only), indent=1) + "\n")
        return
    if asked.what == "all":
        HERE.write_text(json.dumps(here(asked.only), indent=1) + "\n")
    cuda = (
        json.loads(CUDA.read_text())
        if CUDA.exists()
        else {"device": {"name": "no device"}, "made_by": "", "techniques": {}}
    )
    TABLE.write_text("\n".join(lines(json.loads(HERE.read_text()), cuda)) + "\n")


if __name__ == "__main__":
    main()
