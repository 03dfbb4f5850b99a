"""DTensor and FSDP on fake CUDA tensors, which they would take for meta tensors, and what FSDP2's CUDA kernels allocate.

The kernels are those of aten/src/ATen/native/cuda/TensorShape.cu (2.12): each copies a table of addresses to the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memlab.fake_cuda.kernel_rules import LONG, rule
from memlab.fake_cuda.patches import Patches, constant, nothing
from memlab.fake_cuda.reductions import is_dense, threads_per_multiprocessor
from memlab.fake_cuda.tensors import State
from memlab.torch_internals import distributed
from memlab.torch_internals.cuda_names import _disable_current_modes
from memlab.torch_internals.objects import fsdp_module, fsdp_name, fsdp_shard, local_part, local_part_or

_BLOCK, _TILE = 128, 128 * 16
"""Threads of a block, and the bytes that it copies at a time."""


def shard(patches: Patches) -> None:
    """Patch DTensor and FSDP; they are imported here, as only distributed programs need them."""
    propagator, dtensor, group = distributed.ShardingPropagator, distributed.DTensor, distributed.FSDPParamGroup
    derive, base = propagator._propagate_tensor_meta_non_cached, torch.Tensor.device
    parameter = distributed.FSDPParam
    reset = parameter.reset_sharded_param

    def outside_of_modes(self: Any, schema: Any) -> Any:
        """DTensor derives the shape of a result by fake tensors of its own."""
        with _disable_current_modes():
            return derive(self, schema)

    def reset_sharded_param(shard: Any) -> None:
        """FSDP2 pads an uneven shard once, unless its tensor was replaced, which it tells of plain tensors only."""
        now = getattr(fsdp_module(shard), fsdp_name(shard))
        if now is shard.sharded_param and not shard.pin_memory:
            address, other = (one.untyped_storage().data_ptr() for one in (fsdp_shard(shard), local_part(now)))
            if address == other > 0:
                return
        reset(shard)

    def device(tensor: Any) -> Any:
        local = local_part_or(tensor)
        return base.__get__(tensor) if local is None else local.device

    patches.put(propagator, _propagate_tensor_meta_non_cached=outside_of_modes)
    patches.put(group, _validate_no_meta_params=nothing)
    patches.put(parameter, reset_sharded_param=reset_sharded_param)
    patches.put(dtensor, is_cuda=property(lambda tensor: device(tensor).type == "cuda"))
    patches.put(dtensor, is_meta=property(lambda tensor: device(tensor).type == "meta"))
    patches.put(dtensor, device=property(device))
    patches.put_where_present(torch._C, _get_accelerator=constant(torch.device("cuda")))  # the default mesh's device


def follow_resizes(cuda: Any, patches: Patches) -> None:
    """Storages that are resized: FSDP frees and refills its buffers so, which no operator reports."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        storage = resize(storage, size)
        if State.active is not None and storage.device.type == "meta":
            State.active.log.resized(storage, storage.nbytes(), "storage.resize_", None)
        return storage

    patches.put(torch.UntypedStorage, resize_=resize_)


@rule("_c10d_functional::_wrap_tensor_autograd.default")
def wait_later(cuda, func, tensor):
    """The result of a collective, which is waited for when it is used: the same storage."""
    return cuda.op(torch.ops.aten.alias.default, tensor)


@rule("fsdp::split_with_sizes_copy.default")
def split_with_sizes_copy(cuda, func, gathered, sizes, dim=0, *, out):
    """Parameters out of what was gathered: the table has three entries a split, one a block, and the first blocks."""
    if is_dense(gathered) and all(is_dense(one) and one.dtype == gathered.dtype for one in out):
        unit = gathered.stride(dim) * gathered.element_size()
        chunks = math.prod(gathered.shape[:dim])
        threads = threads_per_multiprocessor(tuple(cuda.gpu.compute_capability))
        resident = cuda.gpu.multiprocessors * threads // _BLOCK * 2
        factor = -(-sum(-(-size * unit // _TILE) for size in sizes) * chunks // resident)
        times = -(-factor // min(math.ceil(math.sqrt(factor)), chunks)) if factor else 1
        blocks = sum(-(-size * unit // (_TILE * times)) for size in sizes)
        cuda.scratch((4 * len(sizes) + 1 + blocks) * LONG, op=func)


@rule("fsdp::chunk_cat.default")
def chunk_cat(cuda, func, tensors, dim, num_chunks, *, out):
    """Gradients before they are reduced: the table has six entries a tensor, one a block, and two ends."""
    if all(map(is_dense, tensors)):
        rows = [-(-one.shape[dim] // num_chunks) * math.prod(one.shape[dim + 1 :]) for one in tensors]
        blocks = sum(-(-size * out.element_size() // _TILE) for size in rows)
        cuda.scratch((6 * len(rows) + 2 + blocks) * LONG, op=func)
