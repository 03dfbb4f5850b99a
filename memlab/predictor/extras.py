"""What libraries take beside the tensors of a program: workspaces inside PyTorch's allocator, and the rest of the device.

`extras(...)` turns the operators that a pretend run noted into allocations to be inserted before the trace is settled. The
rules for cuBLAS are those of ATen's CublasHandlePool.cpp and Blas.cpp; `tests/predictor/test_extras.py` compares them with
the CUDA builds of PyTorch 2.11, 2.12, 2.14 and 2.15 on a pretend device, where they are exact.

Limits: what cuDNN takes for a convolution follows from plans that only cuDNN knows: nothing in `low`, a bound in `high`. Of
ROCm's workspaces only PyTorch's source was read. 2.13 had no CUDA build to compare with and is taken as 2.12 and 2.14 are.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from memlab.allocator.replay import Extra
from memlab.predictor.cards import Card
from memlab.trace.columns import WORKSPACE_OF, Category, Events, Kind
from memlab.units import KiB, MiB, format_bytes

CUBLAS = f"{WORKSPACE_OF}cuBLAS"
CUBLASLT = f"{WORKSPACE_OF}cuBLASLt"
CUDNN = f"{WORKSPACE_OF}cuDNN"

_DEFAULT = (2 * 4096 + 8 * 16) * KiB
_DEFAULT_LARGE = 8 * 4096 * KiB
"""`:4096:2:16:8` and 32 MiB; the latter for capability 9, since 2.12 also for 10 and 12 (pytorch#175344)."""
_DEFAULT_LT_KIB = 1024
_ROCM_DEFAULT = 32 * MiB
_ROCM_DEFAULT_MI300 = 128 * MiB
_ROCM_DEFAULT_LT_KIB = 76 * 1024
_DRIVER_STEP = 2 * MiB


class Noted(Protocol):
    """An operator as the pretend run notes it."""

    @property
    def row(self) -> int:
        """The row of the first event after it was called."""
        ...

    @property
    def name(self) -> str:
        """As "aten.addmm.default"."""
        ...

    @property
    def stream(self) -> int:
        """The stream it ran on."""
        ...

    @property
    def in_backward(self) -> bool:
        """Whether autograd's engine ran it: on CUDA that is a thread with handles of its own."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of its tensors, in the order of its arguments."""
        ...

    @property
    def dtype(self) -> str:
        """Of its first tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of interest: its tensors' shapes in the order of its arguments, who ran it, where."""

    row: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    in_backward: bool = False
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Outside:
    """Memory of the device that PyTorch's allocator does not hold: an interval, and how that is known."""

    low_bytes: int
    high_bytes: int
    source_text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Extras:
    """What is to be added to a prediction: to settle with `low` and with `high` brackets what cannot be foretold.

    `sources` says for the name of every extra what it is and how that is known.
    """

    low: tuple[Extra, ...]
    high: tuple[Extra, ...]
    outside: tuple[Outside, ...]
    sources: Mapping[str, str] = field(default_factory=dict)


def extras(
    events: Events,
    operators: Iterable[Noted],
    card: Card,
    *,
    torch_version: str = "",
    environment: Mapping[str, str] | None = None,
) -> Extras:
    """The extras of a pretend run: `events` are its rows, `operators` what it noted, in order."""
    noted = list(operators)
    version = str(torch_version or torch.__version__)
    rules = BlasRules.of(card, version, os.environ if environment is None else environment)
    blas = tuple(_blas(events, noted, rules))
    bounds = tuple(_convolutions(events, noted))
    sources = {CUBLAS: rules.source, CUBLASLT: rules.source}
    if bounds:
        largest = format_bytes(max(extra.requested_bytes for extra in bounds))
        sources[CUDNN] = (
            f"0 to {largest} for a convolution: cuDNN chooses; at most its tensors once more (change of layout), as a bound"
        )
    return Extras(blas, tuple(sorted((*blas, *bounds), key=lambda extra: extra.row)), _outside(card), sources)


def _outside(card: Card) -> tuple[Outside, ...]:
    low, high = card.context_bytes
    step = "cudaMalloc hands out whole pages of 2 MiB and may refuse the last one"
    return Outside(low, high, card.context_source, "CUDA context"), Outside(0, _DRIVER_STEP, step, "driver's pages")


# --- cuBLAS ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlasRules:
    """How large the workspaces are and how long they live, for a card, a version of PyTorch and an environment.

    `is_kept`: made once for each thread's handle and stream and never given back (2.14 and before; later only with
    TORCH_CUBLAS_WORKSPACE_CACHE=1), else made for each call. `is_shared`: cuBLASLt uses cuBLAS's. `lt_takes_both`: in
    2.11 a call of cuBLASLt makes cuBLAS's workspace too.
    """

    workspace_bytes: int
    lt_bytes: int
    is_kept: bool
    is_shared: bool
    lt_takes_both: bool
    source: str

    @classmethod
    def of(cls, card: Card, torch_version: str, environment: Mapping[str, str]) -> BlasRules:
        """The rules of CublasHandlePool.cpp as of a version of PyTorch ("2.12.1+cu130")."""
        version = _version(torch_version)
        rocm = card.backend == "rocm"
        default = _rocm_default(card) if rocm else _default(card, version)
        size, lt_kib = _configured(environment, default, rocm), _ROCM_DEFAULT_LT_KIB if rocm else _DEFAULT_LT_KIB
        asked_unified = _switch(environment, "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
        unified = (asked_unified is True if version < (2, 12) else asked_unified is not False) and not rocm
        asked_cache = _switch(environment, "TORCH_CUBLAS_WORKSPACE_CACHE")
        lt_bytes = _leading_number(environment.get("CUBLASLT_WORKSPACE_SIZE"), lt_kib) * KiB
        if version < (2, 12) and asked_unified is not False:  # 2.11 bounds it by the other, and still makes its own
            lt_bytes = min(lt_bytes, size)
        kept = version < (2, 15) or (asked_cache is not False if rocm else asked_cache is True)
        return cls(
            workspace_bytes=size,
            lt_bytes=lt_bytes,
            is_kept=kept,
            is_shared=unified and kept,
            lt_takes_both=version < (2, 12) and not unified,
            source=_source(size, default, kept, card, version),
        )


def _default(card: Card, version: tuple[int, int]) -> int:
    large = (9,) if version < (2, 12) else (9, 10, 12)
    return _DEFAULT_LARGE if card.compute_capability[0] in large else _DEFAULT


def _rocm_default(card: Card) -> int:
    return _ROCM_DEFAULT_MI300 if card.compute_capability in ((9, 4), (9, 5)) else _ROCM_DEFAULT


def _configured(environment: Mapping[str, str], default: int, rocm: bool) -> int:
    names = ("CUBLAS_WORKSPACE_CONFIG", *(("HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG") if rocm else ()))
    text = next((environment[name] for name in names if name in environment), "")
    pairs = re.findall(r":(\d+):(\d+)", text)
    return sum(int(kib) * int(count) for kib, count in pairs) * KiB if pairs else default


def _switch(environment: Mapping[str, str], name: str) -> bool | None:
    """An environment variable as c10::utils::check_env reads it: "0", "1", and anything else is as if it were not set."""
    return {"0": False, "1": True}.get(environment.get(name, ""))


def _leading_number(text: str | None, default: int) -> int:
    match = re.match(r"\s*\+?(\d+)", text or "")
    return int(match[1]) if match else default


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (2, 12)


def _source(size: int, default: int, kept: bool, card: Card, version: tuple[int, int]) -> str:
    life = "kept for each thread and stream" if kept else "made for each call"
    whose = f"the default of capability {card.compute_capability[0]}" if size == default else "CUBLAS_WORKSPACE_CONFIG"
    return f"{format_bytes(size)} ({whose}), {life}: PyTorch {version[0]}.{version[1]}, aten/src/ATen/cuda/CublasHandlePool.cpp"


_GEMMS = frozenset(("mm", "bmm", "baddbmm", "addmm", "addmv", "mv", "dot", "vdot", "addbmm", "linear", "matmul"))
_LT_ONLY = frozenset(("_addmm_activation", "_scaled_mm"))
_MATRIX_AT = {"addmm": 1, "_addmm_activation": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
"""Which argument is the first factor; for the others it is the first argument."""
_NO_LT = ("complex64", "complex128", "complex32")


def _blas(events: Events, operators: Sequence[Noted], rules: BlasRules) -> Iterator[Extra]:
    made: set[tuple[str, bool, int]] = set()
    for operator in operators:
        row = _after_outputs(operator, len(events))
        for name, size, calls in _takes(operator, rules):
            key = (name, operator.in_backward, operator.stream)
            if not size or (rules.is_kept and key in made):
                continue
            made.add(key)
            until = None if rules.is_kept else row
            for _ in range(1 if rules.is_kept else calls):
                yield Extra(row, size, operator.stream, until, Category.OTHER, name)


def _takes(operator: Noted, rules: BlasRules) -> Iterator[tuple[str, int, int]]:
    """Workspaces that a call needs: whose, how large, how many times one after the other."""
    name = base_name(operator.name)
    if name not in _GEMMS | _LT_ONLY or _is_empty(name, operator.shapes):
        return
    is_lt = _uses_lt(name, operator)
    calls = operator.shapes[1][0] if name == "addbmm" else 1
    if not is_lt or rules.is_shared or rules.lt_takes_both:
        yield CUBLAS, rules.workspace_bytes, calls
    if is_lt and not rules.is_shared:
        yield CUBLASLT, rules.lt_bytes, calls


def _uses_lt(name: str, operator: Noted) -> bool:
    """isInputCompliesAddmmCudaLt (ATen/native/cuda/Blas.cpp): a bias in one row, both factors wider than one."""
    if name in _LT_ONLY:
        return True
    if name == "linear":
        if len(operator.shapes) < 3:
            return False
        factor, weight, bias = operator.shapes[:3]
        inner, outer = factor[-1], weight[0] if len(weight) == 2 else 1
    elif name == "addmm":
        bias, _, second = operator.shapes[:3]
        inner, outer = second
    else:
        return False
    in_one_row = math.prod(bias) == bias[-1] == outer if bias else False
    return in_one_row and inner > 1 and outer > 1 and operator.dtype.removeprefix("torch.") not in _NO_LT


def _is_empty(name: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether there is nothing to multiply: then no library is called."""
    factors = shapes[_MATRIX_AT.get(name, 0) :][:2]
    return len(factors) < 2 or any(0 in shape for shape in factors)


def base_name(name: str) -> str:
    """The name of an operator without namespace, overload and the mark of working in place.

    >>> base_name("aten.addmm_.default"), base_name("aten::mm.out"), base_name("aten._addmm_activation.default")
    ('addmm', 'mm', '_addmm_activation')
    """
    parts = name.replace("::", ".").split(".")
    plain = parts[1] if len(parts) > 1 else parts[0]
    return plain.rstrip("_")


def _after_outputs(operator: Noted, rows: int, outputs: int = 1) -> int:
    """The row before which a workspace is made: libraries are called when the result has its memory."""
    parts = operator.name.replace("::", ".").split(".")
    in_place = parts[-1] == "out" or (len(parts) > 1 and parts[1].endswith("_"))
    return min(operator.row + (0 if in_place else outputs), rows)


# --- cuDNN -----------------------------------------------------------------------------------------------------------------

_CONVOLUTIONS = {"convolution": 1, "_convolution": 1, "cudnn_convolution": 1, "convolution_backward": 2}
"""Operator -> calls of cuDNN, each of which has one result: the gradients of input and of weight are two."""


def _convolutions(events: Events, operators: Sequence[Noted]) -> Iterator[Extra]:
    """The most that a convolution takes for a while: its tensors once more, for a change of layout (NCHW to NHWC)."""
    for operator in operators:
        calls = _CONVOLUTIONS.get(base_name(operator.name), 0)
        if not calls or not operator.shapes:
            continue
        width = _element_bytes(operator.dtype)
        arguments = sum(math.prod(shape) for shape in operator.shapes) * width
        for call in range(calls):
            row = _after_outputs(operator, len(events), call + 1)
            if bound := arguments + _born_bytes(events, row - 1):
                yield Extra(row, bound, operator.stream, row, Category.TEMPORARY, CUDNN)


def _born_bytes(events: Events, row: int) -> int:
    is_birth = 0 <= row < len(events) and events.kind[row] == Kind.ALLOC
    return int(events.requested_bytes[row]) if is_birth else 0


def _element_bytes(dtype: str) -> int:
    found: Any = getattr(torch, dtype.removeprefix("torch."), None)
    return found.itemsize if isinstance(found, torch.dtype) else 4
