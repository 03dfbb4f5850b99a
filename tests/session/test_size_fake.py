"""The private names under `memlab.sizes`: are they there, and do they behave as it believes?"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from memlab.sizes import fake
from memlab.sizes.standins import StandIns
from memlab.sizes.storages import nbytes, parts, storages, tensors_in

CPU = torch.device("cpu")


def standins() -> StandIns:
    return StandIns(CPU, {"cpu"})


def test_a_fake_tensor_claims_a_device_and_computes_shapes():
    mode = fake.FakeTensorMode()
    one = fake.FakeTensor(mode, torch.empty(4, 8, device="meta"), CPU)
    with mode:
        two = one @ one.t()
    assert (type(two), two.device, tuple(two.shape)) == (fake.FakeTensor, CPU, (4, 4))
    assert two.untyped_storage().nbytes() == 64
    with mode, pytest.raises(fake.DataDependentOutputException):
        two.sum().item()


def test_the_mode_is_known_to_be_on():
    assert not fake.fake_mode_is_on()
    with fake.FakeTensorMode():
        assert fake.fake_mode_is_on()
    assert not fake.fake_mode_is_on()


def test_without_dispatch_a_mode_makes_nothing_of_its_own():
    with fake.FakeTensorMode(), fake.no_dispatch():
        assert type(torch.empty(1, device="meta")) is Tensor


def test_a_known_number_answers_and_its_copy_is_changed():
    mode, real = fake.FakeTensorMode(), torch.tensor(3)
    one = fake.known_number(mode, real.clone())
    with mode:
        assert one.item() == 3
        one.add_(1)
        assert one.item() == 4
    assert real.item() == 3


def test_the_log_of_refused_operators_has_this_name(caplog):
    mode = fake.FakeTensorMode()
    one = fake.FakeTensor(mode, torch.empty(4, 8, device="meta"), CPU)
    with mode, caplog.at_level(logging.DEBUG, fake.LOGGER), pytest.raises(RuntimeError):
        one @ one
    assert {record.name for record in caplog.records} <= {fake.LOGGER}


def test_wrappers_of_torch_func_are_unwrapped():
    seen: list[Tensor] = []
    x = torch.randn(4, 8)
    torch.vmap(torch.func.grad(lambda y: seen.append(fake.unwrapped(y)) or (y**2).sum()))(x)
    assert [tuple(one.shape) for one in seen] == [(4, 8)]
    assert seen[0].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert fake.unwrapped(x) is x


def test_classes_that_wrap_tensors_are_known():
    nested = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged)
    assert fake.wraps_others(nested)
    assert not fake.wraps_others(torch.ones(1))
    assert nbytes(nested) >= 8 * 8 * 4


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_storages_behind_every_layout():
    dense = torch.eye(4)
    compressed = [
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 2)),
        dense.to_sparse_bsc((2, 2)),
    ]
    for tensor in (dense.to_sparse(), *compressed):
        assert nbytes(tensor) == sum(part.untyped_storage().nbytes() for part in parts(tensor)) > 0
    assert [storage.nbytes() for storage in storages(dense[1:2])] == [64]
    assert list(storages(torch.ones(2, 2).to_mkldnn())) == []


def test_stand_ins_share_storages_as_the_real_ones_do():
    base = torch.randn(4, 8)
    makes = standins()
    one, two, other = makes.of(base), makes.of(base[1:, ::2]), makes.of(torch.randn(3))
    assert one.untyped_storage()._cdata == two.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert (two.stride(), two.storage_offset(), two.shape) == ((8, 2), 8, (3, 4))
    assert makes.of(base) is one
    assert makes.has_storage(one.untyped_storage()._cdata)
    assert makes.originals([one, other])[0] is base


def test_a_stand_in_of_a_parameter_is_one_and_keeps_what_was_written_on_it():
    parameter = nn.Parameter(torch.randn(3), requires_grad=False)
    parameter.label = "mine"  # type: ignore[attr-defined]
    one = standins().of(parameter)
    assert isinstance(one, nn.Parameter)
    assert (one.requires_grad, one.label, one.is_leaf) == (False, "mine", True)


def test_meta_tensors_come_to_the_device_they_are_asked_for():
    assert standins().of(torch.empty(3, device="meta")).device == CPU


class Sly:
    def __init__(self) -> None:
        self.tensor = torch.ones(1)

    def __getattr__(self, name: str) -> None:
        raise RuntimeError("asked")

    def __iter__(self) -> None:
        raise RuntimeError("asked")


def test_tensors_are_found_without_running_code():
    sly, one = Sly(), torch.ones(2)
    loop: list[object] = [one]
    loop.append(loop)
    assert [id(t) for t in tensors_in({"a": [sly, (one,)]}, loop)] == [id(sly.tensor), id(one)]
