"""Recurrent layers as cuDNN runs them: one buffer of weights, a reserve kept for backward, a workspace for the while."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from memlab.predictor.pretend import PretendCuda
from memlab.trace.columns import Kind

CARD = types.SimpleNamespace(
    name="card",
    total_bytes=8 << 30,
    usable_bytes=8 << 30,
    compute_capability=(8, 0),
    context_bytes=(0, 0),
    multiprocessors=108,
)


@pytest.fixture
def pretend():
    with PretendCuda(CARD) as pretend:
        yield pretend


def added(pretend, body):
    pretend.log.settle_deaths()
    before = len(pretend.log)
    kept = body()
    columns = pretend.log.columns()
    signs = [1 if kind == Kind.ALLOC else -1 for kind in columns["kind"][before:]]
    return kept, [int(sign * size) for sign, size in zip(signs, columns["nbytes"][before:], strict=True)]


def test_weights_move_into_one_buffer(pretend):
    layer, events = added(pretend, lambda: nn.LSTM(32, 64, 2).cuda())
    total = sum(one.numel() for one in layer.parameters()) * 4
    assert events[8] == total == 233472  # after eight parameters, as on the pretend device
    storages = {one.untyped_storage()._cdata for one in layer.parameters()}
    assert len(storages) == 1
    assert all(isinstance(one, nn.Parameter) and one.requires_grad for one in layer.parameters())


def test_forward_keeps_a_reserve_and_backward_makes_one_buffer_of_gradients(pretend):
    layer, x = nn.LSTM(32, 64).cuda(), torch.empty(16, 8, 32, device="cuda", requires_grad=True)
    out, events = added(pretend, lambda: layer(x)[0])
    assert events[:9] == [2048, 2048, 32768, 2048, 2048, 131072, 196608, -131072, -2048]  # as on the pretend device
    _, events = added(pretend, lambda: out.backward(torch.zeros_like(out)))
    assert 100352 in events and events.count(131072) == 2
    assert len({one.grad.untyped_storage()._cdata for one in layer.parameters()}) == 1


def test_without_gradients_there_is_no_reserve(pretend):
    layer = nn.GRU(32, 64).cuda().eval()
    with torch.no_grad():
        _, events = added(pretend, lambda: layer(torch.empty(16, 8, 32, device="cuda"))[0])
    assert 163840 not in events


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "more", [{}, {"bidirectional": True}, {"batch_first": True}, {"num_layers": 2, "dropout": 0.1}]
)
def test_results_have_the_shapes_of_the_host(pretend, kind, more):
    layer = kind(8, 16, **more)
    expected = layer(torch.zeros(4, 5, 8))
    found = layer.cuda()(torch.zeros(4, 5, 8, device="cuda"))
    assert found[0].shape == expected[0].shape
    states = zip(found[1], expected[1], strict=True) if kind is nn.LSTM else [(found[1], expected[1])]
    assert all(one.shape == other.shape for one, other in states)
    found[0].sum().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in layer.parameters())


def test_packed_sequences(pretend):
    layer, x = nn.LSTM(8, 16).cuda(), torch.empty(6, 3, 8, device="cuda")
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 1])
    assert packed.data.shape == (11, 8) and packed.batch_sizes.tolist() == [3, 2, 2, 2, 1, 1]
    out, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
    assert out.shape == (6, 3, 16) and lengths.tolist() == [6, 4, 1]
    out.sum().backward()
