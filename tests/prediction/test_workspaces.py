"""Workspaces: the rules for each PyTorch, card and environment, and the real cuBLAS code on the simulated GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from blas_calls import CALLS, KEPT
from processes import python

from memlab.allocator.replay import Workspace
from memlab.fake_cuda.convolution_workspaces import WORKSPACE
from memlab.prediction.cards import Card, find
from memlab.prediction.workspaces import CUBLAS, CUBLASLT, CUDNN, BlasRules, WorkspaceOperator, base_name, workspaces
from memlab.trace import Events, Kind
from memlab.units import GiB, KiB, MiB

SMALL, LARGE, LT = 8519680, 32 * MiB, 1 * MiB


def rules(card: str = "RTX 4060", version: str = "2.13.0", **environment: str) -> BlasRules:
    return BlasRules.of(find(card), version, environment)


def births(*sizes: int) -> Events:
    rows = [(row, Kind.ALLOC, row, size, size, 0, 0, 0) for row, size in enumerate(sizes)]
    return Events(*np.array(rows, np.int64).reshape(-1, 8).T)


def added(
    *operators: WorkspaceOperator, version: str = "2.13.0", card: str = "RTX 4060", **environment: str
) -> list[Workspace]:
    events = births(*[1000] * 20)
    return list(workspaces(events, operators, find(card), torch_version=version, environment=environment).low)


LINEAR = WorkspaceOperator(0, "aten.addmm.default", ((80,), (64, 48), (48, 80)))
PRODUCT = WorkspaceOperator(3, "aten.mm.default", ((64, 48), (48, 80)))


@pytest.mark.parametrize(
    ("card", "version", "size"),
    [
        ("T4", "2.11.0", SMALL), ("A100", "2.12.1", SMALL), ("RTX 4060", "2.15.0", SMALL), ("H100", "2.11.0", LARGE),
        ("H100", "2.15.0", LARGE), ("B200", "2.11.0", SMALL), ("RTX 5090", "2.11.0+cu130", SMALL),
        ("H100", "2.10.0", LARGE), ("RTX 5090", "2.10.0+cu128", SMALL),
        ("B200", "2.12.1", LARGE), ("RTX 5090", "2.14.0", LARGE), ("MI300X", "2.13.0", 128 * MiB),
    ],
)  # fmt: skip
def test_the_size_follows_card_and_version(card, version, size):
    assert rules(card, version).workspace_bytes == size


@pytest.mark.parametrize(
    ("value", "size"),
    [(":4096:2:16:8", SMALL), (":16:8", 128 * KiB), (":4096:8", 32 * MiB), (":0:0", 0), ("junk", SMALL), ("", SMALL)],
)
def test_the_size_follows_the_environment(value, size):
    assert rules(CUBLAS_WORKSPACE_CONFIG=value).workspace_bytes == size


def test_kept_workspaces_are_made_once_for_each_thread_and_stream():
    found = added(LINEAR, PRODUCT, WorkspaceOperator(5, "aten.mm.default", PRODUCT.shapes, in_backward=True),
                  WorkspaceOperator(7, "aten.bmm.default", ((2, 3, 4), (2, 4, 5)), in_backward=True),
                  WorkspaceOperator(9, "aten.mm.default", PRODUCT.shapes, stream=77))  # fmt: skip
    assert [(one.row, one.requested_bytes, one.stream, one.until_row) for one in found] == [
        (1, SMALL, 0, None), (6, SMALL, 0, None), (10, SMALL, 77, None),
    ]  # fmt: skip
    assert {one.source_text for one in found} == {CUBLAS}


def test_since_2_15_every_call_has_its_own():
    found = added(LINEAR, PRODUCT, PRODUCT, version="2.15.0+cu132")
    assert [(one.row, one.requested_bytes, one.until_row) for one in found] == [(1, LT, 1), *[(4, SMALL, 4)] * 2]
    assert [one.source_text for one in found] == [CUBLASLT, CUBLAS, CUBLAS]
    cached = added(LINEAR, PRODUCT, version="2.15.0", TORCH_CUBLAS_WORKSPACE_CACHE="1")
    assert [(one.row, one.requested_bytes, one.until_row) for one in cached] == [(1, SMALL, None)]


def test_2_11_has_two_workspaces():
    assert [one.requested_bytes for one in added(LINEAR, version="2.11.0")] == [SMALL, LT]
    assert [one.requested_bytes for one in added(PRODUCT, version="2.11.0")] == [SMALL]
    unified = added(LINEAR, version="2.11.0", TORCH_CUBLASLT_UNIFIED_WORKSPACE="1")
    assert [one.requested_bytes for one in unified] == [SMALL]


def test_2_10_calls_cublas_for_one_row_and_does_not_limit_the_other():
    """As the allocator's history of 2.10.0 had it, on a simulated GPU."""
    row = WorkspaceOperator(0, "aten.addmm.default", ((80,), (1, 48), (48, 80)))
    activation = WorkspaceOperator(0, "aten._addmm_activation.default", row.shapes)
    for operator, sizes in ((row, [SMALL]), (activation, [SMALL]), (LINEAR, [SMALL, LT])):
        assert [one.requested_bytes for one in added(operator, version="2.10.0")] == sizes
    assert [one.requested_bytes for one in added(row, version="2.11.0")] == [SMALL, LT]
    for version, sizes in (("2.10.0", [LT]), ("2.11.0", [])):
        assert [one.requested_bytes for one in added(LINEAR, version=version, CUBLAS_WORKSPACE_CONFIG=":0:0")] == sizes


