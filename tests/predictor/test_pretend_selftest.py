"""The self-test passes here, and says what is wrong where something is."""

from __future__ import annotations

import pytest
import torch

from memlab.errors import PredictionError
from memlab.predictor import selftest
from memlab.predictor.pretend import patches


def test_this_pytorch_can_be_predicted():
    selftest.problems.cache_clear()
    assert selftest.problems() == ()
    selftest.require()


def test_a_name_that_is_gone_is_said(monkeypatch):
    monkeypatch.setattr(patches, "PRIVATE", (("torch._C._no_such_thing", "nothing at all"),))
    selftest.problems.cache_clear()
    try:
        with pytest.raises(
            PredictionError, match=r"lacks torch._C._no_such_thing \(nothing at all\).*Use a PyTorch from"
        ):
            selftest.require()
    finally:
        selftest.problems.cache_clear()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("_has_compatible_shallow_copy_type", "a module does not move"),
        ("empty_strided", "could not be switched on|not what C\\+\\+"),
    ],
)
def test_a_check_that_fails_is_said(monkeypatch, broken, said):
    from memlab.predictor.pretend import devices, run

    if broken == "empty_strided":
        monkeypatch.setattr(run.Run, "empty", None)
        monkeypatch.setattr(run.Run, "_new", None)
    else:
        monkeypatch.setattr(devices, "_compatible", lambda *args: False)
    selftest.problems.cache_clear()
    try:
        assert len(selftest.problems()) == 1
        with pytest.raises(PredictionError, match=said):
            selftest.require()
    finally:
        selftest.problems.cache_clear()
    assert torch.zeros(2).device.type == "cpu"


def test_every_private_name_is_there():
    assert patches.missing() == []
