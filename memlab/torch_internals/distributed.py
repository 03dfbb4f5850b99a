"""What the prediction of one rank of a job takes from torch.distributed's inside: `private_names.DISTRIBUTED` has the names."""

from __future__ import annotations

from typing import Any

import torch

from memlab.torch_internals.private_names import private

ScriptObject: Any = torch.ScriptObject
"""What operators get in the place of a process group and of other C++ objects."""
PIPELINES = "torch.distributed.pipelining.stage"
"""Costly to import: programs that have stages have loaded it."""


def __getattr__(name: str) -> Any:
    """Names of modules that are costly to import, and needed by distributed programs only."""
    if name not in _NAMES:
        raise AttributeError(name)
    return private(_NAMES[name])


_NAMES = {
    "c10d": "torch.distributed.distributed_c10d",
    "device_mesh": "torch.distributed.device_mesh",
    "FakeStore": "torch.testing._internal.distributed.fake_pg.FakeStore",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "DTensor": "torch.distributed.tensor.DTensor",
    "pipeline_stage": PIPELINES,
    "FSDPParam": "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "FSDPParamGroup": "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
}


def is_group(thing: Any) -> bool:
    """Whether an operator's argument is a process group."""
    return str(thing._type()).endswith("c10d.ProcessGroup")


def unboxed(thing: Any) -> Any:
    """The process group of an operator's argument."""
    return private("torch._C._distributed_c10d.ProcessGroup.unbox")(thing)


def group_of(name: str) -> Any:
    """The process group of this name, None if there is none."""
    try:
        return private("torch.distributed.distributed_c10d._resolve_process_group")(name)
    except (RuntimeError, ValueError):
        return None


def finished(results: list[torch.Tensor]) -> Any:
    """The handle of a collective that has finished with these results, as operators return it."""
    future: Any = torch.futures.Future()
    future.set_result(results)
    return private("torch._C._distributed_c10d._create_work_from_future")(future).boxed()


def current_backward() -> int:
    """The number of the backward that runs in this thread, -1 outside of backward."""
    return int(private("torch._C._current_graph_task_id")())
