"""What `memlab run` adds to a step of a script, and whether its memory stays bounded: one command, one table.

    python -m benchmarks.scripts                            # the CPU; with CUDA, also on a simulated GPU, GPT-2 small
    python -m benchmarks.scripts -w transformer -n 9
    python -m benchmarks.scripts --long 3000000             # so many allocations and frees, and the memory of the process

Each repetition is a process: of its steps the middle third is measured (`--skip`, `--steps`), and a ratio is the CPU time (all
threads) of a measured step over that of the others, as medians of one run. On a simulated GPU kernels take no time, so this is the
worst case: `python -m memlab simulate --card H100 -- python -m benchmarks.scripts`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import RESULTS, facts, keep

ROOT = Path(__file__).parent.parent
STEPS = 24
"""Steps of each third."""
SCRIPT = """
import json, sys, time
import torch
from memlab import workloads

torch.set_num_threads(1)
step = getattr(workloads, sys.argv[1])()
def timed():
    begin = time.process_time(), time.perf_counter()
    step()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.process_time() - begin[0], time.perf_counter() - begin[1]
for _ in range(3):
    step()
print(json.dumps([timed() for _ in range(int(sys.argv[2]))]))
"""
LONG = """
import json, sys, psutil
import torch

model = torch.nn.Linear(8, 8, device=sys.argv[2])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
batch, me, seen = torch.ones(4, 8, device=sys.argv[2]), psutil.Process(), []
events, want, marks = 0, int(sys.argv[1]), 8
while events < want:
    x = batch
    for _ in range(500):
        x = x + 1
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    events += 1000
    if events >= want * (len(seen) + 1) // marks:
        seen.append(me.memory_info().rss)
print(json.dumps(seen))
"""


def run(text: str, *words: str, options: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
    """What a script printed under `memlab run`, and its report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text)
        command = [sys.executable, "-m", "memlab", "run", "--json", *options, str(path), *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    return json.loads(done.stdout.splitlines()[-1]), json.loads(lines[-1])


def step_cost(workload: str) -> dict[str, float]:
    """Ratio of CPU time and of time, and the added milliseconds of a step; three steps went before."""
    options = ("--skip", str(3 + STEPS), "--steps", str(STEPS))
    rows, _ = run(SCRIPT, workload, str(3 * STEPS), options=options)
    bare = [*rows[: STEPS - 1], *rows[2 * STEPS + 1 :]]  # not the step in which the measurement begins or ends
    watched = rows[STEPS + 1 : 2 * STEPS - 1]
    (bare_cpu, bare_s), (cpu, s) = (
        (statistics.median(one[0] for one in part), statistics.median(one[1] for one in part))
        for part in (bare, watched)
    )
    return {"cpu": cpu / bare_cpu, "time": s / bare_s, "added_ms": (cpu - bare_cpu) * 1e3, "bare_ms": bare_cpu * 1e3}


def table(workload: str, repeats: int) -> tuple[str, list[dict[str, float]]]:
    found = [step_cost(workload) for _ in range(repeats)]

    def quartiles(name: str, digits: int) -> str:
        low, middle, high = statistics.quantiles([one[name] for one in found], n=4)
        return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    cells = [workload, quartiles("cpu", 2), quartiles("time", 2), quartiles("added_ms", 1), quartiles("bare_ms", 1)]
    return f"| {' | '.join(cells)} |", found


def long_job(events: int, device: str) -> list[str]:
    """The memory of a script with so many allocations and frees, at eight moments, measured and not."""
    measured, report = run(LONG, str(events), device)
    bare, _ = run(LONG, str(events), device, options=("--skip", "0", "--steps", "1"))
    told = "; ".join(report["not_seen"].values())
    return [
        f"{events:,} allocations and frees on {device}; RSS in MiB at each eighth of the run:",
        "",
        f"- measured to the end: {', '.join(f'{one / 2**20:.0f}' for one in measured)}",
        f"- measured for one step: {', '.join(f'{one / 2**20:.0f}' for one in bare)}",
        f"- not seen: {told}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-w", "--workload", action="append", help="vgg, resnet, transformer, unet or gpt2")
    parser.add_argument("-n", "--repeats", type=int, default=5, help="processes per figure (at least 3)")
    parser.add_argument("--long", type=int, metavar="EVENTS", help="a script with so many allocations and frees")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of scripts-*.json and scripts-*.md")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = facts(asked.repeats) | {"command": f"python -m benchmarks.scripts {' '.join(sys.argv[1:])}".rstrip()}
    listed = [f"- {name}: {text}" for name, text in about.items()]
    if asked.long:
        print("\n".join([*long_job(asked.long, device), *listed]))
        return
    names = asked.workload or (["gpt2"] if device == "cuda" else ["vgg", "resnet", "transformer", "unet"])
    lines = [
        "| workload | CPU time, measured / not | time | added ms per step | ms of a bare step |", "|---|---|---|---|---|",
    ]  # fmt: skip
    results = {}
    for name in names:
        row, results[name] = table(name, asked.repeats)
        lines.append(row)
        print(row, file=sys.stderr, flush=True)
    text = "\n".join([*lines, "", "Medians (quartiles) of processes.", "", *listed]) + "\n"
    keep(asked.out, f"scripts-{device}", {"facts": about, "results": results}, text)


if __name__ == "__main__":
    main()
