"""Predictions of sparse tensors: what they and their kernels allocate is what the simulated GPU's allocator says."""

from __future__ import annotations

import json

import pytest
import sparse_programs
import torch
from processes import python
from torch import nn

import memlab
from memlab.allocator.rules import release
from memlab.errors import PredictionError

CARD = sparse_programs.CARD
TRUTH = {
    "sgd": [55_213_568, 81_788_928, 34_134_016, 81_788_928],
    "sparse_adam": [86_602_240, 119_537_664, 65_522_688, 119_537_664],
    "momentum": [58_757_120, 83_886_080, 39_120_384, 83_886_080],
    "adagrad": [71_002_112, 98_566_144, 49_922_560, 98_566_144],
    "bags": [43_289_088, 65_011_712, 40_719_872, 65_011_712],
    "accumulated": [54_389_760, 83_886_080, 32_879_616, 83_886_080],
    "graph_convolution": [27_710_976, 44_040_192, 17_376_768, 44_040_192],
    "elements": [41_477_632, 60_817_408, 16_205_824, 60_817_408],
    "coalesced": [26_450_432, 44_040_192, 16_312_832, 44_040_192],
    "known_rows": [31_251_968, 44_040_192, 15_360_000, 44_040_192],
    "totals": [38_003_712, 44_040_192, 26_002_432, 44_040_192],
    "compressed": [8_907_776, 25_165_824, 6_307_840, 25_165_824],
}
"""What torch 2.12.1 had on a simulated GPU of capability 8.0: the peaks of *allocated* and *reserved*, and both at the end.

Before, cuBLASLt had a workspace of its own.
"""


@pytest.mark.simulated
@pytest.mark.timeout(900)
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sparse_programs.PROGRAMS)
@pytest.mark.parametrize("capability", ["8.0", "7.5", "9.0"])
def test_sparse_programs_hold_what_they_hold_there(name, capability):
    ways = ("measured", "predicted")
    gpu = {"capability": capability}
    there, here = (json.loads(python(sparse_programs.__file__, way, name, capability, gpu=gpu)) for way in ways)
    assert here == there
    assert capability != "8.0" or release(torch.__version__) < (2, 12) or there == TRUTH[name]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", sparse_programs.PROGRAMS)
def test_the_prediction_is_what_was_measured(name):
    assert sparse_programs.predicted(sparse_programs.PROGRAMS[name], torch_version="2.12") == TRUTH[name]


def ones(indices: torch.Tensor, *size: int, **how: bool) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1], device="cuda"), size, **how)


def with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension is sparse, the other dense."""
    return torch.sparse_coo_tensor(tensor._indices()[:1], torch.ones(tensor._nnz(), 7, device="cuda"), (5, 7))


def test_how_many_indices_differ_is_known_or_assumed_to_be_all():
    def known() -> None:
        found = ones(torch.tensor([[0, 0, 3, 3, 3]]).cuda(), 5).coalesce()
        assert (found._nnz(), found.is_coalesced(), found.indices().shape) == (2, True, (1, 2))

    def unknown() -> None:
        found = ones(torch.randint(5, (2, 40), device="cuda"), 5, 5).coalesce()
        assert found._nnz() == found.values().numel() == 40

    assert not memlab.predict(known, CARD).assumptions.values
    (value,) = memlab.predict(unknown, CARD).assumptions.values
    assert value.key.startswith("test_sparse.py:") and value.key.endswith(" coalesce")
    assert (value.high, value.most, value.decides) == (40, 40, "size")


def test_facts_of_sparse_tensors():
    def step() -> None:
        one = ones(torch.randint(5, (2, 40), device="cuda"), 5, 7)
        assert (one.layout, one.is_sparse, one.is_cuda, one.device.type) == (torch.sparse_coo, True, True, "cuda")
        assert (one.sparse_dim(), one.dense_dim(), one.is_coalesced(), one.shape) == (2, 0, False, (5, 7))
        assert one.t().shape == (7, 5) and one.cpu().shape == (5, 7) and one.half().dtype == torch.float16
        assert (one + one)._nnz() == 80 and one.to_dense().layout == torch.strided
        empty = torch.zeros(3, 4, layout=torch.sparse_coo, device="cuda")
        assert empty._nnz() == 0 and torch.sparse_coo_tensor((3, 4), device="cuda").is_coalesced()
        dense = torch.ones(4, 4, device="cuda").to_sparse()
        assert dense._nnz() == 16 and dense.is_coalesced()
        rows = dense.to_sparse_csr()
        assert (rows.layout, rows.crow_indices().shape, rows.col_indices().shape) == (torch.sparse_csr, (5,), (16,))
        known = torch.sparse_coo_tensor([[0, 2], [1, 1]], [1.0, 1.0], device="cuda")
        assert known.shape == (3, 2)
        host = torch.sparse_coo_tensor([[0, 2]], [1.0, 1.0], (3,))
        assert not host.is_cuda and host.to_dense().tolist() == [1, 0, 1]

    memlab.predict(step, CARD)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("work", "what"),
    [
        (lambda x: x @ x, r"aten\.\S+ of"),
        (lambda x: x.unsqueeze(0), r"aten.unsqueeze.default of a sparse tensor"),
        (lambda x: x.to_sparse_csr().to_dense(), r"to_dense\(\) of a CSR tensor"),
        (lambda x: nn.Parameter(x), "a sparse nn.Parameter"),
        (lambda x: torch.sparse_coo_tensor(x._indices(), x._values()), "the size of a sparse tensor"),
        (lambda x: torch.cat([with_rows(x)] * 2, -1), "aten.cat"),
        (lambda x: x.sum(0), "over some dimensions"),
        (lambda x: torch.zeros(3, 3, layout=torch.sparse_csr, device="cuda"), "layout=torch.sparse_csr"),
    ],
)
def test_what_is_not_predicted_is_refused_with_its_line(work, what):
    def step() -> None:
        work(ones(torch.randint(5, (2, 40), device="cuda"), 5, 5))

    with pytest.raises(PredictionError, match=rf"{what}.*cannot be predicted.*\(test_sparse.py:\d+\)"):
        memlab.predict(step, CARD)


def test_a_product_has_cusparses_workspace_as_an_interval():
    def step() -> None:
        matrix = ones(torch.randint(3000, (2, 6000), device="cuda"), 3000, 3000, is_coalesced=True)
        matrix @ torch.ones(3000, 500, device="cuda")

    found = memlab.predict(step, CARD)
    (part,) = (one for one in found.parts if "cuSPARSE" in one.name)
    assert (part.low_bytes, part.high_bytes) == (0, 4 * (6000 + 3000 * 500))
    assert found.allocated_bytes.high - found.allocated_bytes.low >= part.high_bytes
