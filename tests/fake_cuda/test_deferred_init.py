"""Large host tensors hold no data until somebody reads them, and then hold what they would."""

from __future__ import annotations

import io
import resource
import sys

import numpy as np
import pytest
import torch
from torch import nn

from memlab.fake_cuda import deferred_init

BIG = 1 << 20


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts resident memory as Linux does")
def test_a_model_of_many_parameters_takes_no_memory(fake):
    before = peak_kib()
    model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(24)])  # 6.4 GB
    model.to(torch.bfloat16).to("cuda")
    assert fake.log.allocator.requested_bytes == 24 * (8192 * 8192 + 8192) * 2
    assert peak_kib() - before < 100_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts resident memory as Linux does")
@pytest.mark.parametrize("pin_memory", [False, True])
def test_what_a_graph_saves_on_the_host_takes_no_memory(fake, pin_memory):
    model = nn.Sequential(*(nn.GELU() for _ in range(8)))
    x = torch.ones(4096, 8192, device="cuda", requires_grad=True)  # 0.13 GB, eight times
    before = peak_kib()
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        y = model(x)
    y.backward(x)
    assert x.grad.is_cuda
    assert peak_kib() - before < 100_000


def test_what_is_copied_to_the_host_is_read_with_the_rest(fake):
    there, x = torch.relu(torch.randn(BIG, device="cuda")), torch.ones(3, BIG)
    x[1].copy_(there)
    assert deferred_init.pending(x) is not None
    assert (x[1] == there.cpu()).all() and (x[::2] == 1).all()
    y = torch.ones(BIG)
    y.copy_(there)
    y.fill_(3)
    assert (y == 3).all()
    z = torch.ones(BIG, dtype=torch.float64)
    z.copy_(there).add_(1)
    assert (z == there.cpu() + 1).all()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(BIG), lambda x: (x == 0).all()),
        (lambda: torch.ones(BIG), lambda x: x.mean() == 1),
        (lambda: torch.full((BIG,), 3.0), lambda x: x.mean() == 3),
        (lambda: torch.randn(BIG), lambda x: abs(x.std() - 1) < 0.01),
        (lambda: torch.rand(BIG), lambda x: abs(x.mean() - 0.5) < 0.01 and x.max() < 1),
        (lambda: torch.randn(BIG).mul_(2).add_(1), lambda x: abs(x.std() - 2) < 0.02 and abs(x.mean() - 1) < 0.02),
        (lambda: torch.zeros(BIG).to(torch.float64), lambda x: x.dtype == torch.float64 and (x == 0).all()),
        (lambda: torch.ones(BIG).clone().half(), lambda x: (x == 1).all()),
        (lambda: torch.empty(BIG).uniform_(2, 3), lambda x: x.min() >= 2 and x.max() <= 3),
        (lambda: nn.init.trunc_normal_(torch.empty(1024, 1024), std=0.5), lambda x: abs(x.std() - 0.5) < 0.02),
        (lambda: torch.zeros(1024, 1024).t()[5:9].fill_(7).mean(), lambda x: x == 7),
        (lambda: torch.zeros_like(torch.empty(BIG)), lambda x: (x == 0).all()),
    ],
)
def test_what_is_read_is_what_it_would_be(fake, make, expected):
    assert bool(expected(make()))


def test_truncated_numbers_are_drawn_when_they_are_read(fake):
    x = nn.init.trunc_normal_(torch.empty(1024, 1024), std=1.0, a=-1.0, b=1.0)
    assert deferred_init.pending(x) is not None
    assert x.abs().max() <= 1 and abs(x.mean()) < 0.01 and x.std() > 0.4
    on_card = nn.init.trunc_normal_(torch.empty(64, 64, device="cuda"), std=1.0)
    assert on_card.is_cuda


def test_parts_that_were_filled_by_themselves(fake):
    x = torch.zeros(1024, 1024)
    x[3].fill_(5)
    x[:, 7].fill_(9)
    assert deferred_init.pending(x) is not None
    assert x[3, 0] == 5 and x[3, 7] == 9 and x[4, 7] == 9 and x[0, 0] == 0
    x.cos_()
    assert x[0, 0] == 1, "what was read is not filled again"


def test_every_way_to_the_values_gives_them(fake):
    def fresh() -> torch.Tensor:
        return torch.ones(512, 512)

    assert fresh().numpy().sum() == 512 * 512
    assert np.asarray(fresh()).sum() == 512 * 512
    assert fresh().tolist()[0][0] == 1.0 and fresh()[0, 0].item() == 1.0 and float(fresh().max()) == 1.0
    file = io.BytesIO()
    torch.save(fresh(), file)
    file.seek(0)
    assert torch.load(file).sum() == 512 * 512
    w = nn.Parameter(fresh())
    assert w.detach().numpy().sum() == 512 * 512 and w.data.sum() == 512 * 512
    assert (fresh() @ fresh())[0, 0] == 512


def test_a_blank_that_dies_leaves_no_note(fake):
    x = torch.ones(BIG)
    assert deferred_init.pending(x) is not None
    del x
    assert not deferred_init.every_pending


def test_what_came_from_numpy_or_small_tensors_is_real(fake):
    assert torch.from_numpy(np.arange(BIG)).sum() == BIG * (BIG - 1) // 2
    assert deferred_init.pending(torch.ones(100)) is None and torch.arange(BIG)[-1] == BIG - 1
