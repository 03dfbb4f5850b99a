"""What values read as that nobody computed, and shapes that depend on them.

Values that are known stay known: small tensors copied from the host, and what follows from them alone. An unknown value
reads as 1 (True): it divides, repeats and masks without doing harm, and a mask then keeps everything, which is the most that
it can keep. Tests for infinities and nan read as if all were finite. Shapes that depend on values are the largest possible.
Each is an assumption of the prediction.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memlab.predictor.pretend import blanks, searches
from memlab.predictor.pretend.rules import operator
from memlab.predictor.pretend.tensors import PretendTensor, is_pretend
from memlab.seams.dispatch import TensorBase

MOST_NUMBERS, MOST_FLOATS = 65536, 64
"""Tensors of more elements do not keep their values."""

READ = "a value of a CUDA tensor was read: it was taken as 1 (True)"
COPIED = "the values of a CUDA tensor were copied to the host: they were taken as 1 (True)"
FINITE = "a test for infinities or nan was taken as passed"
LARGEST = "{}: its shape depends on values, the largest possible was taken"


# --- values that are known --------------------------------------------------------------------------------------------


def know(tensor: Any, source: Any) -> None:
    """A pretend tensor has the values of this one on the host."""
    most = MOST_FLOATS if source.dtype.is_floating_point or source.dtype.is_complex else MOST_NUMBERS
    if source.numel() <= most and source.layout == torch.strided:
        tensor.__dict__["known"] = (source.detach().to(tensor.dtype, copy=True), _version(tensor))


def _version(tensor: Any) -> int:
    """How often it was changed; inference tensors do not count."""
    return -1 if tensor.is_inference() else int(tensor._version)


def forget(tensor: Any) -> None:
    """Its values have changed."""
    tensor.__dict__.pop("known", None)


def known(tensor: Any) -> Any:
    """The values of a pretend tensor on the host, None where nobody knows."""
    found = tensor.__dict__.get("known")
    return found[0] if found is not None and found[1] == _version(tensor) else None


def follow(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """If all that went in is known, what came out is known as well."""
    if not is_pretend(out) or out is args[0] or func in _NEVER_KNOWN or torch.Tag.nondeterministic_seeded in func.tags:
        if is_pretend(out) and out is args[0]:
            forget(out)
        return
    if out.numel() > MOST_NUMBERS:
        return
    try:
        host_kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        values = func(*_known_args(args), **_known_args(host_kwargs))
        out.__dict__["known"] = (values, _version(out))
    except Exception:  # an argument that is not known, or an operator that the host lacks: then it is unknown
        return


class _Unknown(Exception):
    pass


def _known_args(value: Any) -> Any:
    if is_pretend(value):
        found = known(value)
        if found is None:
            raise _Unknown
        return found
    if isinstance(value, list | tuple):
        return type(value)(_known_args(one) for one in value)
    if isinstance(value, dict):
        return {name: _known_args(one) for name, one in value.items()}
    return value


# --- reading ------------------------------------------------------------------------------------------------------------


def item(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`.item()`, `bool(...)`, `if tensor:`."""
    tensor = args[0]
    values = known(tensor)
    if values is not None:
        return func(values)
    searched = searches.answer(tensor, run)
    if searched is not None:
        return searched
    verdict = tensor.__dict__.get("verdict")
    if verdict is not None:
        run.assume(FINITE)
        return verdict
    run.assume(READ)
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else complex(1) if tensor.dtype.is_complex else 1


def on_host(tensor: Any, kwargs: Any, run: Any) -> Any:
    """A pretend tensor copied to the host."""
    dtype = kwargs.get("dtype") or tensor.dtype
    values = known(tensor)
    if values is not None:
        return values.to(dtype, copy=True)
    run.assume(COPIED)
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype) if tensor.is_contiguous() else None
    return blanks.filled(torch.empty(tensor.shape, dtype=dtype) if out is None else out, 1)


def equal(func: Any, args: Any, kwargs: Any, run: Any) -> bool:
    """`torch.equal`, `torch.allclose`."""
    run.assume(READ)
    return bool(args[0].shape == args[1].shape)


# --- tests for infinities and nan -----------------------------------------------------------------------------------------


def judged(verdict: bool) -> Any:
    """Comparisons whose result is a verdict on finiteness, if a tensor is compared with itself or with infinity."""

    def after(func: Any, args: Any, out: Any, run: Any) -> None:
        if (is_pretend(args[1]) and args[1] is args[0]) or (isinstance(args[1], float) and math.isinf(args[1])):
            out.__dict__["verdict"] = verdict

    return after


def passed_on(func: Any, args: Any, out: Any, run: Any) -> None:
    """Operators whose result has the verdict of what went in: any, all, and, or, not."""
    verdicts = [one.__dict__["verdict"] for one in args if is_pretend(one) and "verdict" in one.__dict__]
    if verdicts and is_pretend(out):
        value = all(verdicts) if func in _CONJUNCTIONS else any(verdicts)
        out.__dict__["verdict"] = not value if func in _NEGATIONS else value


def infinite(func: Any, args: Any, out: Any, run: Any) -> None:
    """`torch.isinf`, `torch.isnan`: operators of their own for the backend."""
    out.__dict__["verdict"] = False


