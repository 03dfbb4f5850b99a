"""What layers take: recurrent ones as cuDNN runs them, convolutions and losses; `kernel_calls` compares event by event."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fake_gpus import card, logged
from torch import nn

from memlab.fake_cuda import FakeCuda


def allocated(fake, body):
    """The sizes a call allocates."""
    return [size for size in logged(fake, body)[1] if size > 0]


def test_weights_move_into_one_buffer(fake):
    layer, events = logged(fake, lambda: nn.LSTM(32, 64, 2).cuda())
    total = sum(one.numel() for one in layer.parameters()) * 4
    assert events[8] == total == 233472  # after eight parameters, as on the simulated GPU
    storages = {one.untyped_storage()._cdata for one in layer.parameters()}
    assert len(storages) == 1
    assert all(isinstance(one, nn.Parameter) and one.requires_grad for one in layer.parameters())


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_cudnn_has_biases_where_the_module_has_none(fake, kind, gates):
    sizes = allocated(fake, lambda: kind(32, 64, bias=False).cuda())
    assert sizes[-1] == gates * 64 * (32 + 64 + 2) * 4


def test_forward_keeps_a_reserve_and_backward_makes_one_buffer_of_gradients(fake):
    layer, x = nn.LSTM(32, 64).cuda(), torch.empty(16, 8, 32, device="cuda", requires_grad=True)
    out, events = logged(fake, lambda: layer(x)[0])
    reserve = 5 * 4 * 16 * 8 * 64 + 256
    assert events[:9] == [2048, 2048, 32768, 2048, 2048, 131072, reserve, -131072, -2048]  # as on the simulated GPU
    _, events = logged(fake, lambda: out.backward(torch.zeros_like(out)))
    assert 100352 in events and events.count(131072) == 2
    assert len({one.grad.untyped_storage()._cdata for one in layer.parameters()}) == 1


def test_without_gradients_there_is_no_reserve(fake):
    layer = nn.GRU(32, 64).cuda().eval()
    with torch.no_grad():
        _, events = logged(fake, lambda: layer(torch.empty(16, 8, 32, device="cuda"))[0])
    assert 6 * 4 * 16 * 8 * 64 + 256 not in events


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "more", [{}, {"bidirectional": True}, {"batch_first": True}, {"num_layers": 2, "dropout": 0.1}]
)
def test_results_have_the_shapes_of_the_host(fake, kind, more):
    layer = kind(8, 16, **more)
    expected = layer(torch.zeros(4, 5, 8))
    found = layer.cuda()(torch.zeros(4, 5, 8, device="cuda"))
    assert found[0].shape == expected[0].shape
    states = zip(found[1], expected[1], strict=True) if kind is nn.LSTM else [(found[1], expected[1])]
    assert all(one.shape == other.shape for one, other in states)
    found[0].sum().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in layer.parameters())


@pytest.mark.parametrize("has_cudnn", [True, False])
def test_packed_sequences(fake, has_cudnn):
    layer, x = nn.LSTM(8, 8, bidirectional=True).cuda(), torch.empty(6, 3, 8, device="cuda")
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 1])
    assert packed.data.shape == (11, 8) and packed.batch_sizes.tolist() == [3, 2, 2, 2, 1, 1]
    with torch.backends.cudnn.flags(enabled=has_cudnn):
        out, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
    assert out.shape == (6, 3, 16) and lengths.tolist() == [6, 4, 1]
    out.sum().backward()


# --- cells: the requests in order, as the CUDA build makes them (read off its history, torch 2.12.1) --------------------------

GATE, STATE = 32 * 64 * 4, 32 * 64 * 4
GRU_FORWARD, GRU_BACKWARD = [3 * GATE, 3 * GATE, 5 * GATE, STATE], [3 * GATE, 3 * GATE, STATE, 768, 768]
LSTM_FORWARD, LSTM_BACKWARD = [4 * GATE, 4 * GATE, 4 * GATE, STATE, STATE], [4 * GATE, STATE, 1024]


@pytest.mark.parametrize(
    ("cell", "forward", "backward"),
    [(nn.GRUCell, GRU_FORWARD, GRU_BACKWARD), (nn.LSTMCell, LSTM_FORWARD, LSTM_BACKWARD)],
)
def test_the_requests_are_those_of_the_fused_kernel(fake, cell, forward, backward):
    model = cell(96, 64).cuda()
    x = torch.rand(32, 96, device="cuda")
    states = [torch.rand(32, 64, device="cuda", requires_grad=True) for _ in range(2)]
    given = states[0] if cell is nn.GRUCell else tuple(states)
    out, events = logged(fake, lambda: model(x, given))
    assert [size for size in events if size > 0] == forward
    made = allocated(fake, (out if cell is nn.GRUCell else out[0]).sum().backward)
    at = made.index(backward[0])
    assert made[at : at + len(backward)] == backward
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_without_biases_too(fake):
    model = nn.GRUCell(96, 64, bias=False).cuda()
    model(torch.rand(32, 96, device="cuda"), torch.rand(32, 64, device="cuda")).sum().backward()
    assert model.weight_hh.grad.shape == (192, 64)


# --- the switches of torch.backends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "gates", "workspace"), [(nn.LSTM, 4, 4), (nn.GRU, 3, 5)])
def test_without_cudnn_a_recurrent_layer_runs_step_by_step(fake, kind, gates, workspace):
    with torch.backends.cudnn.flags(enabled=False):
        layer, x = kind(32, 64).cuda(), torch.zeros(16, 8, 32, device="cuda")
        sizes = allocated(fake, lambda: layer(x))
    row = 8 * 64 * 4
    assert sizes.count(gates * row) >= 2 * 16, "both products of every step"
    assert sizes.count(workspace * row) >= 16 and layer.weight_ih_l0._base is None


@pytest.mark.parametrize(
    ("make", "shape", "columns"),
    [
        (lambda: nn.Conv2d(32, 64, 3, padding=1), (4, 32, 24, 24), 32 * 9 * 576 * 4),
        (lambda: nn.ConvTranspose2d(32, 16, 2, stride=2), (4, 32, 24, 24), 16 * 4 * 576 * 4),
        (lambda: nn.Conv3d(8, 16, 3), (2, 8, 8, 12, 12), 8 * 27 * 600 * 4),
    ],
)
def test_without_cudnn_a_convolution_unfolds_one_sample(fake, make, shape, columns):
    layer, x = make().cuda(), torch.zeros(shape, device="cuda")
    assert columns not in allocated(fake, lambda: layer(x))
    with torch.backends.cudnn.flags(enabled=False):
        assert columns in allocated(fake, lambda: layer(x))


def test_libraries_that_this_build_lacks_can_be_preferred(fake):
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.preferred_linalg_library("cusolver")
    assert torch.backends.cuda.preferred_blas_library() == "cublaslt" != before


def test_logits_that_lie_otherwise_are_copied(fake):
    logits, target = torch.zeros(4, 64, 1000, device="cuda"), torch.zeros(4, 64, dtype=torch.int64, device="cuda")
    sizes = allocated(fake, lambda: F.cross_entropy(logits.transpose(1, 2), target))
    assert sizes.count(4 * 64 * 1000 * 4) == 2, "the result and a dense copy of the logits"


@pytest.mark.parametrize(
    ("shape", "call", "scratch"),
    [
        ((64, 256, 512), lambda x: x.sum((0, 1)), [64 << 20, 16]),
        ((100000, 8), lambda x: x.sum(0), [25088, 4]),
        ((8, 1000000), lambda x: x.sum(1), [1728, 32]),
        ((4096, 512), lambda x: x.max(0), [64 << 20, 16]),
        ((64, 256, 512), torch.var, [6912, 4]),
    ],
)
def test_reductions_take_a_buffer_and_semaphores_where_blocks_meet(shape, call, scratch):
    with FakeCuda(card(capability=(8, 0), multiprocessors=108)) as fake:
        x = torch.empty(shape, device="cuda")
        assert allocated(fake, lambda: call(x))[-2:] == scratch  # as on the simulated GPU
