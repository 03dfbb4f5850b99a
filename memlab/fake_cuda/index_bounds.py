"""Bounds of integers that only a GPU computes: the index of one of n elements is 0 to n - 1, a count of booleans 0 to n.

They belong to the storage, as known values do (`values`), so views have them; a write forgets them, and copies have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memlab.fake_cuda.kernel_rules import operators
from memlab.fake_cuda.tensors import is_fake
from memlab.torch_internals.dispatch import TensorBase

KEY = "index_bounds"
"""Where a storage keeps them."""
_storage = TensorBase.untyped_storage


def of(tensor: Any) -> tuple[Any, Any]:
    """The bounds of each element of a fake CUDA tensor; None where nothing is known."""
    found: tuple[Any, Any] = _storage(tensor).__dict__.get(KEY, (None, None))
    return found


def forget(tensor: Any) -> None:
    """Its values have changed."""
    _storage(tensor).__dict__.pop(KEY, None)


def _bound(out: Any, least: int, most: int) -> None:
    if is_fake(out) and most >= least:
        _storage(out).__dict__[KEY] = least, most


def _length(tensor: Any, dim: int | None) -> int:
    """The number of elements along a dimension, or of all."""
    return int(tensor.numel() if dim is None else tensor.shape[dim] if tensor.dim() else 1)


def _index(func: Any, args: Any, out: Any) -> None:
    """argmax, argmin: along a dimension, or of all elements."""
    _bound(out, 0, _length(args[0], args[1] if len(args) > 1 else None) - 1)


def _indices(func: Any, args: Any, out: Any) -> None:
    """The second result along a dimension: (tensor, dim), or (tensor, k, dim); a sort that is stable names its own."""
    place = 2 if func in _WITH_NUMBER else 1
    if func in _STABLE:
        _bound(out[1], 0, max(args[0].shape, default=1) - 1)
    else:
        _bound(out[1], 0, _length(args[0], args[place] if len(args) > place else -1) - 1)


def _samples(func: Any, args: Any, out: Any) -> None:
    _bound(out, 0, _length(args[0], -1) - 1)


def _random(func: Any, args: Any, out: Any) -> None:
    """(high), (high, shape) or (low, high, shape)."""
    numbers = [one for one in args if isinstance(one, int)]
    _bound(out, numbers[0] if len(numbers) > 1 else 0, numbers[-1] - 1)


def _count(func: Any, args: Any, out: Any) -> None:
    """How many are not zero, of all or along dimensions; a sum is that of booleans."""
    if is_fake(args[0]) and (func in _COUNTS or args[0].dtype is torch.bool):
        _bound(out, 0, args[0].numel() // max(out.numel(), 1))


def _one_of(func: Any, args: Any, out: Any) -> None:
    """The largest or smallest of some."""
    if is_fake(args[0]) and KEY in _storage(args[0]).__dict__:
        _bound(out, *of(args[0]))


_WITH_NUMBER = operators(("topk.default", "kthvalue.default"))
_STABLE = operators(("sort.stable",))
_COUNTS = operators(("count_nonzero.default", "count_nonzero.dim_IntList"))
HOOKS: dict[Any, Callable[..., None]] = {
    **dict.fromkeys(operators(("argmax.default", "argmin.default")), _index),
    **dict.fromkeys(
        operators(
            ("max.dim", "min.dim", "median.dim", "mode.default", "cummax.default", "cummin.default", "sort.default")
        ),
        _indices,
    ),
    **dict.fromkeys(_WITH_NUMBER | _STABLE, _indices),
    **dict.fromkeys(operators(("multinomial.default",)), _samples),
    **dict.fromkeys(
        operators(("randint.default", "randint.generator", "randint.low", "randint.low_generator", "randperm.default")),
        _random,
    ),
    **dict.fromkeys(_COUNTS | operators(("sum.default", "sum.dim_IntList")), _count),
    **dict.fromkeys(operators(("max.default", "min.default")), _one_of),
}
"""What to record after an operator."""
