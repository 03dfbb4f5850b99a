"""What autograd keeps on the host: refused where host and device are one; on the pretend device, bytes that move."""

from __future__ import annotations

import pytest
import torch
from jobbing import prepared
from torch import nn

import memlab
from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.session.runs import runs


def test_the_cpu_cannot_show_it() -> None:
    with pytest.raises(DoesNotApply, match="this job is on the CPU"):
        prepared(workloads["mlp"].sized("tiny"), "offload")


def test_from_outside_with_nothing_to_move() -> None:
    outside = techniques["offload"].outside
    assert outside is not None
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    model(x).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    with pytest.raises(DoesNotApply, match="nothing on a card was kept"), outside():
        model(x).sum().backward()
    assert torch.equal(model[0].weight.grad, expected)


@pytest.mark.fakegpu
def test_from_outside_on_a_card() -> None:
    def step() -> int:
        with memlab.track(show=False) as run:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(24))).cuda()
            model(torch.randn(8192, 256, device="cuda")).sum().backward()
        runs.discard(run)
        return run.peak_allocated_bytes

    outside = techniques["offload"].outside
    assert outside is not None
    step()
    before = step()
    with outside():
        after = step()
    assert 1 - after / before > 0.4
