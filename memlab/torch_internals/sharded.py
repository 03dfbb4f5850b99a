"""Private names of torch.distributed and DeepSpeed: what DTensors wrap, flat buffers, buckets, what stages of a pipeline hold.

Seen in 2.12 and 2.13. They are attributes of instances and methods of classes, and nothing is imported to reach them: what the
user has not loaded has no instances. Where a version lacks one, its buffers have no names and everything else works.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from memlab.torch_internals.replacement import Replacement

_mro: Any = type.__dict__["__mro__"].__get__
_attributes: Any = type.__dict__["__dict__"].__get__

_WRAPPERS = (
    ("torch.distributed.tensor", "DTensor", "_local_tensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "elem"),
)
"""(module, class, slot) of the tensors that have no memory of their own, but wrap that of this rank."""

FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FLAT_PARAMETER = "torch.distributed.fsdp._flat_param"
FSDP_RUNTIME = "torch.distributed.fsdp._runtime_utils"
PIPELINE_STAGE = "torch.distributed.pipelining.stage"
PIPELINE_SCHEDULE = "torch.distributed.pipelining.schedules"
DEEPSPEED_ZERO = "deepspeed.runtime.zero.stage_1_and_2"
DEEPSPEED_ZERO_3 = "deepspeed.runtime.zero.stage3"
WATCHED = (
    (FULLY_SHARD, "FSDPParamGroup", "unshard"),
    (FULLY_SHARD, "FSDPParamGroup", "wait_for_unshard"),
    (FULLY_SHARD, "FSDPParamGroup", "post_backward"),
    (FLAT_PARAMETER, "FlatParamHandle", "unshard"),
    (FSDP_RUNTIME, "", "_reduce_grad"),
    (PIPELINE_STAGE, "_PipelineStageBase", "forward_one_chunk"),
    (PIPELINE_STAGE, "_PipelineStageBase", "backward_one_chunk"),
    (PIPELINE_SCHEDULE, "_PipelineSchedule", "_maybe_compute_loss"),
    (DEEPSPEED_ZERO, "DeepSpeedZeroOptimizer", "_release_ipg_buffers"),
    (DEEPSPEED_ZERO, "DeepSpeedZeroOptimizer", "step"),
    (DEEPSPEED_ZERO_3, "DeepSpeedZeroOptimizer_Stage3", "independent_gradient_partition_epilogue"),
    (DEEPSPEED_ZERO_3, "DeepSpeedZeroOptimizer_Stage3", "step"),
)
"""(module, class, function) that are called when FSDP has gathered parameters, and when it reduces gradients; when a stage of a
pipeline works on a micro-batch; and when ZeRO of DeepSpeed has filled its flat buffers."""

_SUBJECTS: dict[str, Callable[[Any], Any]] = {
    "_reduce_grad": itemgetter(1),  # (state, handle)
    "_PipelineStageBase.forward_one_chunk": itemgetter(0, 1),
    "_PipelineStageBase.backward_one_chunk": itemgetter(0, 1),
    "_PipelineSchedule._maybe_compute_loss": itemgetter(0, 1, 3, 4),  # (schedule, stage, output, targets, micro-batch)
}
"""The arguments of a watched function that say what it is about; of the others it is `self`."""
_SELF = itemgetter(0)


def local_tensor(tensor: Any) -> Any:
    """The tensor of this rank that a DTensor wraps; any other tensor itself."""
    for _ in range(4):  # a DTensor may wrap the result of a collective that is still running
        for module, name, slot in _WRAPPERS:
            wrapper = getattr(sys.modules.get(module), name, None)
            if wrapper is not None and any(base is wrapper for base in _mro(type(tensor))):
                try:
                    tensor = _attributes(wrapper)[slot].__get__(tensor)
                except (AttributeError, KeyError):
                    return tensor
                break
        else:
            break
    return tensor


def is_parameter(tensor: Any) -> bool:
    """Whether a tensor is a parameter: also a DTensor, which only has a mark (`_is_param`) that says so."""
    if any(base is torch.nn.Parameter for base in _mro(type(tensor))):
        return True
    return local_tensor(tensor) is not tensor and getattr(tensor, "_is_param", False) is True


class Wrapped:
    """Functions of `WATCHED` that call `before(name, subject)` and `after(name, subject)` until `restore`.

    `name` is that of `WATCHED`; `subject` is the group of parameters, FSDP1's handle of a flat one, or what `_SUBJECTS` takes.
    """

    def __init__(self, before: Callable[[str, Any], None], after: Callable[[str, Any], None]) -> None:
        self._before, self._after = before, after
        self._replaced: dict[tuple[str, str, str], Replacement] = {}
        self.is_on = True

    def install(self) -> None:
        """Wrap those that are loaded by now and were not before."""
        for place in WATCHED:
            module, holder_name, name = place
            holder = sys.modules.get(module)
            if holder is not None and holder_name:
                holder = getattr(holder, holder_name, None)
            if place in self._replaced or holder is None or not callable(vars(holder).get(name)):
                continue
            ours = self._around(f"{holder_name}.{name}".lstrip("."), vars(holder)[name])
            self._replaced[place] = Replacement(holder, name, ours)
            self._replaced[place].put()

    def restore(self) -> None:
        """Put the originals back; where somebody has wrapped ours meanwhile, it stays and only forwards calls."""
        self.is_on = False
        for one in self._replaced.values():
            one.restore()
        self._replaced.clear()

    def _around(self, name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
        subject_of = _SUBJECTS.get(name, _SELF)

        @functools.wraps(theirs)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or is_dynamo_compiling():
                return theirs(*args, **kwargs)
            try:
                subject = subject_of(args)
            except IndexError:  # given by keyword
                return theirs(*args, **kwargs)
            self._before(name, subject)
            result = theirs(*args, **kwargs)
            self._after(name, subject)
            return result

        return ours


# --- FSDP2: `fully_shard` ---------------------------------------------------------------------------------------------


def modules_of(group: Any) -> tuple[torch.nn.Module, ...]:
    """The modules whose parameters a group gathers together."""
    return tuple(group.modules)


def gathered(group: Any) -> Any:
    """The flat buffer into which all ranks' shards are gathered, None if there is none now."""
    return getattr(group._all_gather_result, "all_gather_output", None)


