"""One rank of a distributed job on the fake GPU, without the others.

PyTorch's own code shards, gathers and reduces, over process groups in which nobody else is: collectives finish at once and
move no values. What ProcessGroupNCCL allocates for some of them is added. `ThisRank` says which rank of how many it is.

Limits: all ranks are assumed to hold what this one holds; values that come from others are unknown.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from memlab.errors import PredictionError
from memlab.fake_cuda import pipelines, sharding
from memlab.fake_cuda.gpus import State
from memlab.fake_cuda.kernel_rules import bytes_of, flat, rule
from memlab.fake_cuda.patches import Patches, constant, nothing
from memlab.torch_internals import distributed
from memlab.torch_internals.dispatch import TensorBase
from memlab.torch_internals.objects import schema_of
from memlab.trace.columns import Kind

ALONE = "the other ranks are not there: each is assumed to hold what this one holds, and their values are unknown"
HOW = 'pass world_size=8 to memlab.predict, or --nproc-per-node 8 to "memlab predict"'


@dataclass(frozen=True, slots=True)
class ThisRank:
    """Which process this is of a distributed job, and how many run on its machine.

    `stages` has the outputs of those stages of a pipeline that other ranks sent on: (shape, stride, dtype, requires_grad) of each.
    """

    rank: int
    world_size: int
    local_world_size: int
    stages: Mapping[int, Any] = field(default_factory=dict, compare=False)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun sets for a process."""
        node, local_rank = divmod(self.rank, self.local_world_size)
        numbers = {
            "RANK": self.rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size, "GROUP_RANK": node, "ROLE_RANK": self.rank,
            "GROUP_WORLD_SIZE": -(-self.world_size // self.local_world_size), "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_PORT": 29500, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        }  # fmt: skip
        texts = {"MASTER_ADDR": socket.gethostname(), "TORCHELASTIC_RUN_ID": "memlab"}
        return {name: str(number) for name, number in numbers.items()} | texts

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ThisRank | None:
        """The process that these variables describe, None if they do not."""
        try:
            rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_WORLD_SIZE", min(size, 8)))
        except (KeyError, ValueError):
            return None
        return cls(rank, size, local) if 0 <= rank < size and 0 < local <= size else None


class Groups:
    """The process groups of the fake GPU: the sizes of NCCL's communicators by name, and who differs.

    `is_batched` is on while several sends are one, `is_eager` if groups connect when they are made. `peers` are the ranks of
    groups in which something was sent from one rank to another: a pipeline, whose stages differ; `stages` has the outputs of
    stages that are known, and `on_first_send` is called once, when the program has stages. `reduced` are the blocks that
    were reduced during backward, `backwards` the rows at which their backwards began to.
    """

    def __init__(self, job: ThisRank | None) -> None:
        self.job = job
        self.used: dict[str, int] = {}
        self.is_batched = self.is_eager = False
        self.stages = dict(job.stages) if job is not None else {}
        self.on_first_send: Callable[[], None] | None = None
        self.peers: set[int] = set()
        self.reduced: set[int] = set()
        self.backwards: list[int] = []
        self._backward = -1

    def uses(self, name: str) -> None:
        """A group moves something between GPUs; with NCCL it has a communicator from then on."""
        if name not in self.used:
            group = distributed.group_of(name)
            self.used[name] = group.size() if group is not None else 0

    def reduces(self, tensors: list[Any], log: Any) -> None:
        """Gradients are reduced during backward, as DDP does."""
        if (backward := distributed.current_backward()) < 0:
            return
        if backward != self._backward:
            self._backward = backward
            self.backwards.append(len(log))
        self.reduced.update(log.block_of(TensorBase.untyped_storage(one)) for one in tensors)

    def held(self, kind: Any, block: Any) -> Iterator[tuple[int, int | None]]:
        """What NCCL may hold longer than the program: (row of the free, row at which it is certain to be gone).

        A collective that nobody waits for holds its tensors until a thread, which looks every 100 ms, sees that it has ended, and
        another one begins (ProcessGroupNCCL.cpp, shelvesToUnstash_). Assumed: at the latest in the third backward after, as two
        steps take 100 ms or more.
        """
        for row in np.flatnonzero((kind == Kind.FREE) & np.isin(block, list(self.reduced))):
            later = bisect_right(self.backwards, int(row)) + 2
            yield int(row), self.backwards[later] if later < len(self.backwards) else None

    def sends(self, name: str, to: int) -> None:
        """Something is sent from one rank of a group to another, or received from it.

        Alone, two ranks get a communicator of their own, unless groups connected when they were made (ProcessGroupNCCL.cpp,
        pointToPoint).
        """
        if self.on_first_send is not None and distributed.PIPELINES in sys.modules:
            self.on_first_send()
            self.on_first_send = None
        if (group := distributed.group_of(name)) is None:
            return
        self.peers.update(dist.get_process_group_ranks(group))
        if self.is_batched or self.is_eager:
            self.uses(name)
        else:
            low, high = sorted((group.rank(), to))
            self.used[f"{name}, {low}:{high}"] = 2


def form_groups(cuda: Any, patches: Patches) -> None:
    """Patch what makes process groups; without `torch.distributed` there is nothing to patch."""
    if not dist.is_available():
        return
    c10d = distributed.c10d
    if cuda.groups.job is not None:
        for name, value in cuda.groups.job.environment.items():
            patches.put_item(os.environ, name, value)
    _exchange_group_making(cuda, patches)

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, daemon: bool = False, **kwargs: Any) -> None:
        """`torch.multiprocessing.spawn`: this process is one of those that it would start."""
        job = _joined(cuda, -1, nprocs)
        fn(job.rank % nprocs, *args)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Every rank is assumed to send what this one sends."""
        object_list[:] = [obj] * dist.get_world_size(group)

    def end() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    patches.callback(setattr, sys, "excepthook", sys.excepthook)  # torch puts the rank before each line of an error
    if not dist.is_initialized():
        patches.callback(end)
    has_nccl = hasattr(c10d, "ProcessGroupNCCL")  # unless this is a build without CUDA
    for module in (c10d, dist):
        patches.put(module, is_nccl_available=constant(True), all_gather_object=all_gather_object)
        patches.put(module, **({} if has_nccl else {"ProcessGroupNCCL": _ProcessGroupNCCL}))
    patches.put(torch.cuda.nccl, version=constant((2, 27, 5)))
    patches.put(torch.multiprocessing, spawn=spawn)
    patches.put(dist, _verify_params_across_processes=nothing)


def _exchange_group_making(cuda: Any, patches: Patches) -> None:
    """Groups are of the fake backend, whatever the program asks for."""
    c10d = distributed.c10d
    later = patches.enter_context(Patches())  # what is patched once there is a group
    make_group, begin, batch = c10d._new_process_group_helper, c10d.init_process_group, c10d.batch_isend_irecv

    def new_group(group_size: int, group_rank: int, members: list[int], backend: Any, *args: Any, **kwargs: Any) -> Any:
        """A group of the fake backend, under the name of the one that was asked for."""
        kwargs["backend_options"] = None
        made = make_group(group_size, group_rank, members, "fake", *args[:2], **kwargs)
        if (known := c10d._world.pg_map.get(made[0])) is not None:
            c10d._world.pg_map[made[0]] = (str(backend), *known[1:])
        return made

    @functools.wraps(begin)
    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
        store: Any = None, group_name: str = "", pg_options: Any = None, device_id: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        job = _joined(cuda, rank, world_size)
        cuda.groups.is_eager = device_id is not None
        cuda.assume(ALONE)
        sharding.shard(later)
        cuda.groups.on_first_send = functools.partial(pipelines.exchange_shapes, cuda, later)
        begin(
            backend or "nccl", timeout=timeout, world_size=job.world_size, rank=job.rank, store=distributed.FakeStore()
        )

    @functools.wraps(batch)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
        """NCCL's group does the sends and receives of a batch at once, the fake one by one."""
        cuda.groups.is_batched = True
        try:
            return batch(p2p_op_list)
        finally:
            cuda.groups.is_batched = False

    for module in (c10d, dist):
        patches.put(module, init_process_group=init_process_group, batch_isend_irecv=batch_isend_irecv)
    patches.put(distributed.device_mesh, init_process_group=init_process_group)
    patches.put(c10d, _new_process_group_helper=new_group, _get_default_timeout=constant(timedelta(minutes=10)))


def _joined(cuda: Any, rank: int, world_size: int) -> ThisRank:
    """The job that a program joins: the one that was asked for, or what the program itself or its environment says."""
    job: ThisRank | None = cuda.groups.job or ThisRank.of(os.environ)
    if job is None and world_size > 0:
        job = ThisRank(max(rank, 0), world_size, min(world_size, 8))
    if job is None:
        raise PredictionError(f"the program is one of several ranks, and does not say of how many: {HOW}.")
    if world_size not in (-1, job.world_size):
        raise PredictionError(f"the program makes a group of {world_size} ranks, and {job.world_size} were asked for.")
    cuda.groups.job = job
    State.device_count = job.local_world_size
    return job


class _ProcessGroupNCCL:
    """What programs ask of NCCL's class where this build has none."""

    Options: Any = SimpleNamespace


# --- collectives ---


def _tensors(values: Any) -> list[Any]:
    return [one for one in flat([values]) if isinstance(one, torch.Tensor)]


_IN_PLACE = (
    "allreduce_", "allreduce_coalesced_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "_allgather_base_", "reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "_reduce_scatter_base_", "broadcast_",
    "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_", "barrier",
)  # fmt: skip
_FLATTENED = {"allgather_": 0, "reduce_scatter_": 1}
"""Collectives that ProcessGroupNCCL flattens, and the argument that it copies (ProcessGroupNCCL.cpp, newLikeFlat)."""


@rule(*(f"c10d::{name}.default" for name in _IN_PLACE))
def collective(cuda, func, *args, **kwargs):
    """A collective: finished at once, with the tensors it was given."""
    name = schema_of(func).name.rpartition("::")[2]
    group = next(
        distributed.unboxed(one).group_name
        for one in (*args, *kwargs.values())
        if isinstance(one, distributed.ScriptObject) and distributed.is_group(one)
    )
    if name in ("send", "recv_"):
        cuda.groups.sends(group, args[2])
    else:
        cuda.groups.uses(group)
    if name == "allreduce_" and (len(args) < 5 or args[4]):  # asynchronous, which is the default
        cuda.groups.reduces(args[0], cuda.log)
    if name == "barrier":
        cuda.scratch(4, op=func)
    if name in _FLATTENED:
        flattened = _tensors(args[_FLATTENED[name]])
        if flattened and len({tuple(one.shape) for one in flattened}) == 1:
            cuda.scratch(sum(map(bytes_of, flattened)), op=func)
    work = distributed.finished(_tensors(args[0]))
    return (args[0], work) if len(schema_of(func).returns) == 2 else work


@rule(*(
    f"_c10d_functional::{name}.default"
    for name in ("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
                 "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_")
))  # fmt: skip
def functional_collective(cuda, func, *args, **kwargs):
    """A collective with a result of its own; its group is named by its last argument."""
    cuda.groups.uses(str([*args, *kwargs.values()][-1]))
    return cuda.op(func, *args, **kwargs)
