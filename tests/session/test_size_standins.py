"""The stand-ins of `memlab.sizes`: tensors without data that share storages as the real ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.sizes.standins import StandIns
from memlab.sizes.storages import nbytes, parts, storages, tensors_in

CPU = torch.device("cpu")


def standins() -> StandIns:
    return StandIns(CPU, {"cpu"})


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