def whole_parameters(group: Any) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """(module, name, tensor) of the gathered parameters."""
    for one in group.fsdp_params:
        for tensor in (*one.all_gather_outputs, *getattr(one, "_unsharded_inner_tensors", ())):
            yield one._module_info.module, one._module_info.param_name, tensor


def whole_gradients(group: Any) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """(module, name, tensor) of the gradients before they are reduced."""
    for one in group.fsdp_params:
        whole = getattr(one, "_unsharded_param", None)
        for tensor in (whole.grad if whole is not None else None, one.unsharded_accumulated_grad):
            if tensor is not None:
                yield one._module_info.module, one._module_info.param_name, tensor


def being_reduced(group: Any) -> Any:
    """The flat buffer of gradients that is being reduced, None if there is none now."""
    states = getattr(group.comm_ctx, "reduce_scatter_states", None)  # a list since 2.13
    state = states[-1] if states else getattr(group.comm_ctx, "reduce_scatter_state", None)
    return getattr(state, "reduce_scatter_input", None)


def reduced_gradients(group: Any) -> Iterator[Any]:
    """The gradients of this rank's shards."""
    for one in group.fsdp_params:
        if one.sharded_param.grad is not None:
            yield one.sharded_param.grad


# --- FSDP1: FullyShardedDataParallel -----------------------------------------------------------------------------------


def module_of(handle: Any) -> torch.nn.Module:
    """The module whose parameters a flat one holds."""
    module: torch.nn.Module = handle._fully_sharded_module
    return module


def whole_flat_parameter(handle: Any) -> Iterator[Any]:
    """The gathered flat parameter, and this rank's shard of it in a lower precision."""
    for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
        tensor = getattr(handle.flat_param, name, None)
        if tensor is not None:
            yield tensor


def flat_gradients(handle: Any) -> Iterator[Any]:
    """The gradient of the flat parameter: the whole one before it is reduced, then this rank's shard."""
    for tensor in (handle.flat_param.grad, getattr(handle.flat_param, "_saved_grad_shard", None)):
        if tensor is not None:
            yield tensor


# --- stages of a pipeline ----------------------------------------------------------------------------------------------


def received_activations(stage: Any, chunk: int) -> Iterator[Any]:
    """What a stage has received of a micro-batch, or will receive, from the stage before."""
    yield from _buffers(stage.args_recv_info.get(chunk))


