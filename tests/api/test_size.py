"""`memlab.size`: what it takes, what it gives, the classic estimate beside it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from api.real_forward import Function, linear, saved_bytes
from html_text import Words
from torch import Tensor, nn

from memlab.analysis.step_size import Layer, folded
from memlab.api.size import size
from memlab.errors import MemlabError
from memlab.prediction.child import Child
from memlab.workloads.language import Transformer


def classic_model() -> nn.Sequential:
    """The example of the classic write-ups."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
    )


PICTURE = (1, 3, 682, 700)


def test_the_classic_figures_to_the_byte_and_how_far_they_are_off_and_why():
    found = size(classic_model(), PICTURE)
    assert found.parameter_count == 112_576
    assert found.classic.parameter_bytes == 450_304
    assert found.classic.without_backward_bytes == 336_089_600
    assert found.classic.with_backward_bytes == 672_179_200
    for figure in ("0.450304 MB", "336.0896 MB", "672.1792 MB"):
        assert figure in found.text
        assert figure in found.html
    pool, out = 64 * 341 * 350, 4 * 128 * 341 * 350
    assert found.kept_bytes == 336_089_600 - out + 8 * pool + out
    assert [term.nbytes for term in found.classic.terms] == [-336_089_600, 8 * pool]
    assert "so it is 69% too high" in found.text
    assert "int64 of 1×64×341×350" in found.text


def reconciled(found: Any) -> bool:
    estimate, terms = found.classic.with_backward_bytes, found.classic.terms
    return estimate + sum(term.nbytes for term in terms) == found.classic.kept_bytes == found.kept_bytes


def test_the_terms_always_add_up():
    x = torch.randn(2, 8)
    shared = linear()
    models = {
        "re-used": nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared),
        "views": nn.Sequential(linear(), nn.Identity(), nn.Flatten(), nn.Dropout(0.0)),
        "narrow": nn.Sequential(linear(), nn.GELU(), linear()).bfloat16(),
        "functions": Function(lambda m, x: m.b(m.a(x).exp().sin()).cos(), a=linear(), b=linear()),
        "nothing": nn.Identity(),
        "many outputs": nn.Sequential(nn.GRU(8, 4)),
    }
    for name, model in models.items():
        assert reconciled(size(model, x.bfloat16() if name == "narrow" else x)), name


def test_each_reason_is_told_with_its_bytes():
    x = torch.randn(2, 8)
    row = x.nbytes
    found = size(nn.Sequential(linear(), nn.Identity(), nn.Flatten(), linear(), linear()), x)
    by_text = {term.text.split(",")[0]: term.nbytes for term in found.classic.terms}
    assert by_text["2 outputs counted although it shares its memory with one before"] == -2 * row
    narrow = size(nn.Sequential(linear(), nn.GELU(), linear()).bfloat16(), x.bfloat16())
    assert [t.nbytes for t in narrow.classic.terms if "four bytes" in t.text] == [-3 * 2 * x.numel()]
    lost = size(Function(lambda m, x: m.b(m.a(x) + x), a=nn.Sequential(linear()), b=linear()), x)
    assert any("1 output that nobody keeps, the largest of a.0" in term.text for term in lost.classic.terms)


# --- what it takes ---


def test_inputs_as_tensors_shapes_keywords_and_containers():
    model = Function(lambda m, x, scale=1: m.a(x) * scale, a=linear())
    x = torch.randn(4, 8)
    expected = size(model, x).parts
    assert size(model, (4, 8)).parts == expected
    assert size(model, torch.Size([4, 8])).parts == expected
    assert size(model, x=(4, 8)).parts == expected
    assert size(model, torch.empty(4, 8, device="meta"), scale=3).parts == expected
    nested = Function(lambda m, batch: {"loss": m.a(batch["x"][0]).sum(), "more": [m.a(batch["x"][0])]}, a=linear())
    found = size(nested, {"x": [x]})
    assert (found.input_bytes, found.output_bytes) == (x.nbytes, x.nbytes + 4)
    assert found.inputs == ("(4, 8) float32",)


def test_a_list_of_numbers_is_no_shape():
    model = Function(lambda m, x, shape: m.a(x).view(shape), a=linear())
    assert size(model, (4, 8), [2, 2, 8]).output_bytes == 128


