"""Training steps of torch.distributed: on two real gloo processes, or on a fake group of two, and one that is not sharded.

`python sharded_jobs.py KIND,KIND FOLDER [--fake DEVICE]` writes the run of rank 0 to FOLDER/KIND.memlab for each.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import memlab

LAYERS, WIDTH, TOKENS, STEPS = 3, 128, 32, 3


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def blocks(device: str) -> nn.Sequential:
    return nn.Sequential(*(FeedForward() for _ in range(LAYERS))).to(device)


def whole(device: str) -> Any:
    model = blocks(device)
    return model, adamw(model)


def fsdp2(device: str, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = blocks(device)
    mesh = dist.init_device_mesh(device, (2,))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, adamw(model)


def fsdp2_bfloat16(device: str) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fsdp2(device, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def fsdp2_kept(device: str) -> Any:
    return fsdp2(device, reshard_after_forward=False)


def fsdp1(device: str, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({FeedForward})
    model = FullyShardedDataParallel(blocks(device), auto_wrap_policy=policy, device_id=torch.device(device), **options)
    return model, adamw(model)


def fsdp1_original(device: str) -> Any:
    return fsdp1(device, use_orig_params=True)


def tensor_parallel(device: str) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = blocks(device), dist.init_device_mesh(device, (2,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, adamw(model)


def ddp(device: str) -> Any:
    model = nn.parallel.DistributedDataParallel(blocks(device))
    return model, adamw(model)


def zero1(device: str) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(blocks(device), gradient_as_bucket_view=True)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)


KINDS = (whole, fsdp2, fsdp2_bfloat16, fsdp2_kept, fsdp1, fsdp1_original, tensor_parallel, ddp, zero1)


def work(rank: int, kind: str, folder: str, device: str, backend: str) -> None:
    """One rank: the model is made, then three steps of it are tracked."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{kind}.store", rank=rank, world_size=2)
    model, optimizer = globals()[kind](device)
    x = torch.randn(TOKENS, WIDTH, device=device)
    with memlab.track(kind, show=False) as run:
        for _ in range(STEPS):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        run.save(Path(folder, f"{kind}.memlab"))
    dist.destroy_process_group()


if __name__ == "__main__":
    kinds, folder, *rest = sys.argv[1:]
    # Processes of their own for each kind, as FSDP's cycles keep a model alive; forked, so that all is imported once.
    import torch._dynamo  # by every optimizer
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    with memlab.track("imports", device="cpu", show=False) as run:
        torch.ones(1)
    run.save(Path(folder, "imports.memlab"))
    gc.freeze()  # each search for names would look through all of it
    for kind in kinds.split(","):
        options = (kind, folder, rest[1], "fake") if rest else (kind, folder, "cpu", "gloo")
        torch.multiprocessing.start_processes(work, options, nprocs=1 if rest else 2, start_method="fork")