def received_gradients(stage: Any, chunk: int) -> Iterator[Any]:
    """The same from the stage after it: gradients of what this one has sent."""
    yield from _buffers(stage.grad_recv_info.get(chunk))


def gradients_to_send(stage: Any, chunk: int) -> Iterator[Any]:
    """The gradients that the backward of a stage has made for the stage before."""
    yield from (one for one in stage.bwd_cache.get(chunk) or () if isinstance(one, torch.Tensor))


def losses_of(schedule: Any) -> Iterator[Any]:
    """The loss of the last micro-batch that has one."""
    yield from schedule._internal_losses[-1:]


def _buffers(received: Any) -> Iterator[Any]:
    yield from (one.buffer for one in received or () if getattr(one, "buffer", None) is not None)


# --- DeepSpeed ----------------------------------------------------------------------------------------------------------

GRADIENTS_OF_ZERO = ("ipg_buckets", "grads_in_partition", "averaged_gradients", "grad_partitions_flat_buffer")
"""Attributes of DeepSpeed's ZeRO optimizers (seen in 0.19) with flat buffers of gradients: buckets, and this rank's part."""
PARAMETERS_OF_ZERO = ("bit16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer")
"""The same with flat buffers of parameters."""


def flat_buffers(optimizer: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(attribute, tensor) of the flat buffers that an optimizer of DeepSpeed has now."""
    for name in names:
        for tensor in _tensors_in(getattr(optimizer, name, None)):
            yield name, tensor


def _tensors_in(thing: Any, depth: int = 3) -> Iterator[Any]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif depth and isinstance(thing, list | tuple):
        for one in thing:
            yield from _tensors_in(one, depth - 1)
    elif depth and isinstance(thing, dict):
        for one in thing.values():
            yield from _tensors_in(one, depth - 1)
    elif depth and thing is not None and (buffer := getattr(thing, "buffer", None)) is not None:  # a bucket
        yield from _tensors_in(buffer, depth - 1)


# --- DistributedDataParallel -------------------------------------------------------------------------------------------


def data_parallel_modules() -> list[Any]:
    """Every DistributedDataParallel that is alive; the heap is walked only where there is a process group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    return [one for one in gc.get_objects() if _is_data_parallel(one)]


def _is_data_parallel(thing: Any) -> bool:
    parallel = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    return parallel is not None and any(base is parallel for base in _mro(type(thing)))


def bucket_bytes(module: Any) -> tuple[int, ...] | None:
    """The sizes of the buckets that hold copies of a module's gradients; None for any other module.

    Nothing of Python's references them. () if the gradients themselves lie in the buckets.
    """
    if not _is_data_parallel(module):
        return None
    facts = module._get_ddp_logging_data()
    return () if facts.get("gradient_as_bucket_view") else (*_sizes(facts, ""), *_sizes(facts, "rebuilt_"))


@dataclass(frozen=True, slots=True)
class HiddenBuckets:
    """Buckets of a DistributedDataParallel that C++ alone may hold: sizes of the first, and of those that replaced them.

    There are no rebuilt ones until the second forward, and this is known one step late. If gradients lie in the buckets, their
    tensors live as long, from the first backward on: `live_sizes` are those of all storages but parameters'.
    """

    module: weakref.ref[Any]
    first: tuple[int, ...]
    rebuilt: tuple[int, ...]
    live_sizes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, module: Any, live: Iterable[Any] = ()) -> HiddenBuckets:
        """Those of a module now; `live` are all tensors."""
        facts = module._get_ddp_logging_data()
        sizes = frozenset[int]()
        if facts.get("gradient_as_bucket_view"):
            own = {one.untyped_storage().data_ptr() for one in module.parameters()}
            storages = [one.untyped_storage() for one in live if type(one) is torch.Tensor and one.is_cpu]
            sizes = frozenset(one.nbytes() for one in storages if one.data_ptr() not in own)
        return cls(weakref.ref(module), _sizes(facts, ""), _sizes(facts, "rebuilt_"), sizes)


def _sizes(facts: dict[str, Any], kind: str) -> tuple[int, ...]:
    return tuple(int(size) for size in str(facts.get(f"{kind}bucket_sizes", "")).split(",") if size.strip().isdigit())
