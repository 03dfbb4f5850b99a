"""Distributed programs in PyTorch's own terms, each for one rank: `PROGRAMS[name]()` reads RANK and WORLD_SIZE as under torchrun.

They are run by NCCL on a simulated GPU and predicted without one; `benchmarks/ranks.py` compares the two.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, HEADS, BATCH, TOKENS = 512, 8, 4, 64


class Block(nn.Module):
    """A transformer block, written so that tensor parallelism can split it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a feed-forward layer, both residual."""
        h = self.norm(x)
        heads = [f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def blocks(count: int = 4) -> nn.Sequential:
    """Some blocks on the GPU."""
    return nn.Sequential(*[Block() for _ in range(count)]).to("cuda")


def train(
    model: Any, optimizer: Any = None, steps: int = 3, shape: tuple[int, ...] = (BATCH, TOKENS, WIDTH), **options: Any
) -> None:
    """Some training steps."""
    make = optimizer or torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-4, **options)
    x = torch.randn(*shape, device="cuda")
    for _ in range(steps):
        model(x).float().square().mean().backward()
        if options.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def join() -> int:
    """Join the job, as torchrun's programs do; the number of ranks."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return dist.get_world_size()


def ddp(layers: int = 4, optimizer: Any = None, **options: Any) -> None:
    """DistributedDataParallel."""
    join()
    model = nn.parallel.DistributedDataParallel(blocks(layers), device_ids=[int(os.environ["LOCAL_RANK"])], **options)
    train(model, optimizer)


