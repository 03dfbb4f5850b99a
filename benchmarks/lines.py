"""What following lines costs: steps with `memlab.track`, with lines of the loop, and with lines of the model as well.

    python -m benchmarks.lines                      # the CPU transformer, or GPT-2 small where CUDA is available
    python -m benchmarks.lines --events             # nanoseconds for each line of a loop that does nothing else

The method is that of `benchmarks.overhead`: stretches of bare and of watched steps alternate in one process, and a ratio is
the CPU time (all threads) of a watched stretch over the mean of the bare ones around it, begin and end apart.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import memlab
from benchmarks import overhead
from memlab.workloads import language

MODEL = [language.Attention, language.DecoderBlock, language.Transformer]


def plain(step: overhead.Step) -> AbstractContextManager[Any]:
    return memlab.track(show=False)


def of_loop(step: overhead.Step) -> AbstractContextManager[Any]:
    return memlab.track(show=False, functions=[overhead.repeat, step])


def of_model(step: overhead.Step) -> AbstractContextManager[Any]:
    return memlab.track(show=False, functions=[overhead.repeat, step, *MODEL])


def of_model_with_shapes(step: overhead.Step) -> AbstractContextManager[Any]:
    return memlab.track(show=False, functions=[overhead.repeat, step, *MODEL], shapes=True)


TOOLS: dict[str, Callable[[overhead.Step], AbstractContextManager[Any]]] = {
    "memlab": plain,
    "memlab, lines of the loop": of_loop,
    "memlab, lines of loop and model": of_model,
    "memlab, lines of loop and model, shapes": of_model_with_shapes,
}


def in_a_process(workload: str, tool: str, repeats: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.lines", "--measure", workload, tool, "-n", str(repeats)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"skipped": done.stderr.strip().splitlines()[-1][:200]}


def hot(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
        total ^= 1
    return total


def a_line_ns(lines: bool, count: int = 300_000) -> float:
    """Nanoseconds of a line that does next to nothing."""
    with memlab.track(show=False, functions=[hot] if lines else ()):
        begin = time.perf_counter_ns()
        hot(count)
        return (time.perf_counter_ns() - begin) / (3 * count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-w", "--workload", action="append")
    parser.add_argument("-t", "--tool", action="append", choices=list(TOOLS))
    parser.add_argument("-n", "--repeats", type=int, default=9)
    parser.add_argument("--events", action="store_true")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        overhead.TOOLS.update(TOOLS)
        with contextlib.redirect_stdout(io.StringIO()):
            result = overhead.measure(*asked.measure, asked.repeats, None)
        print(json.dumps(result), flush=True)
        os._exit(0)
    if asked.events:
        for lines in (False, True):
            print(f"lines {'on' if lines else 'off'}: {a_line_ns(lines):.0f} ns a line of an empty loop", flush=True)
        return
    for workload in asked.workload or ["gpt2" if torch.cuda.is_available() else "transformer"]:
        for tool in asked.tool or TOOLS:
            result = in_a_process(workload, tool, asked.repeats)
            edge = f", begin + end {result['edge_s'] * 1e3:.0f} ms" if "edge_s" in result else ""
            step = f", bare step {statistics.median([result['step_s']]) * 1e3:.1f} ms" if "step_s" in result else ""
            print(f"{workload}, {tool}: {overhead.cell(result)}{edge}{step} {result.get('skipped', '')}", flush=True)


if __name__ == "__main__":
    main()
