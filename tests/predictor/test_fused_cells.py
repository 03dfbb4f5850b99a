"""`nn.GRUCell` and `nn.LSTMCell`: the requests in order, as the CUDA build makes them (read off its history, torch 2.12.1)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

GATE, STATE = 32 * 64 * 4, 32 * 64 * 4
GRU_FORWARD, GRU_BACKWARD = [3 * GATE, 3 * GATE, 5 * GATE, STATE], [3 * GATE, 3 * GATE, STATE, 768, 768]
LSTM_FORWARD, LSTM_BACKWARD = [4 * GATE, 4 * GATE, 4 * GATE, STATE, STATE], [4 * GATE, STATE, 1024]


def sizes(pretend, first: int, kind: int = 1) -> list[int]:
    columns = pretend.log.columns()
    return columns["nbytes"][first:][columns["kind"][first:] == kind].tolist()


@pytest.mark.parametrize(
    ("cell", "forward", "backward"),
    [(nn.GRUCell, GRU_FORWARD, GRU_BACKWARD), (nn.LSTMCell, LSTM_FORWARD, LSTM_BACKWARD)],
)
def test_the_requests_are_those_of_the_fused_kernel(pretend, cell, forward, backward):
    model = cell(96, 64).cuda()
    x = torch.rand(32, 96, device="cuda")
    states = [torch.rand(32, 64, device="cuda", requires_grad=True) for _ in range(2)]
    first = len(pretend.log)
    out = model(x, states[0]) if cell is nn.GRUCell else model(x, tuple(states))[0]
    assert sizes(pretend, first) == forward
    loss = out.sum()
    first = len(pretend.log)
    loss.backward()
    made = sizes(pretend, first)
    at = made.index(backward[0])
    assert made[at : at + len(backward)] == backward
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_without_biases_too(pretend):
    model = nn.GRUCell(96, 64, bias=False).cuda()
    model(torch.rand(32, 96, device="cuda"), torch.rand(32, 64, device="cuda")).sum().backward()
    assert model.weight_hh.grad.shape == (192, 64)
