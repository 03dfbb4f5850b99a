"""The self-test passes here, and says what is wrong where something is."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from processes import python

import memlab
from memlab.errors import PredictionError
from memlab.fake_cuda import devices, dispatcher
from memlab.prediction import selftest
from memlab.torch_internals import private_names


@pytest.fixture(autouse=True)
def asks_anew():
    selftest.PASSED.clear()
    selftest.problems.cache_clear()
    yield
    selftest.problems.cache_clear()


def test_this_pytorch_can_be_predicted():
    assert private_names.missing(private_names.FAKE_CUDA) == []
    assert selftest.problems() == ()
    selftest.require()


@pytest.mark.skipif(sys.platform != "linux", reason="a child inherits what its parent knows where it is forked")
def test_what_one_child_has_passed_the_next_ones_are_not_asked(monkeypatch):
    monkeypatch.setattr(selftest, "problems", lambda: ("a thing",))
    with pytest.raises(PredictionError, match="cannot be predicted"):
        memlab.predict(allocates, "T4")
    monkeypatch.undo()
    first = memlab.predict(allocates, "T4")
    monkeypatch.setattr(selftest, "problems", lambda: ("a thing",))
    assert memlab.predict(allocates, "T4").peak_allocated_bytes == first.peak_allocated_bytes == 4096


def allocates() -> None:
    torch.empty(1024, device="cuda")


def test_names_that_are_gone_before_memlab_is_imported_are_said():
    code = """
        import torch
        for name in ("_swap_tensor_impl", "_get_sdp_priority_order", "_dispatch_has_kernel_for_dispatch_key"):
            delattr(torch._C, name)
        import memlab
        from memlab.errors import PredictionError
        try:
            memlab.predict(lambda: None, "T4")
        except PredictionError as error:
            print(error)
    """
    (line,) = python("-c", textwrap.dedent(code)).splitlines()
    assert "it lacks torch._C._swap_tensor_impl (" in line


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ([(private_names, "FAKE_CUDA", {"torch._C._no_such_thing": "nothing at all"})],
         r"lacks torch._C._no_such_thing \(nothing at all\).*Use a PyTorch from"),
        ([(devices, "set_data", torch.Tensor.data.__set__)], "a module does not move"),
        ([(dispatcher.OpDispatcher, "empty", None), (dispatcher.OpDispatcher, "_born", None)],
         "could not be switched on|not what C\\+\\+"),
    ],
)  # fmt: skip
def test_what_fails_is_said(monkeypatch, broken, said):
    for place, name, value in broken:
        monkeypatch.setattr(place, name, value)
    assert len(selftest.problems()) == 1
    with pytest.raises(PredictionError, match=said):
        selftest.require()
    assert torch.zeros(2).device.type == "cpu"
