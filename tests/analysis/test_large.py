"""Ten million events: saved, read, answered and zoomed into, in bounded memory. Prints how long each took."""

from __future__ import annotations

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
from memlab.session.run import Run, load
from memlab.session.explore import Windows
from memlab.trace import Blocks, Device, Events, Kind, MadeBy, Trace

def top():  # the highest resident memory so far
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def timed(name, work):
    begin = time.perf_counter()
    result = work()
    print(f"  {name:<30} {1e3 * (time.perf_counter() - begin):9.1f} ms", file=sys.stderr)
    return result

def made(pairs):
    # Every block lives until the one 100 later is born: half of the rows allocate, half free.
    random = np.random.default_rng(0)
    sizes = random.integers(1, 4000, pairs) * 512
    block = np.empty(2 * pairs, "i4")
    kind = np.tile(np.array([Kind.ALLOC, Kind.FREE], "u1"), pairs)
    block[::2] = np.arange(pairs)
    block[1::2] = np.arange(pairs) - 100
    block[1:201:2] = np.arange(100) + pairs  # adopted ones
    sizes = np.append(sizes, np.full(100, 512))
    block = np.append(np.arange(100) + pairs, block)
    kind = np.append(np.full(100, Kind.ADOPT, "u1"), kind)
    count = len(kind)
    times = np.append(np.zeros(100, "i8"), np.arange(2 * pairs) * 1000)
    zero = np.zeros(count, "i8")
    events = Events(times, kind, block, sizes[block], sizes[block], zero, zero, block.astype("i8") * 512)
    blocks = Blocks.unknown(pairs + 100, phase=np.arange(pairs + 100) % 4, module=np.arange(pairs + 100) % 50)
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
windows = timed("make the explorer's windows", lambda: Windows(run))
for share in (1, 0.1, 0.001, 0.00001):
    half = 0.5 * windows.span_s
    timed(f"window of {share:g} of the run", lambda: windows(half, half * (1 + share), 1000))
whole = windows(0, windows.span_s, 1000)["allocated"]
print(json.dumps({
    "growth": top() - before, "saved": saved - before, "rows": len(run.trace.events), "high": int(whole[2].max()),
    "expected": expected, "bundle": sum(len(json.dumps(part)) for part in bundle.values()),
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="asks the operating system as POSIX does")
def test_ten_million_events_in_less_than_two_gigabytes(tmp_path):
    import json

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "large.memlab"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    found = json.loads(done.stdout)
    print(
        f"  host memory grew by {found['growth'] / GiB:.2f} GiB, up to {found['saved'] / GiB:.2f} GiB of it before loading"
    )
    assert found["rows"] == 10_000_100
    assert found["high"] == found["expected"]
    assert found["bundle"] < 35_000
    assert found["growth"] < 2 * GiB
