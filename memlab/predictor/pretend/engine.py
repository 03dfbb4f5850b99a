"""What autograd's engine and its formulas do in place on CUDA tensors, and out of place on tensors of Python classes.

C++ asks `isTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) and then spares such tensors from operators in place. Pretend
tensors must be treated as what they stand for, or every residual connection would show one gradient too many.

Limits: with create_graph=True both sides work out of place. Where a formula is not known here, it is taken out of place.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from memlab.predictor.pretend.reductions import is_dense
from memlab.predictor.pretend.rules import rule
from memlab.seams.dispatch import TensorBase

current_node = torch._C._current_autograd_node
storage_use_count = torch._C._storage_Use_Count

TENSOR_HELD, STORAGE_HELD = 4, 2
"""References to a gradient and to its storage that only the engine holds, seen from a rule: its own, those of the way
through Python, and for the storage that of the Python object by which it is watched. 2.11 to 2.15; `selftest` notices others."""

ADDING = frozenset(("Atan2Backward0",))
"""Nodes whose formulas add results of their own out of place."""

FORMULAS_IN_PLACE = {
    "BinaryCrossEntropyWithLogitsBackward0": ("aten.sub.Tensor", "aten.mul.Tensor"),
}
"""Formulas of torch/csrc/autograd/FunctionsManual.cpp whose operators are in place unless a tensor is subclass-like."""

NOT_FRESH = ("IndexPut", "Scatter", "IndexCopy", "IndexFill", "MaskedScatter", "Put", "IndexAdd")
"""Nodes whose formulas apply these operators to the incoming gradient, which stays as it is."""


def in_engine() -> bool:
    """Whether C++ of the engine or of its formulas asks, and not Python that a node runs (custom functions, hooks)."""
    if current_node() is None or torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("memlab."):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"  # torch/autograd/graph.py


def is_last_reference(tensor: Any) -> bool:
    """Whether nothing but the caller's arguments holds the storage of a tensor, and it is dense."""
    if tensor._use_count() > TENSOR_HELD:
        return False
    return bool(storage_use_count(TensorBase.untyped_storage(tensor)._cdata) <= STORAGE_HELD and is_dense(tensor))


@rule("aten.add.Tensor")
def add(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The engine adds into the gradient that came first (torch/csrc/autograd/input_buffer.cpp, accumulate)."""
    if not kwargs and _is_accumulation(args) and in_engine() and current_node().name() not in ADDING:
        return run.op(torch.ops.aten.add_.Tensor, *args)
    return run.op(func, *args, **kwargs)


def _is_accumulation(args: Any) -> bool:
    first, second = args[0], args[1]
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return current_node() is not None and is_last_reference(first)


def is_filled_in_place(tensor: Any) -> bool:
    """Whether a formula would go on in place: it runs, on zeros of its own."""
    if current_node() is None or not in_engine() or current_node().name().startswith(NOT_FRESH):
        return False
    return bool(storage_use_count(TensorBase.untyped_storage(tensor)._cdata) <= STORAGE_HELD)


@rule("aten.scatter_add.default", "aten.scatter.src", "aten.scatter.value", "aten.index_add.default")
def into_zeros(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Formulas of gather, index_select, max, sort, topk: zeros of their own, filled in place (FunctionsManual.cpp)."""
    return args[0] if is_filled_in_place(args[0]) else run.op(func, *args, **kwargs)


@rule("aten.sub.Tensor", "aten.mul.Tensor")
def formulas(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Formulas that go on in place with a result of their own."""
    node = current_node()
    if (
        node is not None
        and str(func) in FORMULAS_IN_PLACE.get(node.name(), ())
        and in_engine()
        and is_last_reference(args[0])
    ):
        return args[0]
    return run.op(func, *args, **kwargs)
