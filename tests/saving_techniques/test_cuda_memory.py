"""What is for CUDA alone: bytes moved to the host, empty_cache, which saves nothing, and segments without holes."""

from __future__ import annotations

import pytest
import torch
from job_runs import prepared, printed
from torch import nn

import memlab
from memlab import workloads
from memlab.api.runs import runs
from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.cuda_memory import growing
from memlab.workloads.job import Job

CONF = techniques["expandable_segments"].conf


@pytest.mark.parametrize("name", ["offload", "empty_cache", "expandable_segments"])
def test_the_cpu_is_refused(name: str) -> None:
    with pytest.raises(DoesNotApply, match=r"this job (is|runs) on the CPU"):
        prepared(workloads["mlp"].sized("tiny"), name)


@pytest.mark.simulated
def test_offloading_from_outside() -> None:
    def step() -> int:
        with memlab.track(show=False) as run:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(24))).cuda()
            model(torch.randn(8192, 256, device="cuda")).sum().backward()
        runs.discard(run)
        return run.peak_allocated_bytes

    step()
    before = step()
    with techniques["offload"].patch():
        after = step()
    assert 1 - after / before > 0.4


def predicted_peaks(conf: str) -> tuple[int, int]:
    def step() -> None:
        job = Job("cuda", 8)
        techniques.prepare(job, growing)
        job.run()

    run = memlab.predict(step, card="RTX 4060", conf=conf)
    runs.discard(run)
    return run.peak_allocated_bytes, run.peak_reserved_bytes


def test_expandable_segments_leave_no_holes_on_a_predicted_gpu() -> None:
    plain, expandable = predicted_peaks(""), predicted_peaks(CONF)
    assert expandable[0] == pytest.approx(plain[0], rel=0.01)
    assert expandable[1] < 0.75 * plain[1] and expandable[1] < 1.2 * expandable[0]


MEASURE = """
import torch
from memlab.saving_techniques import techniques
from memlab.saving_techniques.cuda_memory import {make}
from memlab.workloads.job import Job
job = Job("cuda", {steps})
techniques.prepare(job, {make}, {names})
job.run()
stats = torch.cuda.memory_stats()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
print(*peaks, stats["num_device_alloc"], torch.cuda.memory_reserved())
"""


def measured(make: str, steps: int, *names: str, **env: str) -> list[int]:
    """Peaks of allocated and reserved, calls of cudaMalloc, and what is reserved at the end, in a process of its own."""
    return [int(one) for one in printed(MEASURE.format(make=make, steps=steps, names=list(names)), **env)]


@pytest.mark.simulated
def test_expandable_segments_leave_no_holes() -> None:
    plain, expandable = measured("growing", 8), measured("growing", 8, PYTORCH_CUDA_ALLOC_CONF=CONF)
    assert expandable[0] == pytest.approx(plain[0], rel=0.01) and expandable[1] < 0.75 * plain[1]


@pytest.mark.simulated
def test_empty_cache_moves_no_peak_and_asks_again() -> None:
    plain, emptied = measured("layers", 4), measured("layers", 4, "empty_cache")
    assert emptied[0] == plain[0] and emptied[1] >= 0.95 * plain[1]
    assert emptied[2] > 1.3 * plain[2], "cudaMalloc is called in each step again"
    assert emptied[3] < 0.8 * plain[3], "less is reserved between steps"