@dataclasses.dataclass
class Output:
    loss: Tensor
    hidden: list[Tensor]


def test_outputs_in_objects_are_found():
    model = Function(lambda m, x: Output(m.a(x).sum(), [m.a(x)]), a=linear())
    assert size(model, (4, 8)).output_bytes == 128 + 4
    assert size(model, (4, 8)).gradient_bytes == 72 * 4


def test_a_model_on_meta_is_sized_as_one_on_the_cpu():
    tokens = torch.zeros(2, 64, dtype=torch.long)
    with torch.device("meta"):
        nowhere = Transformer()
    here = size(Transformer(), tokens, optimizer="adamw")
    there = size(nowhere, tokens, optimizer="adamw")
    assert (there.parts, there.device, there.layers) == (here.parts, "cpu", here.layers)
    assert all(p.is_meta for p in nowhere.parameters())


def test_eight_billion_parameters_on_meta():
    with torch.device("meta"):
        model = Transformer(layers=40, width=4096, heads=32, vocabulary=32_000, time=2048).bfloat16()
    found = size(model, torch.empty(1, 2048, dtype=torch.long, device="meta"), optimizer="adamw")
    assert found.parameter_count > 8e9
    assert found.parameter_bytes == found.gradient_bytes == 2 * found.parameter_count
    assert found.optimizer_bytes > 2 * found.parameter_bytes
    assert found.activation_bytes > 40 * 2048 * 4096 * 2 * 10
    assert len(found.text) < 10_000


def test_a_tensor_of_the_model_given_as_an_input_counts_once():
    model = Function(lambda m, w: w * 2, a=linear())
    found = size(model, model.a.weight)
    assert (found.input_bytes, found.parameter_bytes) == (0, 288)


def test_plain_tensor_attributes_count_with_the_buffers():
    model = Function(lambda m, x: m.a(x) + m.mask, a=linear())
    model.mask = torch.ones(4, 8)
    found = size(model, (4, 8))
    assert found.buffer_bytes == 128
    assert any("not registered: mask" in note for note in found.notes)


def test_tensors_from_outside_are_named_and_not_counted():
    outside = torch.ones(4, 8)
    model = Function(lambda m, x: m.a(x) * outside, a=linear())
    x = torch.randn(4, 8)
    found = size(model, x)
    assert found.activation_bytes == 0
    assert (
        saved_bytes(model, x) == outside.nbytes
    )  # of which the test's function does not know that it was there before
    assert any("1 tensor from outside the model and its inputs (128 B)" in note for note in found.notes)


def test_numbers_that_are_known_may_be_asked_for():
    def forward(model: Function, x: Tensor, times: Tensor) -> Tensor:
        if model.first:
            model.first.fill_(False)
            x = model.a(x).exp()
        return x * times.item()

    model = Function(forward, a=linear())
    model.register_buffer("first", torch.tensor(True))
    x = torch.randn(4, 8)
    assert size(model, x, torch.tensor(3)).activation_bytes == x.nbytes
    assert model.first.item() is True


@pytest.mark.filterwarnings("ignore:Sparse")
def test_complex_integer_float8_and_sparse_tensors():
    model = Function(
        lambda m, x: x @ m.w.float() + m.k.float(), w=nn.Parameter(torch.zeros(8, 8).to(torch.float8_e4m3fn))
    )
    model.register_buffer("k", torch.zeros(8, dtype=torch.int8))
    found = size(model, (4, 8))
    assert (found.parameter_bytes, found.buffer_bytes, found.gradient_bytes) == (64, 8, 64)
    sparse = Function(lambda m, x: torch.sparse.mm(m.w, x), w=nn.Parameter(torch.eye(8).to_sparse()))
    found = size(sparse, (8, 8))
    assert (found.parameter_bytes, found.gradient_bytes) == (8 * (16 + 4), 8 * (16 + 4))
    rows = torch.eye(8).to_sparse_csr()
    found = size(linear(), rows)
    assert found.input_bytes == sum(
        t.untyped_storage().nbytes() for t in (rows.crow_indices(), rows.col_indices(), rows.values())
    )
    assert any("Sparse tensors take part without their elements" in note for note in found.notes)


