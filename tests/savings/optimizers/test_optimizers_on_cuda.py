"""What only CUDA's build shows: foreach is the default there, and mapped weights go to the card."""

from __future__ import annotations

import gc

import pytest
import torch

from memlab.savings import techniques
from memlab.savings.optimizers.foreach import decayed
from memlab.savings.parameters.loading import large_inference
from memlab.session.trial import trial, work_of
from memlab.workloads.job import Job, seeded

pytestmark = pytest.mark.fakegpu


def peak(*names: str) -> int:
    """PyTorch's own counter, of one job."""
    gc.collect()
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    job = Job("cuda", steps=2)
    with seeded():
        techniques.prepare(job, decayed, names)
        job.run()
    vars(job).clear()
    return torch.cuda.max_memory_allocated() - before


def test_foreach_is_the_default_and_takes_the_parameters_once_more() -> None:
    peak()  # the library's workspace, once and for all
    parameters = sum(one.nbytes for one in decayed()[0].parameters())
    plain, loop, fused = peak(), peak("foreach_off"), peak("fused")
    assert plain - loop > 0.9 * parameters and plain - fused > 0.9 * parameters


@pytest.mark.parametrize("name", ["meta_init", "mmap_loading"])
def test_weights_are_on_the_card_after_loading(name: str) -> None:
    job = Job("cuda", steps=1)
    techniques.prepare(job, large_inference, [name])
    assert {one.device.type for one in job.model.parameters()} == {"cuda"}
    job.run()
    vars(job).clear()
    before = trial(work_of(large_inference), habits=[name], on="cuda", timed=False).peak_allocated_bytes
    after = trial(work_of(large_inference), [name], on="cuda", timed=False).peak_allocated_bytes
    assert after < before
