"""Fake CUDA leaves everything as it was, after errors too."""

from __future__ import annotations

import pytest
import torch
from fake_gpus import card
from torch import nn

from memlab.errors import PredictionError
from memlab.fake_cuda import FakeCuda

OWNERS = (
    torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.accelerator, torch.Tensor,
    torch.UntypedStorage, torch.nn.Module, torch.utils, torch.optim.Optimizer, torch.amp.GradScaler, torch.backends.cudnn,
    torch.nn.functional, torch.version, torch.distributed,
)  # fmt: skip


def everything() -> list[dict]:
    return [dict(vars(owner)) for owner in OWNERS]


def test_all_names_are_back():
    with FakeCuda(card()):  # the first one loads what PyTorch loads late
        nn.Linear(2, 2).cuda()
    before, cuda = everything(), torch.cuda.is_available()
    with FakeCuda(card()):
        torch.optim.AdamW(nn.Linear(2, 2).cuda().parameters())
    for owner, then, now in zip(OWNERS, before, everything(), strict=True):
        assert {name for name in then.keys() | now.keys() if then.get(name) is not now.get(name)} == set(), owner
    assert torch.cuda.is_available() == cuda


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_too(error):
    to, mode = torch.Tensor.to, torch._C._len_torch_dispatch_stack()
    with pytest.raises(error), FakeCuda(card()):
        torch.ones(2, device="cuda")
        torch.set_default_device("cuda")
        raise error
    assert torch.Tensor.to is to and torch._C._len_torch_dispatch_stack() == mode
    assert torch.zeros(2).device.type == "cpu" and torch.rand(2).sum() >= 0
    x = torch.ones(4, requires_grad=True)
    torch.nn.functional.dropout(x * 2, 0.5).sum().backward()
    assert x.grad is not None


def test_one_at_a_time():
    with FakeCuda(card()), pytest.raises(PredictionError, match="already"), FakeCuda(card()):
        pass
    with FakeCuda(card()):
        pass


def test_a_fake_cuda_tensor_that_lives_on_says_so():
    with FakeCuda(card()):
        x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="prediction had ended"):
        x + 1
    assert "cuda:0" in repr(x)


def test_the_host_computes_as_before():
    torch.manual_seed(3)
    expected = torch.randn(10)
    with FakeCuda(card()):
        torch.manual_seed(3)
        assert torch.equal(torch.randn(10), expected)
        a = torch.arange(12.0).view(3, 4)
        assert (a @ a.t())[2, 2] == 8 * 8 + 9 * 9 + 10 * 10 + 11 * 11
        with torch.inference_mode():
            assert nn.functional.linear(a, a).shape == (3, 3)
        loss = nn.Linear(4, 4)(a).sum()
        loss.backward()
