"""Snapshots against the real allocator: what PyTorch dumps is read to the byte, what memlab writes is what PyTorch has."""

from __future__ import annotations

import functools
import json

import pytest
from processes import python

SETTINGS = {
    "default": {},
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "max_split": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:21"},
    "roundup": {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"},
    "tight": {},
}
PROGRAM = """
import json, pickle, sys
import torch
import memlab
from memlab.analysis.summary import summary
from memlab.probes.snapshot import load
from memlab.trace.snapshot_write import save

ring, folder = int(sys.argv[1]), sys.argv[2]

def work(rounds):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    kept = [net, optimizer]
    for i in range(rounds):
        x = torch.empty(64 + i * 13, 512, device="cuda")
        net(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
        if i % 5 == 0:
            kept.append(x[:1].clone()); torch.cuda.empty_cache()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.empty(1 << 22, device="cuda")
    y.record_stream(torch.cuda.current_stream())
    del y
    try:
        torch.empty(1 << 40, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass
    return kept

def levels(trace):
    device = summary(trace, "x").devices[0]
    peaks = [device.level(of).peak.high_bytes for of in ("allocated", "reserved")]
    return [*peaks, device.device.end_allocated_bytes, device.device.end_reserved_bytes]

def counters():
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved()]

older = [torch.empty(size, device="cuda") for size in (3_000_000, 700, 1 << 21, 5_000_000)]
del older[1]
start = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
torch.cuda.memory._record_memory_history(max_entries=ring)
torch.cuda.reset_peak_memory_stats()
kept = work(12)
older.pop(0)
kept.append(torch.empty(200_000_000, dtype=torch.uint8, device="cuda"))  # a peak that a short ring has too
del kept[-1]
torch.cuda.memory._dump_snapshot(f"{folder}/theirs.pickle")
theirs = load(f"{folder}/theirs.pickle")
device = theirs.made_by.devices[0]
out = {"theirs": [levels(theirs), counters()], "gaps": [gap.name for gap in theirs.gaps], "ooms": device.num_ooms,
       "start": [[device.start_allocated_bytes, device.start_reserved_bytes], start]}
torch.cuda.memory._record_memory_history(enabled=None)
with memlab.track("t") as run:
    kept = work(5)
save(run.trace, f"{folder}/ours.pickle")
ours = load(f"{folder}/ours.pickle")
out["ours"] = [levels(ours), levels(run.trace)]
out["who"] = [dict(memlab.Run("x", trace).breakdown()) for trace in (ours, run.trace)]
with open(f"{folder}/ours.pickle", "rb") as file:
    shot = pickle.load(file)
real = torch.cuda.memory._snapshot()
out["segments"] = [[sum(s[key] for s in one["segments"]) for key in ("total_size", "allocated_size", "requested_size")]
                   for one in (shot, real)]
print(json.dumps(out))
"""


@functools.cache
def outcome(setting: str, ring: int) -> dict:
    gpu = {"total_mb": 700 if setting == "tight" else 2048}
    return json.loads(python("-c", PROGRAM, str(ring), ".", gpu=gpu, **SETTINGS[setting]).splitlines()[-1])


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("setting", "ring"), [*((setting, 100_000) for setting in SETTINGS), ("default", 400), ("expandable", 400)]
)
def test_a_dump_has_the_peaks_of_the_counters(setting, ring):
    out = outcome(setting, ring)
    found, counters = out["theirs"]
    assert found == counters
    assert "rules" not in out["gaps"]
    assert out["ooms"] == 1


@pytest.mark.simulated
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tracked_run_comes_back_and_what_is_written_is_what_the_allocator_has(setting):
    out = outcome(setting, 100_000)
    assert out["start"][0] == out["start"][1], "the state before the history"
    assert out["ours"][0] == out["ours"][1]
    assert out["who"][0] == out["who"][1]
    assert out["who"][0]["parameter"] > 0
    ours, real = out["segments"]
    assert ours == real