def test_an_input_that_is_a_view_counts_with_what_it_keeps_alive():
    found = size(linear(), torch.randn(1000, 8)[:4])
    assert found.input_bytes == 32_000
    assert "1 input of a larger storage counts with all of it." in found.notes


def test_compiled_models_are_sized_as_written():
    plain = nn.Sequential(linear(), nn.GELU())
    expected = size(plain, (4, 8)).parts
    compiled = torch.compile(plain)
    assert size(compiled, (4, 8)).parts == expected
    assert any("Compiled" in note for note in size(compiled, (4, 8)).notes)
    in_place = nn.Sequential(linear(), nn.GELU())
    in_place.compile()
    assert size(in_place, (4, 8)).parts == expected


# --- what it gives ---


def test_the_parts_add_up_and_the_levels_follow():
    found = size(nn.Sequential(linear(), nn.BatchNorm1d(8), nn.GELU()), (4, 8), optimizer="adam")
    assert sum(found.parts.values()) == found.total_bytes
    assert found.before_backward_bytes == found.total_bytes - found.gradient_bytes
    assert found.at_optimizer_bytes == found.total_bytes - found.kept_bytes
    assert found.model_bytes == (72 + 16) * 4 + 2 * 32 + 8


def test_layers_by_path_also_of_shared_modules():
    shared = linear()
    inner = nn.Sequential(shared, nn.GELU())
    found = size(nn.Sequential(inner, nn.Sequential(shared, nn.GELU())), (4, 8), optimizer="sgd")
    by_path = {layer.path: layer for layer in found.layers}
    assert list(by_path) == ["0.0", "0.1", "1.0", "1.1"]
    assert [by_path[path].parameter_bytes for path in ("0.0", "1.0")] == [288, 0]
    assert [by_path[path].activation_bytes for path in by_path] == [0, 128, 128, 128]
    assert by_path["0.1"].shape == (4, 8)


def test_a_layer_called_again_is_one_row():
    shared = linear()
    found = size(Function(lambda m, x: m.a(m.a(m.a(x))), a=shared), (4, 8))
    assert [(layer.path, layer.calls, layer.activation_bytes) for layer in found.layers] == [("a", 3, 256)]


def test_pandas():
    found = size(classic_model(), (1, 3, 16, 16), optimizer="adam")
    layers, tensors, parts = found.to_pandas(), found.to_pandas("tensors"), found.to_pandas("parts")
    assert layers.activation_bytes.sum() == found.activation_bytes
    assert layers.parameter_count.sum() == found.parameter_count
    assert tensors[tensors.why == "saved"].nbytes.sum() == found.activation_bytes
    assert parts.nbytes.sum() == found.total_bytes
    assert set(tensors.operator) == {"aten.convolution.default", "aten.max_pool2d_with_indices.default"}
    assert ("1", "0") in zip(tensors.layer, tensors.made_in, strict=True)
    with pytest.raises(MemlabError, match='takes "layers", "tensors" or "parts", got 3'):
        found.to_pandas(3)
    assert size(nn.Identity(), (1,)).to_pandas().empty


