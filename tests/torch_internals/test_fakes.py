"""The private names of tensors without data: are they there, and do they behave as memlab believes?"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from memlab.torch_internals import fakes

CPU = torch.device("cpu")


def test_a_fake_tensor_claims_a_device_and_computes_shapes():
    mode = fakes.FakeTensorMode()
    one = fakes.FakeTensor(mode, torch.empty(4, 8, device="meta"), CPU)
    with mode:
        two = one @ one.t()
    assert (type(two), two.device, tuple(two.shape)) == (fakes.FakeTensor, CPU, (4, 4))
    assert two.untyped_storage().nbytes() == 64
    with mode, pytest.raises(fakes.DataDependentOutputException):
        two.sum().item()


def test_the_mode_is_known_to_be_on_and_can_be_held_off():
    assert not fakes.fake_mode_is_on()
    with fakes.FakeTensorMode():
        assert fakes.fake_mode_is_on()
        with fakes.no_dispatch():
            assert type(torch.empty(1, device="meta")) is Tensor
    assert not fakes.fake_mode_is_on()


def test_a_known_number_answers_and_its_copy_is_changed():
    mode, real = fakes.FakeTensorMode(), torch.tensor(3)
    one = fakes.known_number(mode, real.clone())
    with mode:
        assert one.item() == 3
        one.add_(1)
        assert one.item() == 4
    assert real.item() == 3


def test_the_log_of_refused_operators_has_this_name(caplog):
    mode = fakes.FakeTensorMode()
    one = fakes.FakeTensor(mode, torch.empty(4, 8, device="meta"), CPU)
    with mode, caplog.at_level(logging.DEBUG, fakes.LOGGER), pytest.raises(RuntimeError):
        one @ one
    assert {record.name for record in caplog.records} <= {fakes.LOGGER}


def test_classes_that_wrap_tensors_are_known():
    nested = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged)
    assert fakes.wraps_others(nested)
    assert not fakes.wraps_others(torch.ones(1))
    assert sum(part.untyped_storage().nbytes() for part in (nested.values(), nested.offsets())) >= 8 * 8 * 4