def test_apart_from_each_other_when_asked():
    found = added(LINEAR, PRODUCT, TORCH_CUBLASLT_UNIFIED_WORKSPACE="0", CUBLASLT_WORKSPACE_SIZE="20 MB")
    assert [(one.requested_bytes, one.source_text) for one in found] == [(20 * KiB, CUBLASLT), (SMALL, CUBLAS)]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten.mm.default", ((0, 48), (48, 80))), ("aten.addmm.default", ((80,), (64, 0), (0, 80))),
        ("aten.add.Tensor", ((4,), (4,))), ("aten._int_mm.default", ((32, 32), (32, 32))),
        ("aten.mm.default", ()), ("aten.linear.default", ((4, 5),)),
    ],
)  # fmt: skip
def test_what_calls_no_library_takes_nothing(name, shapes):
    assert added(WorkspaceOperator(0, name, shapes)) == []


def test_the_workspace_comes_after_the_result_except_in_place():
    rows = [
        added(WorkspaceOperator(4, name, ((64, 80), (64, 48), (48, 80))))[0].row
        for name in ("aten.addmm.default", "aten.addmm_.default", "aten.addmm.out")
    ]
    assert rows == [5, 4, 4]
    assert added(WorkspaceOperator(20, "aten.mm.default", PRODUCT.shapes))[0].row == 20, "never beyond the end"


def test_what_only_cudnn_knows_is_in_the_upper_bound():
    operators = [
        WorkspaceOperator(1, WORKSPACE, ((2008, 0),), "uint8"),
        WorkspaceOperator(2, WORKSPACE, ((512, 1),), "uint8"),
    ]
    found = workspaces(births(1024, 768, 216), operators, find("T4"), torch_version="2.13", environment={})
    assert found.low == ()
    assert [(one.row, one.until_row, one.requested_bytes) for one in found.high] == [(1, 1, 2008), (2, 3, 512)]
    assert {one.source_text for one in found.high} == {CUDNN}
    assert "0 to 1.96 KiB more" in found.sources[CUDNN]


def test_what_lies_outside_has_a_name_an_interval_and_a_source():
    card = Card("mine", 8 * GiB, (8, 9), context_bytes=(100 * MiB, 200 * MiB))
    context, step = workspaces(births(), [], card).outside
    assert (context.low_bytes, context.high_bytes, context.name) == (100 * MiB, 200 * MiB, "CUDA context")
    assert (context.source_text, step.high_bytes) == ("as given", 2 * MiB)
    for name in ("T4", "8GiB", "MI300X"):
        assert all(part.source_text and part.name for part in workspaces(births(), [], find(name)).outside)


def test_sources_say_version_and_file():
    found = workspaces(births(1), [PRODUCT], find("H100"), torch_version="2.15.0", environment={})
    assert found.sources[CUBLAS].startswith("32.00 MiB (the default of capability 9), made for each call: PyTorch 2.15")
    asked = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    given = workspaces(births(1), [], find("H100"), torch_version="2.12", environment=asked)
    assert "CUBLAS_WORKSPACE_CONFIG" in given.sources[CUBLAS]


def test_names_are_taken_apart():
    names = ("aten.addmm_.default", "aten::mm.out", "aten._addmm_activation.default", "mm", "aten.mm.dtype")
    assert [base_name(name) for name in names] == ["addmm", "mm", "_addmm_activation", "mm", "mm"]


# --- on the simulated GPU -----------------------------------------------------------------------------------------------

ENVIRONMENTS = {
    "default": {},
    "apart": {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"},
    "shared": {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"},
    "cached": {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"},
    "configured": {"CUBLAS_WORKSPACE_CONFIG": ":4096:1:16:3", "CUBLASLT_WORKSPACE_SIZE": "3000"},
    "none": {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
}
CARDS = {"7.5": "T4", "8.0": "A100", "8.6": "RTX 3090", "9.0": "H100", "10.0": "B200", "12.0": "RTX 5090"}


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("capability", "setting"), [*((capability, "default") for capability in CARDS), *(("9.0", s) for s in ENVIRONMENTS)]
)
def test_the_rules_are_those_of_pytorch(capability, setting):
    """Every call alone and all in a row: the same workspaces at the same place, kept or given back alike."""
    printed = python("-m", "blas_calls", gpu={"capability": capability}, **ENVIRONMENTS[setting])
    measured = json.loads(printed.splitlines()[-1])
    wanted = {}
    for name, operators in {**{name: [call] for name, call in CALLS.items()}, KEPT: list(CALLS.values())}.items():
        noted = [WorkspaceOperator(index, *facts) for index, call in enumerate(operators) for facts in call[1]]
        found = workspaces(births(*[1] * len(operators)), noted, find(CARDS[capability]),
                       torch_version=torch.__version__, environment=ENVIRONMENTS[setting]).low  # fmt: skip
        wanted[name] = [[one.row - 1, one.requested_bytes, one.until_row is None] for one in found]
    assert measured == wanted
