"""What autograd's engine and its formulas do in place on CUDA tensors, but out of place on tensor subclasses.

C++ checks `isTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) and then avoids in-place operators. Fake CUDA tensors must
be treated like CUDA tensors, or every residual connection would show one gradient too many. The condition is the engine's
own (torch/csrc/autograd/input_buffer.cpp, accumulate): dense, and referenced by nobody else.

Limits: with create_graph=True both sides work out of place. Unknown formulas are assumed to work out of place.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from memlab.fake_cuda.kernel_rules import rule
from memlab.fake_cuda.reductions import is_dense
from memlab.torch_internals.cuda_names import storage_use_count, tensor_use_count
from memlab.torch_internals.dispatch import current_autograd_node as current_node

TENSOR_HELD, STORAGE_HELD = 4, 2
"""References to a gradient and to its storage that only the engine holds, seen from a rule: its own, those of the way
through Python, and for the storage that of the Python object by which it is watched. 2.11 to 2.15; `selftest` notices others."""

ADDING = ("Atan2Backward0", "VarMeanBackward0", "StdMeanBackward0")
"""Nodes whose formulas add results of their own out of place."""
NOT_FRESH = ("IndexPut", "Scatter", "IndexCopy", "IndexFill", "MaskedScatter", "Put", "IndexAdd")
"""Nodes whose formulas apply these operators to the incoming gradient, which stays as it is."""


def _runs_in_engine() -> bool:
    """Whether the caller is C++ (the engine or a formula), and not Python run by a node (custom functions, hooks)."""
    if torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("memlab."):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"  # torch/autograd/graph.py


def _is_last_reference(tensor: Any) -> bool:
    """Whether a tensor is dense and only the caller's arguments hold its storage."""
    if tensor_use_count(tensor) > TENSOR_HELD or storage_use_count(tensor) > STORAGE_HELD:
        return False
    return is_dense(tensor)


def is_filled_in_place(tensor: Any) -> bool:
    """Whether a formula would continue in place: it is running, on its own zeros."""
    node = current_node()
    if node is None or node.name().startswith(NOT_FRESH) or storage_use_count(tensor) > STORAGE_HELD:
        return False
    return _runs_in_engine()


@rule("add.Tensor")
def add(cuda, func, first, second, **kwargs):
    """The engine adds into the first gradient."""
    node = current_node()
    if (
        node is not None and not kwargs and isinstance(second, torch.Tensor)
        and first.shape == second.shape and first.dtype == second.dtype
        and _is_last_reference(first) and _runs_in_engine() and node.name() not in ADDING
    ):  # fmt: skip
        func = torch.ops.aten.add_.Tensor
    return cuda.op(func, first, second, **kwargs)


@rule("scatter_add.default", "scatter.src", "scatter.value", "index_add.default", "put.default")
def into_zeros(cuda, func, tensor, *args, **kwargs):
    """Formulas of gather, index_select, max, sort, take, topk: zeros of their own, filled in place (FunctionsManual.cpp)."""
    return tensor if is_filled_in_place(tensor) else cuda.op(func, tensor, *args, **kwargs)


@rule("sub.Tensor", "mul.Tensor")
def in_formulas(cuda, func, first, second, **kwargs):
    """The formula of binary_cross_entropy_with_logits continues in place on its own result (FunctionsManual.cpp).

    With a `pos_weight` it is one expression of several calls, whose temporaries hold the result until its end.
    """
    node = current_node()
    is_formula = node is not None and node.name() == "BinaryCrossEntropyWithLogitsBackward0"
    if is_formula and _runs_in_engine() and (hasattr(first, "is_of_formula") or _is_last_reference(first)):
        first.is_of_formula = True
        return first
    return cuda.op(func, first, second, **kwargs)
