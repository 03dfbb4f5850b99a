"""Reserve and workspaces of cuDNN's layers against requests that were measured on an H200.

`benchmarks/results/library-calls-h200.json` is from `python -m benchmarks.prediction measure FILE --set libraries` there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.programs import PROGRAMS
from memlab.fake_cuda import FakeCuda, convolution_workspaces, recurrent
from memlab.prediction.cards import find
from memlab.units import MiB

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/library-calls-h200.json").read_text())
HOPPER, MULTIPROCESSORS = (9, 0), MEASURED["device"]["multiprocessors"]
OUTSIDE = {"survey_convolution_170"}
"""3 x 3, 1024 to 64 channels, in float32: the gradient of its weight is summed in 32 parts."""


class Call(NamedTuple):
    """A layer and what enters it."""

    layer: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_tf32: bool
    is_last: bool
    requests: list[int]


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, Call]]:
    """The measured layers, on no device."""
    ours = dict(PROGRAMS)
    module = importlib.import_module("benchmarks.programs.library_calls")
    programs = {name: PROGRAMS[name] for name in MEASURED["programs"]}
    PROGRAMS.clear()
    PROGRAMS.update(ours)
    found: dict[str, Call] = {}
    settings = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        for name, program in programs.items():
            if name.startswith("sparse"):
                continue

            def seen(layer: Any, first: Any, dtype: torch.dtype = torch.float32, last: bool = False) -> None:
                tf32 = torch.backends.cudnn.allow_tf32
                found[name] = Call(layer, tuple(first.shape), dtype, tf32, last, MEASURED["programs"][name]["requests"])  # noqa: B023

            patch.setattr(module, "one_call", seen)
            program()
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = settings
    yield found


def recurrent_call(call: Call) -> recurrent.RecurrentCall:
    layer = call.layer
    first, second, width = call.shape
    steps, batch = (second, first) if layer.batch_first else (first, second)
    cell = {"RNN": "rnn_tanh", "LSTM": "lstm", "GRU": "gru"}[layer.mode.partition("_")[0]]
    return recurrent.RecurrentCall(
        cell, steps, batch, width, layer.hidden_size, call.dtype.itemsize, layer.bias, layer.num_layers, layer.dropout, True,
        2 if layer.bidirectional else 1, None,
    )  # fmt: skip


def test_the_reserve_of_each_recurrent_layer_is_exact(calls):
    layers = [call for call in calls.values() if isinstance(call.layer, torch.nn.RNNBase)]
    assert len(layers) > 200
    for call in layers:
        assert recurrent_call(call).reserve_bytes in call.requests, call


def test_the_workspace_of_each_recurrent_layer_is_in_its_interval(calls):
    for call in calls.values():
        if isinstance(call.layer, torch.nn.RNNBase):
            low, high = recurrent_call(call).workspace_bytes(HOPPER)
            often = {size for size in call.requests if call.requests.count(size) >= 6 and size > 8 * MiB}
            assert any(low <= size <= high for size in often), (call, low, high)
            assert high < 4.5 * low


def test_dropout_keeps_a_generator_for_each_thread_of_the_gpu(calls):
    layer = next(call for call in calls.values() if getattr(call.layer, "dropout", 0))
    states = 24 * 2048 * MULTIPROCESSORS
    assert layer.requests.count(states) == 1
    with FakeCuda(find("H200")) as fake:
        module = torch.nn.LSTM(8, 8, 2, dropout=0.5).cuda()
        for _ in range(2):
            module(torch.empty(3, 2, 8, device="cuda"))
    assert fake.log.nbytes.count(states) == 1


def test_convolutions_stay_below_the_bound(calls, monkeypatch):
    beyond, shares = set(), []
    for name, call in calls.items():
        if isinstance(call.layer, torch.nn.RNNBase) or name.endswith("_benchmark"):
            continue
        if call.is_last and call.layer.bias is not None:  # the sum for the bias is PyTorch's own, and takes more
            continue
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", call.is_tf32)
        tensor, weight = torch.empty(call.shape, dtype=call.dtype, device="meta"), call.layer.weight
        out = call.layer.to("meta")(torch.empty(call.shape, device="meta"))
        plain = {one.numel() * width for one in (tensor, weight, out) for width in (call.dtype.itemsize, 4)}
        most = max(
            convolution_workspaces.most(tensor, out, weight, call.layer.groups, of_weight, HOPPER, MULTIPROCESSORS)
            for of_weight in (False, True)
        )
        largest = max((size for size in call.requests if size not in plain), default=0)
        shares.append(largest / most)
        if largest > most:
            beyond.add(name)
    assert len(shares) > 240
    assert beyond == OUTSIDE
    assert max(shares) > 0.9, "a bound that nothing comes near says nothing"


def test_benchmark_is_an_assumption(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with FakeCuda(find("T4")) as fake:
        torch.nn.Conv2d(3, 8, 3).cuda()(torch.empty(1, 3, 8, 8, device="cuda"))
    assert convolution_workspaces.BENCHMARK in fake.assumptions


def test_without_tensor_cores_tiles_are_transformed():
    """3 x 3 in float32 without TF32, as measured: 2.25 bytes for each of both tensors, and four for the weight."""
    shape = (32, 64, 56, 56)
    tensor, weight = torch.empty(shape, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    found = convolution_workspaces.most(tensor, tensor, weight, 1, True, (7, 5), 40)
    assert found == 116_195_328
    assert found in MEASURED["programs"]["conv_resnet_3x3_56_f32_without_tf32"]["requests"]
