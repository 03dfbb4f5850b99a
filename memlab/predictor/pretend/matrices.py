"""Operands that cuBLAS cannot read as they lie: copied for the call.

(ATen/native/cuda/Blas.cpp, prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas.) The workspaces of cuBLAS itself
are in `memlab.predictor.extras`.
"""

from __future__ import annotations

from typing import Any

from memlab.predictor.pretend.rules import rule

FIRST_OPERAND = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_addmm_activation": 1, "addbmm": 1}


def is_readable(matrix: Any) -> bool:
    """Whether cuBLAS can be told where the rows or columns of the last two dimensions lie."""
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    if (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows)):
        return True
    return bool(matrix.is_contiguous())


@rule(
    "aten.mm.default",
    "aten.bmm.default",
    "aten.addmm.default",
    "aten.baddbmm.default",
    "aten._addmm_activation.default",
)
def multiply(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """The product, then copies of what cannot be read (those of expanded gradients, mostly)."""
    first = FIRST_OPERAND[func._schema.name.rpartition("::")[2]]
    out = run.op(func, *args, **kwargs)
    left, right = args[first], args[first + 1]
    if is_readable(left) and is_readable(right):
        return out
    sizes = [one.numel() * one.element_size() for one in (left, right) if not is_readable(one)]
    run.scratch(*sizes, op="aten.contiguous")
    return out


@rule("aten._grouped_mm.default")
def grouped(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Rows in multiples of 16 bytes (ATen/native/GroupedMMUtils.h, create_grouped_gemm_output_tensor)."""
    left, right = args[0], args[1]
    offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
    columns = right.shape[-1]
    if left.dim() == 2 and right.dim() == 2:
        shape: tuple[int, ...] = (offsets.shape[0], left.shape[0], columns)
    elif left.dim() == 2:
        shape = (left.shape[0], columns)
    else:
        shape = (left.shape[1], columns) if right.dim() == 2 else (*left.shape[:2], columns)
    dtype = kwargs.get("out_dtype") or left.dtype
    step = 16 // dtype.itemsize
    row = -(-columns // step) * step
    stride = (row * shape[-2], row, 1)[-len(shape) :]
    return run.empty(shape, dtype, stride, op=func)