@pytest.mark.slow
def test_where_nothing_can_be_forked_the_figures_are_the_same(monkeypatch):
    model, x = nn.Sequential(linear(300, 300), nn.BatchNorm1d(300), nn.GELU()), torch.randn(4, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forked = size(model, x, optimizer="adam")
        monkeypatch.setattr(Child, "forks", False)
        spawned = size(model, x, optimizer="adam")
    assert (spawned.parts, spawned.layers, spawned.notes) == (forked.parts, forked.layers, forked.notes)
    assert any("Autocast is on" in note for note in spawned.notes)


# --- the table: text and HTML say the same, whatever names the model has ---


EVIL = "<script>alert(1)</script>\x1b[31m\nnext&\"'"


def test_the_text_stands_alone():
    found = size(nn.Sequential(nn.Linear(256, 256), nn.GELU()), (4, 256), optimizer="adam")
    assert (
        found.text
        == """\
memlab · size of Sequential · input (4, 256) float32 · training mode · cpu

  parameters                    257.0 KiB  65,792
  gradients                     257.0 KiB
  optimizer state               514.0 KiB  Adam
  activations                    4.00 KiB  1 storage that autograd keeps for backward
  outputs                        4.00 KiB  as far as autograd does not keep them
  inputs                         4.00 KiB
  all together                   1.02 MiB
  between forward and backward  783.0 KiB  all but the gradients
  when the optimizer steps       1.01 MiB  all but activations and outputs

By layer:
  layer  type    output  parameters   gradient  optimizer  activations   classic
  0      Linear  4×256    257.0 KiB  257.0 KiB  514.0 KiB               4.00 KiB
  1      GELU    4×256                                        4.00 KiB  4.00 KiB

The classic estimate is 0.0164 MB with backward; this forward leaves 0.0082 MB, so it is 100% too high:
Classic: parameters 0.263168 MB, intermediates 0.0082 MB, with backward 0.0164 MB. What separates the two:
  −0.0082 MB  backward was assumed to need everything twice; gradients of activations are temporary

Not counted: a loss outside of the model, temporaries of operators and of backward, the allocator's rounding."""
    )
    assert str(found) == repr(found) == found.text


def test_html_says_the_same_as_the_text():
    found = size(nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout()), (4, 8), optimizer="sgd")
    words = "".join(Words(found.html).words)
    for cell in (cell.strip().rstrip(":") for line in found.text.splitlines() for cell in line.split("  ")):
        assert cell in words
    assert "136 B" in words  # of the norm: two vectors of eight floats, and as buffers two more and a count
    assert set(found._repr_mimebundle_()) == {"text/html", "text/plain"}


def test_names_cannot_steer_a_page_or_a_terminal():
    model = nn.Sequential()
    model.add_module(EVIL.replace(".", ""), linear())
    model.add_module("plain", type(EVIL, (nn.Linear,), {})(8, 8))
    model.add_module("m" * 10_000, linear())
    text, html = (found := size(model, (4, 8))).text, found.html
    assert "script" not in Words(html).tags
    assert "script>" in text
    assert "\x1b" not in text + html
    assert not any(line.startswith("next") for line in text.splitlines())
    assert len(text) < 3000  # a long name does not run away


def test_a_model_without_anything():
    found = size(Function(lambda m: None))
    assert "input none" in found.text
    assert found.total_bytes == 0
    assert "classic" not in found.text
    assert found.html


def test_many_layers_are_folded_and_none_is_lost():
    model = nn.Sequential(*(nn.Sequential(*(linear() for _ in range(10))) for _ in range(20)))
    found = size(model, (4, 8))
    shown = folded(found.layers, 60)
    assert [layer.path for layer in shown] == [str(number) for number in range(20)]
    assert sum(layer.activation_bytes for layer in shown) == found.activation_bytes
    assert sum(layer.parameter_count for layer in shown) == found.parameter_count
    assert shown[0].type == "10 layers"


def test_a_flat_model_of_a_thousand_layers():
    layers = tuple(Layer(str(number), "Linear", activation_bytes=1) for number in range(1000))
    shown = folded(layers, 60)
    assert len(shown) == 60
    assert (shown[-1].path, shown[-1].type, shown[-1].activation_bytes) == ("…", "941 more", 941)


def test_a_layer_that_has_something_itself_keeps_its_name_when_folded():
    block = Function(lambda m, x: m.a(x) * m.w, a=linear(), w=nn.Parameter(torch.ones(8)))
    found = size(nn.Sequential(*(block for _ in range(1))), (4, 8))
    (one,) = folded(found.layers, 1)
    assert (one.path, one.type, one.parameter_count) == ("0", "Function", 80)


def test_frozen_parameters_and_eval_mode_are_told():
    model = nn.Sequential(linear().requires_grad_(False), linear()).eval()
    text = size(model, (4, 8)).text
    assert "eval mode" in text
    assert "144, 72 of them frozen" in text


def test_the_bar_fills():
    found = size(nn.Sequential(linear(), nn.GELU()), (4, 8), optimizer="adam")
    shares = [float(share) for share in re.findall(r"width:([\d.]+)%", found.html)]
    assert len(shares) == sum(nbytes > 0 for nbytes in found.parts.values())
    assert abs(sum(shares) - 100) < 0.1
