"""The table of sizes in words: text and HTML say the same, whatever names the model has."""

from __future__ import annotations

import torch
from html_words import Words
from session.real_forward import Function, linear
from torch import nn

from memlab.session.size import size
from memlab.sizes.value import Layer
from memlab.views.size import folded, table

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

  layer  type    output  parameters   gradient  optimizer  activations   classic
  0      Linear  4×256    257.0 KiB  257.0 KiB  514.0 KiB               4.00 KiB
  1      GELU    4×256                                        4.00 KiB  4.00 KiB

The classic estimate says 0.0164 MB with backward; this forward leaves 0.0082 MB, so it is 100% too high.
Classic: parameters 0.263168 MB, intermediates 0.0082 MB, with backward 0.0164 MB.
From that to what is left, activations and outputs:
  −0.0082 MB  backward was taken to need everything twice; gradients of activations come and go one by one

Not counted: a loss outside of the model, temporaries of operators and of backward, the allocator's rounding."""
    )
    assert str(found) == repr(found) == found.text


def test_html_says_the_same_as_the_text():
    found = size(nn.Sequential(linear(), nn.BatchNorm1d(8), nn.Dropout()), (4, 8), optimizer="sgd")
    words = "".join(Words(found.html).words)
    for cell in (cell.strip() for line in found.text.splitlines() for cell in line.split("  ")):
        assert cell in words
    assert set(found._repr_mimebundle_()) == {"text/html", "text/plain"}


def test_names_cannot_steer_a_page_or_a_terminal():
    model = nn.Sequential()
    model.add_module(EVIL.replace(".", ""), linear())
    model.add_module("plain", type(EVIL, (nn.Linear,), {})(8, 8))
    text, html = (found := size(model, (4, 8))).text, found.html
    assert "script" not in Words(html).tags
    assert "script>" in text
    assert "\x1b" not in text + html
    assert not any(line.startswith("next") for line in text.splitlines())


def test_a_model_without_anything():
    found = size(Function(lambda m: None))
    assert "input none" in found.text
    assert found.total_bytes == 0
    assert "classic" not in found.text
    assert found.html


def test_a_long_name_does_not_run_away():
    model = nn.Sequential()
    model.add_module("m" * 10_000, linear())
    assert len(size(model, (4, 8)).text) < 3000


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
    assert sum(nbytes for _, nbytes in table(found).shares) == found.total_bytes
