"""Workloads on a card: predicted without one, and on the simulated GPU. What they compute there is not checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memlab
from memlab.workloads import workloads
from memlab.workloads.job import Job, Parts, seeded
from memlab.workloads.workload import inference


def run_of(make: Callable[[], Parts], steps: int = 2) -> Callable[[], None]:
    """What runs the job on "cuda" and then frees it."""

    def run() -> None:
        with seeded():
            job = Job("cuda", steps)
            job.build(make)
            job.run()
        vars(job).clear()

    return run


def all_tiny() -> None:
    for one in workloads.values():
        run_of(one.sized("tiny"), steps=1)()


def test_all_can_be_predicted():
    found = memlab.predict(all_tiny, card="RTX 4060")
    assert found.fits == "yes" and found.allocated_bytes[0] > 30 << 20


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", workloads)
def test_tiny_predicted_is_what_the_cpu_measures(name):
    """Nearly: a card rounds sizes, has a workspace for matrix products, chooses other kernels, and bounds those of cuDNN."""
    predicted = memlab.predict(run_of(workloads[name].sized("tiny")), card="RTX 4060")
    with memlab.track(name, show=False) as run, seeded():
        job = Job("cpu", 2)
        job.build(workloads[name].sized("tiny"))
        job.run()
    vars(job).clear()
    low, high = predicted.allocated_bytes
    most = 1.35 * run.peak_allocated_bytes + (17 << 20)
    assert 0.75 * run.peak_allocated_bytes < low < most
    assert low <= high < most + (40 << 20)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", workloads)
def test_as_published_predicted_for_a_large_card(name):
    found = memlab.predict(run_of(workloads[name].sized("card")), card="H200")
    assert found.fits == "yes", str(found)
    assert found.allocated_bytes[0] > 200 << 20


@pytest.mark.simulated
@pytest.mark.parametrize("name", workloads)
def test_on_the_simulated_gpu(name):
    before = torch.cuda.memory_allocated()
    for make in (workloads[name].sized("tiny"), inference(workloads[name].sized("tiny"))):
        torch.cuda.reset_peak_memory_stats()
        run_of(make)()
        assert torch.cuda.max_memory_allocated() - before > 1 << 20
    # What a library keeps for its matrix products stays.
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.simulated
def test_a_laptop_size_on_the_simulated_gpu():
    with memlab.track("gpt", show=False) as run:
        run_of(workloads["gpt"].sized("laptop"), steps=1)()
    assert run.peak_allocated_bytes > 250 << 20
