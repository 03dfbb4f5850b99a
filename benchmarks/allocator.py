"""The simulated caching allocator beside PyTorch's: training programs and random requests, on a device without a GPU.

    python -m benchmarks.allocator            # on a simulated GPU (or a GPU): a table, written to benchmarks/results
    python -m benchmarks.allocator --sample 20    # every twentieth case, without writing: for work on the allocator
    python -m benchmarks.allocator --speed    # anywhere: how many events a second

Every case records what a program asks of the real allocator, asks the simulated one for the same and holds everything it
does against it: see `benchmarks.recorded`. Every program runs on a roomy card, with the default settings and with
expandable segments; then its requests are repeated under other settings and on cards that are tight for it (as large as
what it had allocated) or too small, where it has to try again or runs out of memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memlab.allocator import CachingAllocator
from memlab.units import GiB, MiB

RESULTS = Path(__file__).parent / "results" / "allocator.json"
ROOMY = {"default": "", "expandable": "expandable_segments:True"}
SETTINGS = {
    "max_split_size": "max_split_size_mb:32",
    "max_split_size, expandable": "max_split_size_mb:24,expandable_segments:True",
    "garbage collection": "garbage_collection_threshold:0.6",
    "roundup": "roundup_power2_divisions:[1:2,4:4,16:8,>:1]",
    "large segments of 12 MiB": "large_segment_size_mb:12",
    "large segments of 32 MiB, expandable": "large_segment_size_mb:32,expandable_segments:True",
}
SHARES = {"tight": 1.0, "too tight": 0.8}
"""Of what a program allocates at its peak: a card with as much is tight, one with less is too small."""
RANDOM_CASES, RANDOM_REQUESTS = 200, 3000


def main() -> int:
    """Measure and write; 1 where anything differed."""
    arguments = argparse.ArgumentParser(description="The simulated allocator beside PyTorch's.")
    arguments.add_argument("--speed", action="store_true", help="only how fast it is")
    arguments.add_argument("--sample", type=int, default=1, metavar="N", help="every N-th case, without writing")
    chosen = arguments.parse_args()
    if chosen.speed:
        print(json.dumps(speed(), indent=2))
        return 0
    from benchmarks.programs import PROGRAMS

    lines = list(run([*program_cases(list(PROGRAMS)), *random_cases()][:: chosen.sample]))
    if chosen.sample == 1:
        write(lines)
    wrong = [line for line in lines if not is_exact(line)]
    for line in wrong:
        print(json.dumps(line), file=sys.stderr)
    return 1 if wrong else 0


def program_cases(programs: list[str]) -> Iterator[dict[str, Any]]:
    """Every program under the two usual settings, and under two others each, by turns."""
    others = list(SETTINGS.items())
    for number, program in enumerate(programs):
        tight = [limited(label, conf, tightness) for label, conf in ROOMY.items() for tightness in SHARES]
        for label, conf in (others[number % len(others)], others[(number + 2) % len(others)]):
            tight += [{"configuration": label, "conf": conf}, limited(label, conf, "tight")]
        yield {"program": program, "configuration": "default", "conf": "", "again": tight}
        yield {"program": program, "configuration": "expandable", "conf": ROOMY["expandable"]}


def limited(label: str, conf: str, tightness: str) -> dict[str, Any]:
    """A card on which memory is short; garbage is collected only where a memory fraction is set."""
    limit = "fraction_share" if "garbage" in label else "room_share"
    return {"configuration": f"{label}, {tightness}", "conf": conf, limit: SHARES[tightness]}


def random_cases() -> Iterator[dict[str, Any]]:
    """Requests at random, under every kind of settings, mostly with little room."""
    chance = random.Random(0)
    confs = [*ROOMY.items(), *SETTINGS.items()]
    for seed in range(RANDOM_CASES):
        label, conf = confs[seed % len(confs)]
        limits: dict[str, float] = {}
        if seed % 5:
            limits["room_mib"] = chance.choice((60, 150, 300, 600)) + chance.choice((0, 0.5, 3.25))
        if "garbage" in label or not seed % 7:
            limits["memory_fraction"] = chance.choice((0.002, 0.005, 0.01))
        yield {"program": f"random:{seed}:{RANDOM_REQUESTS}", "configuration": label, "conf": conf, **limits}


def run(cases: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines of `benchmarks.recorded`, some cases to a process that they are forked from."""
    cases = list(cases)
    for start in range(0, len(cases), 20):
        command = [sys.executable, "-m", "benchmarks.recorded", json.dumps(cases[start : start + 20])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for line in done.stdout.splitlines():
            found = json.loads(line)
            print(f"{found['program']:32} {found['configuration']:40} {verdict(found)}", flush=True)
            yield found


def is_exact(line: dict[str, Any]) -> bool:
    return not (line["difference"] or line["stats_differ"] or line["text_differs"])


def verdict(line: dict[str, Any]) -> str:
    if not is_exact(line):
        return f"DIFFERS: {line['difference'] or line['stats_differ'] or line['text_differs']}"
    end = "out of memory" if line["ooms"] else f"{line['retries']} retries" if line["retries"] else ""
    return f"exact, {line['entries']} entries {end}"


def write(lines: list[dict[str, Any]]) -> None:
    """The table by configuration, and a row for every case."""
    import torch

    found = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "command": "python -m benchmarks.allocator",
        "compared": "allocated and reserved bytes after every event, segments and pages that come and go, the place of every "
        "block in its segment, retries, out-of-memory and its text, all counters of memory_stats() at the end",
        "by configuration": table(lines),
        "speed": speed(),
        "columns": ["program", "configuration", "room MiB", "fraction", "entries", "segment events", "retries", "ooms",
                    "peak allocated MiB", "peak reserved MiB", "exact"],
        "cases": [row(line) for line in lines],
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    for line in found["cases"]:  # a row to a line
        text = text.replace(json.dumps(line, indent=1).replace("\n", "\n  "), json.dumps(line))
    RESULTS.write_text(text + "\n")
    print(json.dumps(found["by configuration"], indent=2))
    print(json.dumps(found["speed"], indent=2))


def row(line: dict[str, Any]) -> list[Any]:
    peaks = [round(line[f"peak_{of}_bytes"] / MiB, 1) for of in ("allocated", "reserved")]
    limits = [line.get("room_mib"), line.get("memory_fraction")]
    counts = [line[name] for name in ("entries", "segment_events", "retries", "ooms")]
    return [line["program"], line["configuration"], *limits, *counts, *peaks, is_exact(line)]


def table(lines: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Configuration -> how many cases, how many exact, how often memory was short."""
    found: dict[str, dict[str, int]] = {}
    for line in lines:
        kind = "random requests" if line["program"].startswith("random") else "programs"
        sums = found.setdefault(f"{kind}: {line['configuration']}", {})
        for name, value in {
            "cases": 1,
            "exact": int(is_exact(line)),
            "entries": line.get("entries", 0),
            "retries": line.get("retries", 0),
            "out of memory": line.get("ooms", 0),
        }.items():
            sums[name] = sums.get(name, 0) + value
    return found


# --- speed ----------------------------------------------------------------------------------------------------------------


def speed(events: int = 300_000, rounds: int = 5) -> dict[str, Any]:
    """Events a second of a training-like sequence, and beside it how often this machine makes and drops a small object."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    script = steps(events)
    yardstick = statistics.median(allocations(events) for _ in range(rounds))
    for label, conf in ROOMY.items():
        seconds = statistics.median(play(script, CachingAllocator(80 * GiB, conf)) for _ in range(rounds))
        found[label] = {
            "events_per_s": round(len(script) / seconds),
            "of a plain Python object made and kept in a dict": round(seconds / len(script) / (yardstick / events), 1),
        }
    return found


def steps(events: int) -> list[int]:
    """Sizes to ask for, and positions (negative, from -1) to free: forward keeps, backward frees in reverse."""
    chance = random.Random(0)
    sizes = [chance.choice((512, 4096, 300_000, 3 * MiB, 12 * MiB, 40 * MiB)) for _ in range(400)]
    script: list[int] = []
    while len(script) < events:
        for size in sizes:  # each layer: a result that is kept, a temporary that is not
            script += [size, size // 2 + 1, -1]
        for size in reversed(sizes):
            script += [size, -1, -1]
    return script[:events]


def play(script: list[int], allocator: CachingAllocator) -> float:
    held: list[Any] = []
    begin = time.perf_counter()
    for step in script:
        if step < 0:
            allocator.free(held.pop())
        else:
            held.append(allocator.malloc(step))
    return time.perf_counter() - begin


def allocations(count: int) -> float:
    """A yardstick of this machine: objects with four attributes, kept in a dict and dropped again."""

    class Thing:
        __slots__ = ("a", "b", "c", "d")

        def __init__(self, number: int) -> None:
            self.a = self.b = self.c = self.d = number

    kept: dict[int, Thing] = {}
    begin = time.perf_counter()
    for number in range(count):
        kept[number % 1000] = Thing(number)
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
