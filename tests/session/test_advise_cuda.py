"""`memlab.advise` where CUDA is: measured with its own allocator, and the pointer of an out-of-memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memlab
from memlab.errors import MemlabError
from memlab.session.advise.subject import card_of
from memlab.session.oom import forget_oom, note_oom
from memlab.session.runs import runs
from memlab.session.trial import trial, work_of
from memlab.workloads.workload import Workload

pytestmark = pytest.mark.fakegpu


def make():
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
    )
    batch = torch.randn(1 << 16, 64), torch.randn(1 << 16, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, nn.functional.mse_loss


WORK = Workload("blocks", "", make, {"laptop": {}})


def test_it_is_measured_on_cuda_where_there_is_one():
    advice = memlab.advise(WORK, techniques=["checkpoint"])
    assert (advice.findings.on, advice.recommended) == ("cuda", ("checkpoint",))
    assert advice.findings.tried[0].results == "not checked", "a pretend device computes nothing"


def test_what_was_predicted_for_this_device_is_what_its_allocator_says():
    with memlab.track("here") as run:
        torch.ones(1 << 20, device="cuda")
    card = card_of(run)
    assert card is not None
    advice = memlab.advise(WORK, techniques=["checkpoint"], card=card)
    checked = advice.measure()
    assert checked.on == "cuda"
    assert abs(checked.off_bytes) <= 0.01 * sum(checked.measured[0]) / 2, str(checked)


def test_a_trial_on_cuda_is_run_again_there():
    run = trial(work_of("mlp", "tiny"), on="cuda", timed=False)
    advice = memlab.advise(run, techniques=["sgd"])
    assert (advice.findings.on, advice.recommended) == ("cuda", ("sgd",))
    runs.discard(run)


def test_a_step_for_this_device_is_not_measured_from_a_child():
    def step():
        with torch.device("cuda"):
            model, _, (x, y), loss = make()
        loss(model(x), y).backward()

    torch.ones(1, device="cuda")
    with pytest.raises(MemlabError, match="must not touch CUDA once this process has used it"):
        memlab.advise(step)
    assert memlab.advise(step, card="T4", techniques=["checkpoint"]).recommended == ("checkpoint",)


def test_an_out_of_memory_of_a_tracked_cell_points():
    held = []
    model = make()[0].to("cuda")
    error = None
    with memlab.track("full") as run:
        try:
            x = torch.randn(1 << 18, 64, device="cuda", requires_grad=True)
            while True:
                held.append(model(x))
        except torch.OutOfMemoryError as raised:
            error = raised
    run.again = "the text of a cell"
    explained = note_oom(error, run)
    assert explained is not None
    assert "memlab.advise(memlab.runs['full']) tries" in explained.text.splitlines()[-1]
    held.clear()
    forget_oom()
