"""What a real GPU shows, in one command: exactness, cost, device memory. Writes benchmarks/results/gpu-<card>.json.

    python -m benchmarks.gpu           # needs a GPU; `make gpu` runs its tests first

It asserts nothing: tests/gpu does.
"""

from __future__ import annotations

import gc
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memlab
from memlab.probes.counters import Nvml
from memlab.workloads import gpt2

RESULTS = Path(__file__).parent / "results"
STEPS, PAIRS = 10, 9


def main() -> int:
    """Measure and write; 1 where there is no GPU."""
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to measure.", file=sys.stderr)
        return 1
    findings = {
        "machine": machine(),
        "memory before the first tensor": device_memory(),
        "exactness": exactness(),
        "cost of a GPT-2 small step": cost(gpt2()),
        "cost of 10,000 small operations": cost(small_operations),
    }
    RESULTS.mkdir(exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    path = RESULTS / f"gpu-{card}-torch{torch.__version__.split('+')[0]}.json"
    path.write_text(json.dumps(findings, indent=2) + "\n")
    print(json.dumps(findings, indent=2))
    print(f"written to {path.relative_to(RESULTS.parent.parent)}")
    return 0


def machine() -> dict[str, str]:
    """Card, driver and versions."""
    return {
        "card": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "memlab": memlab.__version__,
        "command": "python -m benchmarks.gpu",
    }


def driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:
        return f"unknown ({type(error).__name__})"


def device_memory() -> dict[str, Any]:
    """The context: what the device holds after the first tensor beyond what PyTorch reserved."""
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    with Nvml.open() as nvml:
        reading = nvml.read(torch.cuda.current_device())
        gaps = [gap.text for gap in nvml.gaps]
    return {
        "mem_get_info used_bytes": total - free,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "nvml used_bytes": reading.used_bytes,
        "nvml own_bytes": reading.own_bytes,
        "nvml gaps": gaps,
    }


def exactness() -> dict[str, Any]:
    """One training run, measured and counted."""
    step = gpt2()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with memlab.track("exactness", device="cuda", show=False) as run:
        for _ in range(3):
            step()
    return {
        "events": len(run.trace.events),
        "measured allocated": run.peak_allocated_bytes,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "measured reserved": run.peak_reserved_bytes,
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "is_exact": run.is_exact,
        "gaps": [gap.text for gap in run.gaps],
        "report": run.report().text.splitlines(),
    }


def small_operations() -> None:
    x = torch.ones(16, device="cuda")
    for _ in range(10_000 // STEPS):
        x = x + 1


def cost(step: Callable[[], object]) -> dict[str, Any]:
    """Seconds of a stretch of steps, bare and tracked in turn; begin and end of the track apart."""
    for _ in range(3):
        step()
    rows = [(stretch(step), tracked(step)) for _ in range(PAIRS)]
    ratios = [inside / bare for bare, (inside, _) in rows]
    return {
        "steps": STEPS,
        "bare_s": statistics.median(bare for bare, _ in rows),
        "slowdown": statistics.median(ratios),
        "slowdown quartiles": statistics.quantiles(ratios, n=4),
        "begin and end_s": statistics.median(edges for _, (_, edges) in rows),
    }


def stretch(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def tracked(step: Callable[[], object]) -> tuple[float, float]:
    begin = time.perf_counter()
    with memlab.track("cost", device="cuda", show=False):
        inside = stretch(step)
    return inside, time.perf_counter() - begin - inside


if __name__ == "__main__":
    sys.exit(main())
