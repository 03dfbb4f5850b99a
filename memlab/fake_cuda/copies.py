"""Copies between the host and the GPU, between GPUs and on one: what they make, and what is held on the GPU meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from memlab.fake_cuda import deferred_init, gpus, sparse, values
from memlab.fake_cuda.data_dependent import has_data, looks_like, on_host, to_gpu
from memlab.fake_cuda.kernel_rules import bytes_of, rule
from memlab.fake_cuda.reductions import by_stride
from memlab.fake_cuda.tensors import is_fake

PEERS = "the GPUs reach each other's memory (peer access)"


def lie_alike(target: Any, source: Any) -> bool:
    """Whether one copy of bytes does: both dense, in the same order of dimensions (Copy.cu, `iter.is_contiguous()`)."""
    strides = source.expand(target.shape).stride()
    pairs = [one for one in zip(target.shape, target.stride(), strides, strict=True) if one[0] != 1]
    expected = 1
    for size, stride in by_stride((size, stride) for size, stride, _ in pairs):
        if stride != expected:
            return False
        expected *= size
    return all(stride == other for _, stride, other in pairs)


def _hold_temporaries(cuda: Any, target: Any, source: Any, non_blocking: bool) -> None:
    """Dense copies on the GPU: where a copy changes the dtype or the layout (ATen/native/cuda/Copy.cu, copy_kernel_cuda)."""
    same_dtype = target.dtype == source.dtype
    if not target.numel() or (same_dtype and lie_alike(target, source)):
        return
    sizes = []
    if not is_fake(source):  # the host converts unless it must not wait
        if not target.is_contiguous() or (non_blocking and not same_dtype):
            sizes = [target.numel() * (source if non_blocking else target).element_size()]
    else:
        if non_blocking and not same_dtype:
            source = looks_like(source, target.dtype)
            sizes = [bytes_of(source)]
        if not source.expand(target.shape).is_contiguous():
            sizes.append(target.numel() * source.element_size())
    # Of a copy of a copy the first goes when the second is made.
    with cuda.held(*sizes, op="aten.copy_", in_order=True):
        pass


def _note_peers(cuda: Any, target: Any, source: Any) -> None:
    """From one GPU to another no dense copies are made with peer access (ATen/native/cuda/Copy.cu, copy_requires_temporaries)."""
    is_plain = gpus.number_on(target) == gpus.number_on(source)
    if not is_plain and not (target.dtype == source.dtype and lie_alike(target, source)):
        cuda.assume(PEERS)


@rule("_to_copy.default")
def to_copy(cuda, func, tensor, **kwargs):
    """`.to(...)` that copies: to the GPU, on the GPU, or to the host."""
    device, dtype, form = (kwargs.get(name) for name in ("device", "dtype", "memory_format"))
    if tensor.layout is not torch.strided:
        return sparse.to_gpu(cuda, tensor, dtype)
    if is_fake(tensor) and (device is None or device.type == "cuda"):
        out = cuda.op(func, tensor, **{name: kwargs[name] for name in kwargs if name not in ("device", "pin_memory")})
        _note_peers(cuda, out, tensor)
        return out
    out = on_host(cuda, tensor, dtype or tensor.dtype) if is_fake(tensor) else to_gpu(cuda, tensor, dtype, form)
    _hold_temporaries(cuda, looks_like(tensor, out.dtype, form), tensor, bool(kwargs.get("non_blocking")))
    return out


@rule("copy_.default")
def copy_(cuda, func, target, source, non_blocking=False):
    """`target.copy_(source)`, either of them on the host."""
    torch.broadcast_shapes(target.shape, source.shape)
    if is_fake(target) and is_fake(source):
        _note_peers(cuda, target, source)
        values.write(target, values.known(source), values.is_assumed(source))
        return target
    _hold_temporaries(cuda, target, source, non_blocking)
    if not is_fake(target):
        return deferred_init.copied_to(target, on_host(cuda, source, target.dtype))
    values.write(target, source if has_data(source) else None)
    return target
