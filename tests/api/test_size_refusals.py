"""What cannot be run without data: one line that says what, where, and what to do."""

from __future__ import annotations

import gc
import logging
import re
from typing import Any

import pytest
import torch
from api.real_forward import Function, linear, unchanged
from torch import Tensor, nn

from memlab.api.size import size
from memlab.errors import MemlabError
from memlab.torch_internals.fakes import FakeTensorMode


def asks_for_a_value(model: Function, x: Tensor) -> Tensor:
    return model.a(x) * x.sum().item()


def decides(model: Function, x: Tensor) -> Tensor:
    return model.a(x) if x.sum() > 0 else x


def picks(model: Function, x: Tensor) -> Tensor:
    return model.a(x)[x.sum(1) > 0]


def to_numpy(model: Function, x: Tensor) -> Any:
    return model.a(x).detach().numpy()


def fails(model: Function, x: Tensor) -> Tensor:
    raise ValueError("first line.\nsecond line")


@torch.library.custom_op("memlab_tests::nobody_knows_its_size", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (
            asks_for_a_value,
            r"asks for a tensor's value \(item\(\).* at test_size_refusals.py:\d+ \(return model.a\(x\)",
        ),
        (
            decides,
            "asks for a tensor's value .* Take that out of the forward, or measure a real step with memlab.track",
        ),
        (picks, "the size of aten.nonzero.default's result depends on values"),
        (to_numpy, r"RuntimeError: .*numpy.* Does it run on real inputs\? Then measure"),
        (fails, "ValueError: first line in 1 at test_size_refusals.py"),
        (lambda model, x: unknown(x), "memlab_tests"),
        (lambda model, x: model.a(x, 2), "TypeError: .*takes 2 positional arguments"),
    ],
)
def test_one_line(forward, words, caplog):
    model = nn.Sequential(linear(), Function(forward, a=linear()))
    with unchanged(model), caplog.at_level(logging.DEBUG), pytest.raises(MemlabError, match=words) as error:
        size(model, torch.ones(4, 8))
    assert "\n" not in str(error.value)
    assert "the forward of Sequential" in str(error.value)
    assert error.value.__cause__ is error.value.__context__ is None  # a traceback would hold tensors without data
    assert not [record for record in caplog.records if record.name.startswith("torch._subclasses")]


def test_the_module_is_named():
    model = nn.Sequential(linear(), nn.Sequential(Function(asks_for_a_value, a=linear())))
    with pytest.raises(MemlabError, match=r"\) in 1\.0 at "):
        size(model, (4, 8))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("given", [torch.float32, (3, 5), torch.uint8])
def test_indices_of_an_embedding_are_whole_numbers_as_in_a_real_call(layer, given):
    model = nn.Sequential(layer(10, 4))
    with unchanged(model), pytest.raises(MemlabError) as error:
        size(model, given if isinstance(given, tuple) else torch.zeros(3, 5, dtype=given))
    dtype = "uint8" if given == torch.uint8 else "float32"
    assert re.search(
        rf"would fail: aten\._?embedding\w* looks up rows by whole numbers, got {dtype} in 0", str(error.value)
    )
    assert "torch.zeros(shape, dtype=torch.long)" in str(error.value)
    assert ("A shape stands for float32" in str(error.value)) == isinstance(given, tuple)
    for dtype in (torch.int64, torch.int32):
        assert size(model, torch.zeros(3, 5, dtype=dtype)).parameter_bytes == 160


def test_a_shape_that_should_be_of_another_type():
    model = Function(lambda m, x: m.a(torch.ones(4, 8)[x]), a=linear())
    with pytest.raises(MemlabError, match=r"A shape stands for float32; for another type give torch\.empty"):
        size(model, (2, 3))
    with pytest.raises(MemlabError) as error:
        size(model, torch.ones(2, 3))
    assert "A shape stands" not in str(error.value)
    assert size(model, torch.empty(2, 3, dtype=torch.long, device="meta")).output_bytes == 2 * 3 * 8 * 4


def test_a_forward_that_catches_its_error_goes_on():
    def careful(model: Function, x: Tensor) -> Tensor:
        try:
            return model.b(x)
        except RuntimeError:
            return model.a(x).exp()

    model = Function(careful, a=linear(), b=nn.Sequential(linear(), nn.Linear(3, 3)))
    found = size(nn.Sequential(model, nn.GELU()), (4, 8))
    assert [layer.path for layer in found.layers if layer.activation_bytes] == ["0"]


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged)


def script() -> Any:
    return torch.jit.script(nn.Sequential(linear(), nn.ReLU()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (lambda: lambda x: x, lambda: [(1,)], "size takes a torch.nn.Module and inputs for it, got function"),
        (lambda: nn.Linear, lambda: [(1,)], "got type"),
        (linear, lambda: [(-1, 8)], r"no negative sizes, got \(-1, 8\)"),
        (linear, list, "missing 1 required positional argument"),
        (lambda: nn.LazyLinear(3), lambda: [(1, 2)], "lazy parameters"),
        (script, lambda: [(4, 8)], "TorchScript keeps its tensors out of reach"),
        (lambda: nn.Sequential(linear(), script()), lambda: [(4, 8)], "TorchScript keeps its tensors out of reach"),
        (linear, lambda: [nested()], "no fake for a tensor of the model or its inputs"),
    ],
)
def test_what_is_no_model_or_no_input(model, inputs, words):
    with pytest.raises(MemlabError, match=words):
        size(model(), *inputs())
    gc.collect()  # hooks of lazy parameters refer to them


def test_inside_of_another_fake_mode_it_is_refused():
    with FakeTensorMode(), pytest.raises(MemlabError, match="Leave the FakeTensorMode"):
        size(linear(), (4, 8))
