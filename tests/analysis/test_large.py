"""Ten million events: saved, read, answered and packed for the explorer, in bounded memory. Prints how long each took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GiB = 1 << 30

PROGRAM = """
import json, resource, sys, time
import numpy as np
from memlab.analysis.breakdown import breakdown
from memlab.analysis.peak import peak
from memlab.api.runs import load
from memlab.api.run import Run
from memlab.views.explorer import ExplorerRun
from memlab.trace import Blocks, Device, Events, Kind, MadeBy, Trace

def top():  # the highest resident memory so far
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def timed(name, work):
    begin = time.perf_counter()
    result = work()
    print(f"  {name:<30} {1e3 * (time.perf_counter() - begin):9.1f} ms", file=sys.stderr)
    return result

def made(pairs):
    # Every block lives until the one 100 later is born, the first 100 were there: half of the rows allocate, half free.
    number, count = np.arange(pairs + 100, dtype="i4"), 2 * pairs + 100
    sizes = np.random.default_rng(0).integers(1, 4000, pairs + 100) * 512
    block = np.append(number[:100], np.stack((number[100:], number[:-100]), axis=1))
    kind = np.append(np.full(100, Kind.PREEXISTING), np.tile(np.array([Kind.ALLOC, Kind.FREE], "u1"), pairs))
    times, zero = np.maximum(np.arange(count) - 100, 0) * 1000, np.zeros(count, "i8")
    events = Events(times, kind, block, sizes[block], sizes[block], zero, zero, block.astype("i8") * 512)
    blocks = Blocks.unknown(len(number), phase=number % 4, module=number % 50)
    texts = {"module": tuple(f"layer.{i}" for i in range(50))}
    made_by = MadeBy("made", (Device(0, "card", 1 << 36),), duration_ns=2000 * pairs)
    return Trace(events, blocks, made_by, first_row=100, texts=texts)

path = sys.argv[1]
before = top()
trace = timed("make", lambda: made(5_000_000))
expected = peak(trace, 0).low_bytes
timed("save", lambda: Run("large", trace).save(path))
del trace
saved = top()
run = timed("load", lambda: load(path))
assert timed("peak", lambda: run.peak_bytes) == expected
shares = timed("breakdown", lambda: run.breakdown("module"))
assert shares.total_bytes == expected
bundle = timed("report and figure", lambda: run.report().bundle())
packed = timed("the explorer's columns", lambda: ExplorerRun("large", run.trace, 0).packed())
print(f"  {len(packed) / 2**20:.1f} MiB of columns", file=sys.stderr)
print(json.dumps({
    "growth": top() - before, "saved": saved - before, "rows": len(run.trace.events),
    "bundle": sum(len(json.dumps(part)) for part in bundle.values()),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="asks the operating system as POSIX does")
def test_ten_million_events_in_less_than_two_gigabytes(tmp_path):
    environment, command = (
        os.environ | {"PYTHONPATH": str(ROOT)},
        [sys.executable, "-c", PROGRAM, tmp_path / "large.memlab"],
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    found = json.loads(done.stdout)
    grown, before = found["growth"] / GiB, found["saved"] / GiB
    print(f"  host memory grew by {grown:.2f} GiB, up to {before:.2f} GiB of it before loading")
    assert found["rows"] == 10_000_100
    assert found["bundle"] < 35_000
    assert found["growth"] < 2 * GiB
