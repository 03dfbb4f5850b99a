"""Private names of torch.distributed: what DTensors wrap, the flat buffers of FSDP, the buckets of DistributedDataParallel.

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
WATCHED = (
    (FULLY_SHARD, "FSDPParamGroup", "unshard"),
    (FULLY_SHARD, "FSDPParamGroup", "wait_for_unshard"),
    (FULLY_SHARD, "FSDPParamGroup", "post_backward"),
    (FLAT_PARAMETER, "FlatParamHandle", "unshard"),
    (FSDP_RUNTIME, "", "_reduce_grad"),
)
"""(module, class, function) that are called when FSDP has gathered parameters, and when it reduces gradients."""


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
    """Functions of FSDP that call `before(name, subject)` and `after(name, subject)` until `restore`.

    `name` is that of `WATCHED`; `subject` is the group of parameters, or FSDP1's handle of a flat one.
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
        # The subject is `self`; of `_reduce_grad(state, handle)` it is the second.
        place = 0 if "." in name else 1

        @functools.wraps(theirs)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or is_dynamo_compiling() or len(args) <= place:
                return theirs(*args, **kwargs)
            self._before(name, args[place])
            result = theirs(*args, **kwargs)
            self._after(name, args[place])
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
