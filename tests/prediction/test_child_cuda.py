"""A forked child where CUDA is in use in the parent: autograd works in it, and the parent goes on. On the simulated GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from in_child import busy_threads, run

from memlab.prediction.child import forked as forks
from memlab.torch_internals import process

pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def trained():
    """A model that was trained on the device, and a backward pass on the CPU: from then on `os.fork` is not enough."""
    net = torch.nn.Linear(300, 300).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    x = torch.ones(500, 500, requires_grad=True)
    (x @ x).sum().backward()
    return net, optimizer


def train(net, optimizer):
    net(torch.ones(4, 300, device="cuda")).sum().backward()
    optimizer.step()


def backward(channel) -> bytes:
    x = torch.randn(500, 500, requires_grad=True)
    (x @ x).sum().backward()
    np.ones((500, 500)) @ np.ones((500, 500))
    fake = torch.randn(64, 64, device="meta", requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.relu, fake @ fake, use_reentrant=True).sum().backward()
    return b"trained"


def test_autograd_works_in_the_child(trained):
    assert process.gpu_in_sight()
    outcome = run(backward, limit_s=300)
    assert outcome.error is None, "".join(outcome.error.traceback)
    assert (outcome.result, outcome.notes) == (b"trained", ())


def test_the_parent_goes_on_and_its_allocator_is_the_same(trained):
    before = torch.cuda.memory_stats()
    for _ in range(5):
        assert run(backward, limit_s=300).result == b"trained"
    assert torch.cuda.memory_stats() == before
    train(*trained)


def test_a_plain_fork_is_what_autograd_refuses(trained, monkeypatch):
    monkeypatch.setattr(process, "gpu_in_sight", lambda: False)
    assert "Unable to handle autograd's threading" in run(backward, limit_s=300).error.text


def test_a_libc_without_the_means_is_named(trained, monkeypatch):
    monkeypatch.setattr(process, "can_skip_handlers", lambda: False)
    outcome = run(backward, limit_s=300)
    assert "Unable to handle autograd's threading" in outcome.error.text
    assert outcome.notes[0].startswith("This system's libc has no _Fork")


def test_beside_threads_that_allocate(trained, monkeypatch):
    made = []
    real = forks.ForkedProcess.fork
    monkeypatch.setattr(forks.ForkedProcess, "fork", lambda child, skips: (made.append(skips), real(child, skips)))

    with busy_threads(lambda: (torch.empty(30_000), [bytearray(size) for size in (50, 2000, 70_000)])):
        assert [run(backward, limit_s=300).result for _ in range(10)] == [b"trained"] * 10
    assert made[0]
    assert len(made) < 20
