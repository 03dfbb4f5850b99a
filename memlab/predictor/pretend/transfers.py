"""Copies between the host and the card, and the mixtures of both that CUDA refuses."""

from __future__ import annotations

from typing import Any

import torch

from memlab.predictor.pretend import answers, blanks
from memlab.predictor.pretend.rules import operator
from memlab.predictor.pretend.tensors import META, PretendTensor, is_pretend
from memlab.seams.dispatch import TensorBase


def to_copy(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`.to(...)` that copies: to the card, on the card, or to the host."""
    tensor, device = args[0], kwargs.get("device")
    if is_pretend(tensor):
        if device is None or device.type == "cuda":
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            return run.op(func, tensor, **kwargs)
        return answers.on_host(tensor, kwargs, run)
    return to_card(tensor, kwargs, run)


def to_card(tensor: Any, kwargs: Any, run: Any) -> Any:
    """A host tensor, copied to the card."""
    memory_format = kwargs.get("memory_format")
    dtype = kwargs.get("dtype") or tensor.dtype
    looks = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    like = torch.empty_like(looks, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    made = run.empty(like.shape, dtype, like.stride(), _TO_COPY)
    if not blanks.is_blank(tensor):
        answers.know(made, tensor)
    return made


def copy_(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`target.copy_(source)`, either of them on the host."""
    target, source = args[0], args[1]
    if is_pretend(target):
        torch.broadcast_shapes(target.shape, source.shape)
        answers.forget(target)
        if not is_pretend(source) and target.shape == source.shape and not blanks.is_blank(source):
            answers.know(target, source)
        return target
    return target.copy_(answers.on_host(source, {"dtype": target.dtype}, run))


def check_devices(func: Any, args: Any) -> None:
    """Refuse host tensors of more than one number among those of the card, as CUDA does."""
    if func in _MIXED:
        return
    for one in args:
        if type(one) is list:
            check_devices(func, one)
        elif isinstance(one, torch.Tensor) and not isinstance(one, PretendTensor) and one.dim() and not _is_meta(one):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(when checking arguments of {func})"
            )


def _is_meta(tensor: Any) -> bool:
    return bool(TensorBase.is_meta.__get__(tensor))


_TO_COPY = torch.ops.aten._to_copy.default
RULES: dict[Any, Any] = {
    _TO_COPY: to_copy,
    torch.ops.aten.copy_.default: copy_,
}
_MIXED = {
    one
    for one in map(
        operator,
        (
            "aten._foreach_copy_.default", "aten.index_put_.default", "aten._index_put_impl_.default",
            "aten.set_.source_Storage_storage_offset", "aten.index_put.default",
        ),
    )
    if one is not None
}  # fmt: skip
