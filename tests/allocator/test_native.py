"""The simulated allocator against PyTorch's own, on the simulated GPU: exact after every event, or wrong.

A part of `python -m benchmarks.allocator`, which has all programs, more settings and a table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_machines import machine_at

from benchmarks import retrace
from memlab.allocator import CachingAllocator, OutOfMemory, parse_conf
from memlab.units import GiB, MiB

pytestmark = pytest.mark.simulated
ROOT = Path(__file__).resolve().parents[2]
TOTAL_MB = 81920

EXPANDABLE = "expandable_segments:True"
CONFS = {
    "default": "",
    "expandable": EXPANDABLE,
    "max_split": "max_split_size_mb:20",
    "max_split_expandable": f"max_split_size_mb:30,{EXPANDABLE}",
    "max_split_rounding": "max_split_size_mb:24,max_non_split_rounding_mb:22",
    "garbage": "garbage_collection_threshold:0.5",
    "garbage_max_split": "garbage_collection_threshold:0.7,max_split_size_mb:25",
    "garbage_expandable": f"garbage_collection_threshold:0.6,{EXPANDABLE}",
    "roundup": "roundup_power2_divisions:[1:2,4:4,16:8,>:1]",
    "roundup_expandable": f"roundup_power2_divisions:8,{EXPANDABLE}",
    "large_segments": "large_segment_size_mb:15,max_split_size_mb:21",
    "large_segments_expandable": f"large_segment_size_mb:14,{EXPANDABLE}",
}
ROOMS_MIB = (None, 60, 150.5, 303.25, 600)  # of the device's 80 GiB

PROGRAMS = (
    "mlp_sgd", "lstm_classifier", "resnet18_momentum", "gan_two_optimizers", "llama_like", "distillation",
    "generation_with_cache", "amp_fp16_adam", "checkpoint_reentrant", "varying_lengths", "varying_batch_sizes",
    "emptied_cache_in_the_loop", "prefetch_on_a_side_stream", "two_streams_at_work", "activations_on_cpu",
)  # fmt: skip
SHARES = (1.0, 0.8)  # of what each has allocated at its peak: tight, and too little


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """On a machine of its own."""
    with tempfile.TemporaryDirectory() as folder:
        added = {**machine_at(Path(folder, "gpu"), TOTAL_MB), "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(
            [sys.executable, *command],
            env=os.environ | added,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def compared(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run(["-m", "benchmarks.recorded", json.dumps(cases)]).stdout.splitlines()]
    assert len(lines) == sum(1 + len(case.get("again", ())) for case in cases)
    for line in lines:
        assert not line["difference"], line
        assert not line["stats_differ"], line
        assert not line["text_differs"], line
    return lines


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CONFS)
def test_random_requests_are_served_alike(name):
    seed = 100 * list(CONFS).index(name)
    fraction = {"memory_fraction": 0.005} if "garbage" in name else {}
    cases = [
        {"program": f"random:{seed + number}:2500", "conf": CONFS[name], "room_mib": room, **fraction}
        for number, room in enumerate(ROOMS_MIB)
    ]
    lines = compared(cases)
    assert sum(line["requests"] for line in lines) > 1000
    assert sum(line["retries"] for line in lines) > 10
    assert sum(line["ooms"] for line in lines) > 3


@pytest.mark.parametrize(
    "programs", [PROGRAMS[::3], pytest.param(PROGRAMS[1::3] + PROGRAMS[2::3], marks=pytest.mark.release)]
)
def test_programs_are_served_alike(programs):
    """Each is run once; then what it asked for is asked under other settings and with little room."""
    again = [
        {"conf": EXPANDABLE},
        *({"conf": conf, "room_share": share} for conf in ("", EXPANDABLE) for share in SHARES),
    ]
    lines = compared([{"program": name, "again": again} for name in programs])
    roomy = [line for line in lines if "room_mib" not in line]
    assert len(roomy) == 2 * len(programs)
    assert all(line["requests"] > 90 and not line["retries"] for line in roomy)
    assert sum(line["ooms"] for line in lines) >= 2 * len(programs), "two cards are too small"
    assert sum(line["retries"] > line["ooms"] for line in lines) > len(programs) / 6, "some only had to try again"


MEASURE = """
import contextlib, io, json, sys
import torch
import memlab
from benchmarks.programs import PROGRAMS
from memlab.allocator import simulate

conf, name = sys.argv[1:]
if conf:
    torch._C._accelerator_setAllocatorSettings(conf)
torch.cuda.init()
free, total = torch.cuda.mem_get_info()
with contextlib.redirect_stdout(io.StringIO()), memlab.track(name) as run:
    PROGRAMS[name]()
simulated = simulate(run.trace, total, conf, total - free)
columns = ("kind", "block", "requested_bytes", "allocated_bytes", "stream")
differ = [name for name in columns if getattr(run.trace.events, name).tolist() != getattr(simulated.events, name).tolist()]
print(json.dumps([len(simulated.events), differ, run.trace.made_by.device(0) == simulated.made_by.device(0)]))
"""


@pytest.mark.parametrize("conf", ["", EXPANDABLE], ids=["default", "expandable"])
@pytest.mark.parametrize("name", ["varying_lengths", "two_streams_at_work"])
def test_a_measured_trace_settles_to_itself(name, conf):
    """What a measurement shows, told as mere requests, becomes what the measurement shows: row by row."""
    rows, differ, same_facts = json.loads(run(["-c", MEASURE, conf, name]).stdout)
    assert (differ, same_facts) == ([], True)
    assert rows > 300


READ = """
import json, torch
torch.empty(1, device="cuda")
found = torch.cuda.memory._snapshot()["allocator_settings"]
print(json.dumps([found["max_split_size"], found["expandable_segments"], found["garbage_collection_threshold"],
                  list(found["roundup_power2_divisions"].values())]))
"""


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[4:4,>:2,64:8]",
    ],
)
def test_the_settings_are_read_alike(conf):
    split, expandable, threshold, divisions = json.loads(run(["-c", READ], PYTORCH_CUDA_ALLOC_CONF=conf).stdout)
    found = parse_conf(conf)
    assert (found.expandable_segments, found.garbage_collection_threshold) == (expandable, threshold)
    assert list(found.roundup_power2_divisions) == divisions
    assert found.max_split_size == (split if split >= 0 else type(found)().max_split_size)


FAIL = """
import torch
torch.cuda.set_per_process_memory_fraction(0.01)
kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
free, total = torch.cuda.mem_get_info()
print(total - free - torch.cuda.memory_reserved())
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.parametrize("conf", ["", EXPANDABLE], ids=["default", "expandable"])
def test_the_text_of_an_out_of_memory_is_pytorchs(conf):
    context, text = run(["-c", FAIL], PYTORCH_CUDA_ALLOC_CONF=conf).stdout.splitlines()
    allocator = CachingAllocator(
        TOTAL_MB * MiB, conf, int(context), memory_fraction=0.01, torch_version=torch.__version__
    )
    allocator.malloc(3 * MiB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(GiB)
    assert str(caught.value) == text


def test_a_difference_would_be_noticed():
    """The comparison itself: under other settings the same requests are not served alike."""
    assert retrace.Device(GiB, 0).allocator().settings == parse_conf("")
    code = f"""
import dataclasses, json
from benchmarks import recorded
honest = recorded.retrace
recorded.retrace = lambda entries, device: honest(entries, dataclasses.replace(device, conf={EXPANDABLE!r}))
print(json.dumps(recorded.compare({{"program": "random:1:500"}})))
"""
    assert json.loads(run(["-c", code]).stdout)["difference"]