# --- shapes that depend on values -----------------------------------------------------------------------------------------


def nonzero(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Indices of what is not zero: of everything, unless the values are known."""
    tensor = args[0]
    values = known(tensor)
    count = int(values.count_nonzero()) if values is not None else tensor.numel()
    if values is None:
        run.assume(LARGEST.format("nonzero, a boolean mask"))
    # CUDA makes it as (dimensions, found) and gives the transpose (aten/src/ATen/native/cuda/Nonzero.cu).
    out = run.empty((tensor.dim(), count), torch.int64, op=func).t()
    if values is not None:
        out.__dict__["known"] = (torch.ops.aten.nonzero.default(values), _version(out))
    return out


def index(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`x[mask]`: masks become indices, as on CUDA."""
    return run.op(func, args[0], _without_masks(args[1], run), *args[2:], **kwargs)


def _without_masks(indices: Any, run: Any) -> list[Any]:
    out: list[Any] = []
    for one in indices:
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            found = (one if is_pretend(one) else run.to_card(one)).nonzero()
            out += [found.select(1, dim) for dim in range(one.dim())]
        elif one is not None and not is_pretend(one):
            out.append(run.to_card(one))  # IndexingUtils.h: indices of the host are copied to the card
        else:
            out.append(one)
    return out


def index_put(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`x[mask] = y`."""
    return run.op(func, args[0], _without_masks(args[1], run), *args[2:], **kwargs)


def masked_select(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """As an index by the mask, broadcast (aten/src/ATen/native/cuda/IndexKernel.cpp)."""
    tensor, mask = torch.broadcast_tensors(args[0], args[1])
    return tensor[mask]


def _unique(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    run.assume(LARGEST.format("unique"))
    tensor = args[0]
    flat = (tensor.numel(),)
    return run.empty(flat, tensor.dtype, op=func), *(run.empty(flat, torch.int64, op=func) for _ in range(2))


def _unique_dim(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    run.assume(LARGEST.format("unique"))
    tensor, dim = args[0], args[1]
    length = (tensor.shape[dim],)
    return run.empty(tensor.shape, tensor.dtype, op=func), *(run.empty(length, torch.int64, op=func) for _ in range(2))


def _repeat_interleave(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    size = kwargs.get("output_size")
    values = known(args[0])
    if size is None and values is None:
        run.assume("repeat_interleave: its shape depends on values, every count was taken as 1")
    count = size if size is not None else int(values.sum()) if values is not None else args[0].numel()
    return run.empty((count,), args[0].dtype, op=func)


def _bincount(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    values = known(args[0])
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if values is None:
        run.assume("bincount: its length depends on values, minlength was taken")
    count = max(least, int(values.max()) + 1 if values is not None and values.numel() else least, 1)
    return run.empty((count,), torch.int64 if len(args) < 2 or args[1] is None else torch.float64, op=func)


_aten = torch.ops.aten
_CONJUNCTIONS = {
    _aten.mul.Tensor,
    _aten.all.default,
    _aten._is_all_true.default,
    _aten.logical_and.default,
    _aten.bitwise_and.Tensor,
}
_NEGATIONS = {_aten.logical_not.default, _aten.bitwise_not.default}
_NEVER_KNOWN = {_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default}
_TABLE = {
    "aten._local_scalar_dense.default": item,
    "aten.equal.default": equal,
    "aten.allclose.default": equal,
    "aten.nonzero.default": nonzero,
    "aten.index.Tensor": index,
    "aten.index_put_.default": index_put,
    "aten._index_put_impl_.default": index_put,
    "aten.index_put.default": index_put,
    "aten.masked_select.default": masked_select,
    "aten._unique2.default": _unique,
    "aten.unique_consecutive.default": _unique,
    "aten.unique_dim.default": _unique_dim,
    "aten.unique_dim_consecutive.default": _unique_dim,
    "aten.repeat_interleave.Tensor": _repeat_interleave,
    "aten.bincount.default": _bincount,
}
_VERDICTS = {
    "aten.le.Scalar": searches.compared,
    "aten.gt.Scalar": searches.compared,
    "aten.lt.Scalar": searches.compared,
    "aten.ne.Tensor": judged(False),
    "aten.eq.Tensor": judged(True),
    "aten.eq.Scalar": judged(False),
    "aten.ne.Scalar": judged(True),
    "aten.isinf.default": infinite,
    "aten.isnan.default": infinite,
    "aten.any.default": passed_on,
    "aten._is_any_true.default": passed_on,
    "aten._is_all_true.default": passed_on,
    "aten.all.default": passed_on,
    "aten.mul.Tensor": passed_on,
    "aten.logical_and.default": passed_on,
    "aten.logical_or.default": passed_on,
    "aten.logical_not.default": passed_on,
    "aten.bitwise_not.default": passed_on,
    "aten.bitwise_and.Tensor": passed_on,
    "aten.bitwise_or.Tensor": passed_on,
}
AFTER = {func: after for name, after in _VERDICTS.items() if (func := operator(name)) is not None}
"""What is noted of a result."""
RULES = {func: rule for name, rule in _TABLE.items() if (func := operator(name)) is not None}

__all__ = ["RULES", "PretendTensor", "TensorBase", "follow", "forget", "know", "known", "on_host"]
