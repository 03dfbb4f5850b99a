"""Memory of libraries in addition to a program's tensors: workspaces in PyTorch's allocator, and the rest of the device.

`workspaces(...)` turns the operators logged by a dry run into allocations to be inserted before the trace is simulated. The
rules for cuBLAS are those of ATen's CublasHandlePool.cpp and Blas.cpp; `tests/prediction/test_workspaces.py` compares them with
the CUDA builds of PyTorch 2.11 to 2.15 on a simulated GPU, where they are exact; 2.10, whose builds are for CUDA 12, was compared
on one that was adapted to it.

Limits: cuDNN's workspace depends on plans that only cuDNN knows: the lowest in `low`, a bound in `high` (`fake_cuda` has both); so
does cuSPARSE's for a product of a sparse and a dense matrix.
ROCm's workspaces are only known from PyTorch's source.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab.allocator.private_pools import stream_of
from memlab.allocator.replay import Workspace
from memlab.allocator.rules import release
from memlab.fake_cuda.convolution_workspaces import WORKSPACE
from memlab.fake_cuda.sparse_operators import PRODUCT
from memlab.prediction.cards import Card
from memlab.trace.columns import WORKSPACE_OF, Category, Events
from memlab.units import GiB, KiB, MiB, format_bytes, number_of

CUBLAS = f"{WORKSPACE_OF}cuBLAS"
CUBLASLT = f"{WORKSPACE_OF}cuBLASLt"
CUDNN = f"{WORKSPACE_OF}cuDNN"
CUSPARSE = f"{WORKSPACE_OF}cuSPARSE"
NCCL = "NCCL"
_UNKNOWN = {
    CUDNN: "more for a layer: cuDNN chooses; a bound that follows layers measured on an H200",
    CUSPARSE: "for a product with a sparse matrix: only cuSPARSE knows; its operands once more, as a bound",
}
_NCCL_MOST = 2 * GiB
_NCCL_SOURCE = (
    "{}, each with buffers of 0 to 2 GiB: 544 to 688 MB were reported on A100 (nccl#964), 6 GB of three (nccl#864)"
)

_DEFAULT = (2 * 4096 + 8 * 16) * KiB
_DEFAULT_LARGE = 8 * 4096 * KiB
"""`:4096:2:16:8` and 32 MiB; the latter for capability 9, since 2.12 also for 10 and 12 (pytorch#175344)."""
_DEFAULT_LT_KIB = 1024
_ROCM_DEFAULT = 32 * MiB
_ROCM_DEFAULT_MI300 = 128 * MiB
_ROCM_DEFAULT_LT_KIB = 76 * 1024


@dataclass(frozen=True, slots=True)
class WorkspaceOperator:
    """An operator that calls a library: `shapes` are those of its tensors in order, `dtype` that of the first.

    `row` is the row of the first event after the call. In backward, autograd's thread with its own handles ran it. `stream` says
    which private pool it is in, too.
    """

    row: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    in_backward: bool = False
    stream: int = 0


@dataclass(frozen=True, slots=True)
class WorkspacePart:
    """Memory other than the program's tensors: what it is, its range, and the source."""

    name: str
    low_bytes: int
    high_bytes: int
    source_text: str


@dataclass(frozen=True, slots=True)
class Workspaces:
    """What is added to a prediction: `low` in the best case, `high` in the worst; `outside` PyTorch's allocator.

    `sources` maps the name of every workspace to a description and its source.
    """

    low: tuple[Workspace, ...]
    high: tuple[Workspace, ...]
    outside: tuple[WorkspacePart, ...]
    sources: Mapping[str, str] = field(default_factory=dict)


def workspaces(
    events: Events,
    operators: Iterable[WorkspaceOperator],
    card: Card,
    *,
    torch_version: str = "",
    environment: Mapping[str, str] | None = None,
    communicators: int = 0,
    cleared: Sequence[tuple[int, int]] = (),
) -> Workspaces:
    """The workspaces of a dry run: `events` are its rows, `operators` the logged operators, in order.

    `communicators` is the number of process groups between GPUs; `cleared` has (row, stream) where the workspaces of a
    stream went, as with a CUDA graph that was captured on it.
    """
    noted = list(operators)
    version = str(torch_version or torch.__version__)
    rules = BlasRules.of(card, version, os.environ if environment is None else environment)
    blas = tuple(_blas(events, noted, rules, cleared))
    bounds = tuple(_bounds(noted, len(events)))
    sources = {CUBLAS: rules.source, CUBLASLT: rules.source}
    for whose, why in _UNKNOWN.items():
        if sizes := [extra.requested_bytes for extra in bounds if extra.source_text == whose]:
            sources[whose] = f"0 to {format_bytes(max(sizes))} {why}"
    pages = "cudaMalloc hands out whole pages of 2 MiB and may refuse the last one"
    outside: tuple[WorkspacePart, ...] = (
        WorkspacePart("CUDA context", *card.context_bytes, card.context_source),
        WorkspacePart("driver's pages", 0, 2 * MiB, pages),
    )
    if communicators:
        source = _NCCL_SOURCE.format(number_of(communicators, "communicator"))
        outside = (*outside, WorkspacePart(NCCL, 0, communicators * _NCCL_MOST, source))
    return Workspaces(blas, tuple(sorted((*blas, *bounds), key=lambda extra: extra.row)), outside, sources)


# --- cuBLAS ---


@dataclass(frozen=True, slots=True)
class BlasRules:
    """The sizes and lifetimes of workspaces, for a card, a version of PyTorch and an environment.

    `is_kept`: made once for each thread's handle and stream and never freed (2.14 and before; later only with
    TORCH_CUBLAS_WORKSPACE_CACHE=1), else made for each call. `is_shared`: cuBLASLt uses cuBLAS's. `lt_takes_both`: in
    2.10 and 2.11 a call of cuBLASLt makes cuBLAS's workspace too. `lt_least_rows`: 2.10
    calls cuBLASLt for two rows or more.
    """

    workspace_bytes: int
    lt_bytes: int
    is_kept: bool
    is_shared: bool
    lt_takes_both: bool
    lt_least_rows: int
    source: str

    @classmethod
    def of(cls, card: Card, torch_version: str, environment: Mapping[str, str]) -> BlasRules:
        """The rules of CublasHandlePool.cpp as of a version of PyTorch ("2.12.1+cu130")."""
        version = release(torch_version)
        rocm, major = card.backend == "rocm", card.compute_capability[0]
        names = ["CUBLAS_WORKSPACE_CONFIG"]
        if rocm:
            default = _ROCM_DEFAULT_MI300 if card.compute_capability in ((9, 4), (9, 5)) else _ROCM_DEFAULT
            names += ["HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG"]
        else:
            default = _DEFAULT_LARGE if major in ((9,) if version < (2, 12) else (9, 10, 12)) else _DEFAULT
        text = next((environment[name] for name in names if name in environment), "")
        pairs = re.findall(r":(\d+):(\d+)", text)
        size = sum(int(kib) * int(count) for kib, count in pairs) * KiB if pairs else default
        unified = _switch(environment, "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
        cache = _switch(environment, "TORCH_CUBLAS_WORKSPACE_CACHE")
        number = re.match(r"\s*\+?(\d+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
        lt_kib = int(number[1]) if number else _ROCM_DEFAULT_LT_KIB if rocm else _DEFAULT_LT_KIB
        lt_bytes = lt_kib * KiB
        is_unified = not rocm and (unified is True if version < (2, 12) else unified is not False)
        if not rocm and version < (2, 12) and (unified or (unified is None and version == (2, 11))):
            lt_bytes = min(lt_bytes, size)  # 2.11 limits it by the other, and still makes its own
        kept = version < (2, 15) or (cache is not False if rocm else cache is True)
        life = "kept for each thread and stream" if kept else "made for each call"
        whose = f"the default of capability {major}" if size == default else names[0]
        file = f"PyTorch {version[0]}.{version[1]}, aten/src/ATen/cuda/CublasHandlePool.cpp"
        return cls(
            workspace_bytes=size,
            lt_bytes=lt_bytes,
            is_kept=kept,
            is_shared=is_unified and kept,
            lt_takes_both=version < (2, 12) and not is_unified,
            lt_least_rows=2 if version < (2, 11) else 1,
            source=f"{format_bytes(size)} ({whose}), {life}: {file}",
        )


def _switch(environment: Mapping[str, str], name: str) -> bool | None:
    """An environment variable as c10::utils::check_env reads it: "0", "1", and anything else counts as not set."""
    return {"0": False, "1": True}.get(environment.get(name, ""))


_GEMMS = frozenset(("mm", "bmm", "baddbmm", "addmm", "addmv", "mv", "dot", "vdot", "addbmm", "linear", "matmul"))
_LT_ONLY = frozenset(("_addmm_activation", "_scaled_mm"))
_MATRIX_AT = {"addmm": 1, "_addmm_activation": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
"""Which argument is the first factor; for the others it is the first argument."""
_NO_LT = ("complex64", "complex128", "complex32")


def _blas(
    events: Events, operators: Sequence[WorkspaceOperator], rules: BlasRules, cleared: Sequence[tuple[int, int]]
) -> Iterator[Workspace]:
    made: dict[tuple[str, bool, int], float] = {}  # until which row
    for operator in operators:
        name, shapes = base_name(operator.name), operator.shapes
        factors = shapes[_MATRIX_AT.get(name, 0) :][:2]
        is_empty = len(factors) < 2 or any(0 in shape for shape in factors)  # then no library is called
        if name not in _GEMMS | _LT_ONLY or is_empty:
            continue
        rows = math.prod(factors[0][:-1])
        is_lt = name == "_scaled_mm" or (rows >= rules.lt_least_rows and _uses_lt(name, operator))
        wanted = []
        if not is_lt or rules.is_shared or rules.lt_takes_both:
            wanted.append((CUBLAS, rules.workspace_bytes))
        if is_lt and not rules.is_shared:
            wanted.append((CUBLASLT, rules.lt_bytes))
        # Libraries are called after the result is allocated, if it is a new one.
        parts = operator.name.replace("::", ".").split(".")
        is_in_place = parts[-1] == "out" or (len(parts) > 1 and parts[1].endswith("_"))
        row = min(operator.row + (not is_in_place), len(events))
        calls = shapes[1][0] if name == "addbmm" else 1
        for whose, size in wanted:
            key = (whose, operator.in_backward, stream_of(operator.stream))
            if not size or (rules.is_kept and operator.row < made.get(key, 0)):
                continue
            until: int | None = row
            if rules.is_kept:
                until = next((there for there, stream in cleared if stream == key[2] and there >= row), None)
            made[key] = math.inf if until is None else until
            for _ in range(1 if rules.is_kept else calls):  # one after the other
                yield Workspace(row, size, operator.stream, until, Category.OTHER, whose)


def _uses_lt(name: str, operator: WorkspaceOperator) -> bool:
    """isInputCompliesAddmmCudaLt (ATen/native/cuda/Blas.cpp): a one-dimensional bias, both factors wider than one."""
    if name == "_addmm_activation":
        return True
    if name == "linear" and len(operator.shapes) >= 3:
        factor, weight, bias = operator.shapes[:3]
        inner, outer = factor[-1], weight[0] if len(weight) == 2 else 1
    elif name == "addmm":
        bias, _, second = operator.shapes[:3]
        inner, outer = second
    else:
        return False
    in_one_row = math.prod(bias) == bias[-1] == outer if bias else False
    return in_one_row and inner > 1 and outer > 1 and operator.dtype.removeprefix("torch.") not in _NO_LT


def base_name(name: str) -> str:
    """The name of an operator without namespace, overload and in-place suffix: "addmm" of "aten.addmm_.default"."""
    parts = name.replace("::", ".").split(".")
    return parts[len(parts) > 1].rstrip("_")


# --- cuDNN and cuSPARSE ---


def _bounds(operators: Sequence[WorkspaceOperator], rows: int) -> Iterator[Workspace]:
    """What convolutions and recurrent layers may take beyond what is in the trace, and products with a sparse matrix.

    The latter at most the elements of both operands once more.
    """
    for operator in operators:
        row, tensors = min(operator.row, rows), 0
        if operator.name == WORKSPACE:
            ((bound, tensors),) = operator.shapes
        elif operator.name == PRODUCT:
            found: Any = getattr(torch, operator.dtype, torch.float32)
            bound = sum(map(math.prod, operator.shapes)) * found.itemsize
        else:
            continue
        if bound:
            whose, until = CUDNN if operator.name == WORKSPACE else CUSPARSE, min(row + tensors, rows)
            yield Workspace(row, bound, operator.stream, until, Category.TEMPORARY, whose)
