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
MOST = "most_nonzero"
"""Where that of a mask which indices wrote keeps how many of its elements are nonzero at most (`values.most_nonzero`)."""
COUNT = "count_nonzero"
"""Where that of a mask keeps how many were assumed: who reads it again, as backward does, gets the same."""
PARTS = "parts"
"""Where that of a tensor keeps how many of its elements were assumed to equal a number, by view and number."""
PART = "part"
"""Where that of a mask keeps of which view it is such a part, of what number, and how many elements there are."""
_storage = TensorBase.untyped_storage


def of(tensor: Any) -> tuple[Any, Any]:
    """The bounds of each element of a fake CUDA tensor; None where nothing is known."""
    found: tuple[Any, Any] = _storage(tensor).__dict__.get(KEY, (None, None))
    return found


def forget(tensor: Any) -> None:
    """Its values have changed."""
    kept = _storage(tensor).__dict__
    for one in (KEY, MOST, COUNT, PARTS, PART):
        kept.pop(one, None)


def part(mask: Any, tensor: Any, number: float) -> None:
    """Record that a mask is where a tensor equals a number: what equals others is elsewhere, as the tokens of experts are."""
    if mask.numel() == tensor.numel():
        views = _storage(tensor).__dict__.setdefault(PARTS, {})
        found = views.setdefault((tensor.storage_offset(), tensor.shape, tensor.stride()), {})
        _storage(mask).__dict__[PART] = found, number, tensor.numel()


def room(mask: Any) -> int | None:
    """How many elements of a mask may be nonzero beside those that were assumed of other numbers; None if that is not known."""
    found, number, count = _storage(mask).__dict__.get(PART, (None, 0, 0))
    return None if found is None else max(count - sum(one for of, one in found.items() if of != number), 0)


def settle(mask: Any, count: int) -> None:
    """Record how many elements of a mask, which is all of its storage, were assumed to be nonzero."""
    kept = _storage(mask).__dict__
    kept[COUNT] = count
    if PART in kept:
        found, number, _ = kept[PART]
        found[number] = count


def _bound(out: Any, least: int, most: int) -> None:
    if is_fake(out) and most >= least:
        _storage(out).__dict__[KEY] = least, most


def _length(tensor: Any, dim: int | None) -> int:
    """The number of elements along a dimension, or of all."""
    return int(tensor.numel() if dim is None else tensor.shape[dim] if tensor.dim() else 1)


def _index(func: Any, args: Any, out: Any) -> None:
    """Along a dimension, or of all elements."""
    _bound(out, 0, _length(args[0], args[1] if len(args) > 1 else None) - 1)


def _indices(at: int) -> Callable[..., None]:
    """The second result along a dimension, which is the argument at this place."""
    return lambda func, args, out: _bound(out[1], 0, _length(args[0], args[at] if len(args) > at else -1) - 1)


def _random(func: Any, args: Any, out: Any) -> None:
    """(high), (high, shape) or (low, high, shape)."""
    numbers = [one for one in args if isinstance(one, int)]
    _bound(out, numbers[0] if len(numbers) > 1 else 0, numbers[-1] - 1)


def _count(func: Any, args: Any, out: Any) -> None:
    """How many are not zero, of all or along dimensions; a sum is that of booleans."""
    if is_fake(args[0]) and ("sum" not in func.name() or args[0].dtype is torch.bool):
        _bound(out, 0, args[0].numel() // max(out.numel(), 1))


def _one_of(func: Any, args: Any, out: Any) -> None:
    """The largest or smallest of some."""
    if is_fake(args[0]) and KEY in _storage(args[0]).__dict__:
        _bound(out, *of(args[0]))


HOOKS: dict[Any, Callable[..., None]] = {
    func: hook
    for hook, names in (
        (_index, ("argmax.default", "argmin.default")),
        (_indices(1), ("max.dim", "min.dim", "median.dim", "mode.default", "cummax.default", "cummin.default", "sort.default")),
        (_indices(2), ("topk.default", "kthvalue.default")),
        # It names its dimension, which is not seen.
        (lambda func, args, out: _bound(out[1], 0, max(args[0].shape, default=1) - 1), ("sort.stable",)),
        (lambda func, args, out: _bound(out, 0, _length(args[0], -1) - 1), ("multinomial.default",)),
        (_random, ("randint.default", "randint.generator", "randint.low", "randint.low_generator", "randperm.default")),
        (_count, ("count_nonzero.default", "count_nonzero.dim_IntList", "sum.default", "sum.dim_IntList")),
        (_one_of, ("max.default", "min.default")),
    )
    for func in operators(names)
}  # fmt: skip
"""What to record after an operator."""