def ddp_accumulating() -> None:
    """DDP that reduces every second backward."""
    join()
    model = nn.parallel.DistributedDataParallel(blocks(), device_ids=[int(os.environ["LOCAL_RANK"])])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
    for _ in range(2):
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_compressed() -> None:
    """DDP whose gradients travel as bfloat16."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    join()
    model = nn.parallel.DistributedDataParallel(blocks(), device_ids=[int(os.environ["LOCAL_RANK"])])
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(model)


def zero1() -> None:
    """ZeroRedundancyOptimizer over DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    join()
    model = nn.parallel.DistributedDataParallel(blocks(), device_ids=[int(os.environ["LOCAL_RANK"])])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp2(layers: int = 4, half: bool = False, reshard: bool | int = True, offload: bool = False, shape: tuple[int, ...] = (),
          from_meta: bool = False, checkpointing: bool = False, clip: bool = False, reduce: Any = None) -> None:  # fmt: skip
    """`fully_shard`, block by block."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    world = join()
    mesh = init_device_mesh("cuda", shape or (world,), mesh_dim_names=("replicate", "shard")[-len(shape or (world,)) :])
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if from_meta:
        with torch.device("meta"):
            model = nn.Sequential(*[Block() for _ in range(layers)])
    else:
        model = blocks(layers)
    for place, block in enumerate(model):
        model[place] = fully_shard(checkpoint_wrapper(block) if checkpointing else block, **options)
    fully_shard(model, **options)
    if from_meta:
        model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")
    for _ in range(3):
        model(x).float().square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def fsdp1(half: bool = False, strategy: str = "FULL_SHARD") -> None:
    """FullyShardedDataParallel, with its flat parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    join()
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if half else None
    model = FullyShardedDataParallel(
        blocks(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, device_id=torch.cuda.current_device(),
        sharding_strategy=ShardingStrategy[strategy], use_orig_params=True,
    )  # fmt: skip
    train(model)


def _split(model: nn.Sequential, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = ColwiseParallel, RowwiseParallel
    plan = {"query": column(), "key": column(), "value": column(), "out": row(), "up": column(), "down": row()}
    for block in model:
        parallelize_module(block, mesh, plan)


def tensor_parallel(layers: int = 4) -> None:
    """Tensor parallelism."""
    mesh = init_device_mesh("cuda", (join(),))
    model = blocks(layers)
    _split(model, mesh)
    train(model, foreach=False)  # the norms are no DTensors


def sequence_parallel() -> None:
    """Tensor parallelism whose norms work on a share of the tokens."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    mesh = init_device_mesh("cuda", (join(),))
    model = nn.Sequential(
        *[
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        ]
    ).to("cuda")
    first = parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    for block in model:
        parallel.parallelize_module(block, mesh, {
            "0": parallel.SequenceParallel(), "1": parallel.ColwiseParallel(input_layouts=Shard(1)),
            "3": parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=block is model[-1]),
        })  # fmt: skip
    parallel.parallelize_module(model[0], mesh, first)
    train(model)


def fsdp_and_tp(shards: int = 2, half: bool = False, vocabulary: int = 0) -> None:
    """Tensor parallelism within a machine, FSDP across; with a vocabulary the model ends with logits, split between the shards."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate, parallel

    world = join()
    mesh = init_device_mesh("cuda", (world // shards, shards), mesh_dim_names=("data", "tensor"))
    model = blocks()
    _split(model, mesh["tensor"])
    if vocabulary:
        logits = parallel.ColwiseParallel(output_layouts=Replicate())
        model.append(parallel.parallelize_module(nn.Linear(WIDTH, vocabulary).to("cuda"), mesh["tensor"], logits))
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if half else {}
    for block in model:
        fully_shard(block, mesh=mesh["data"], **options)
    fully_shard(model, mesh=mesh["data"], **options)
    train(model)


def handed_on() -> torch.Tensor:
    """What a stage of these pipelines sends to the next for each of its small batches."""
    return torch.empty(2, TOKENS, WIDTH, device="cuda", requires_grad=True)


def pipeline(schedule: str = "ScheduleGPipe", micro_batches: int = 4, chunks: int = 1, has_shapes: bool = True) -> None:
    """A pipeline whose stages are the ranks; without shapes they send them to each other."""
    from torch.distributed import pipelining

    world, device = join(), torch.device("cuda", torch.cuda.current_device())
    rank = dist.get_rank()
    stages = []
    for stage in range(rank, world * chunks, world):
        shapes = {}
        if has_shapes:
            shapes = {"input_args": handed_on().requires_grad_(stage > 0), "output_args": handed_on()}
        stages.append(pipelining.PipelineStage(blocks(2), stage, world * chunks, device, **shapes))
    made = getattr(pipelining, schedule)(
        stages if chunks > 1 else stages[0], micro_batches, loss_fn=lambda y, t: (y - t).square().mean()
    )
    optimizer = torch.optim.AdamW([one for stage in stages for one in stage.submod.parameters()], lr=1e-4)
    x = torch.randn(2 * micro_batches, TOKENS, WIDTH, device="cuda")
    for _ in range(3):
        first, last = (x,) if rank == 0 else (), {"target": x} if rank == world - 1 else {}
        made.step(*first, **last)
        optimizer.step()
        optimizer.zero_grad()


def technique(name: str, workload: str = "", size: str = "laptop") -> None:
    """A technique of memlab for several GPUs, on a workload or on what demonstrates it."""
    from memlab.api.workload_run import work_of
    from memlab.saving_techniques import techniques
    from memlab.workloads.job import Job, seeded

    with seeded():
        job = Job("cuda", steps=2)
        techniques.prepare(job, work_of(workload or techniques[name].demo.workload, size).make, [name])
        job.run()


def collectives() -> None:
    """What programs call by hand."""
    world = join()
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    whole = torch.empty(world << 20, device="cuda")
    dist.all_gather_into_tensor(whole, x)
    dist.reduce_scatter_tensor(x, whole)
    dist.reduce_scatter(x, list(whole.chunk(world)))
    dist.all_to_all_single(torch.empty_like(whole), whole)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.barrier()


of: Callable[..., Callable[[], None]] = functools.partial
PROGRAMS: dict[str, tuple[Callable[[], None], int, tuple[int, ...]]] = {
    "ddp": (ddp, 8, (0,)),
    "ddp, 2 ranks": (ddp, 2, (0, 1)),
    "ddp, 12 layers": (of(ddp, 12), 8, (0,)),
    "ddp, SGD": (of(ddp, optimizer=torch.optim.SGD), 8, (0,)),
    "ddp, gradients are views of buckets": (of(ddp, gradient_as_bucket_view=True), 8, (0,)),
    "ddp, unused parameters are searched": (of(ddp, find_unused_parameters=True), 8, (0,)),
    "ddp, static graph": (of(ddp, static_graph=True), 8, (0,)),
    "ddp, small buckets": (of(ddp, bucket_cap_mb=2), 8, (0,)),
    "ddp, accumulating": (ddp_accumulating, 8, (0,)),
    "ddp, bf16 compression": (ddp_compressed, 8, (0,)),
    "zero-1": (zero1, 8, (0, 7)),
    "zero-1, 2 ranks": (zero1, 2, (0,)),
    "fsdp2": (fsdp2, 8, (0, 7)),
    "fsdp2, 2 ranks": (fsdp2, 2, (0,)),
    "fsdp2, 3 ranks": (fsdp2, 3, (0, 2)),
    "fsdp2, 64 ranks": (fsdp2, 64, (0, 63)),
    "fsdp2, 512 ranks": (fsdp2, 512, (0, 511)),
    "fsdp2, 12 layers": (of(fsdp2, 12), 8, (0,)),
    "fsdp2, bf16": (of(fsdp2, half=True), 8, (0,)),
    "fsdp2, bf16, reduced in fp32": (of(fsdp2, half=True, reduce=torch.float32), 8, (0,)),
    "fsdp2, no resharding": (of(fsdp2, reshard=False), 8, (0,)),
    "fsdp2, resharding to 2": (of(fsdp2, reshard=2), 8, (0,)),
    "fsdp2, offload": (of(fsdp2, offload=True), 8, (0,)),
    "fsdp2, bf16, offload": (of(fsdp2, half=True, offload=True), 8, (0,)),
    "fsdp2, hybrid": (of(fsdp2, shape=(2, 4)), 8, (0,)),
    "fsdp2, from meta": (of(fsdp2, from_meta=True), 8, (0,)),
    "fsdp2, checkpointing": (of(fsdp2, checkpointing=True), 8, (0,)),
    "fsdp2, bf16, checkpointing": (of(fsdp2, half=True, checkpointing=True), 64, (0,)),
    "fsdp2, clipping": (of(fsdp2, clip=True), 8, (0,)),
    "fsdp2 as a technique, gpt": (of(technique, "fsdp2", "gpt"), 8, (0, 7)),
    "fsdp2 as a technique": (of(technique, "fsdp2"), 8, (0, 7)),
    "fsdp1": (fsdp1, 8, (0,)),
    "fsdp1, bf16": (of(fsdp1, half=True), 8, (0,)),
    "fsdp1, gradients only": (of(fsdp1, strategy="SHARD_GRAD_OP"), 8, (0,)),
    "tensor parallel": (tensor_parallel, 8, (0, 7)),
    "tensor parallel, 2 ranks": (tensor_parallel, 2, (0,)),
    "tensor parallel, 12 layers": (of(tensor_parallel, 12), 4, (0,)),
    "sequence parallel": (sequence_parallel, 8, (0,)),
    "fsdp2 and tensor parallel": (fsdp_and_tp, 8, (0,)),
    "fsdp2 and tensor parallel, bf16": (of(fsdp_and_tp, 4, half=True), 64, (0,)),
    "fsdp2 and tensor parallel, uneven": (of(fsdp_and_tp, vocabulary=5003), 6, (0, 1, 4, 5)),
    "pipeline, GPipe": (pipeline, 4, (0, 1, 3)),
    "pipeline, 1F1B": (of(pipeline, "Schedule1F1B"), 4, (0, 1, 3)),
    "pipeline, 1F1B, 16 stages": (of(pipeline, "Schedule1F1B", 16), 16, (0, 7, 15)),
    "pipeline, interleaved": (of(pipeline, "ScheduleInterleaved1F1B", 4, 2), 4, (0, 1, 3)),
    "pipeline, 1F1B, without shapes": (of(pipeline, "Schedule1F1B", has_shapes=False), 4, (0, 1, 3)),
    "pipeline, interleaved, without shapes": (of(pipeline, "ScheduleInterleaved1F1B", 4, 2, False), 4, (0, 3)),
    "collectives": (collectives, 8, (0,)),
}
"""Name -> the program, the number of ranks, and the ranks to compare."""
