"""What the ranks do that a cell starts: three steps on two real gloo processes. It is imported by the ranks too."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

KEPT_BYTES = 4_000_000


def train(index: int, store: str, world_size: int = 2, fails: str = "") -> None:
    """Train; rank 1 keeps 4 MB more."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=world_size)
    steps(index, fails)
    dist.destroy_process_group()


def elastic(fails: str = "") -> int:
    """The same for torch elastic, which gives rank and world size by the environment."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps(rank, fails)
    dist.destroy_process_group()
    return rank


def steps(rank: int, fails: str) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    kept: list[Any] = [torch.ones(KEPT_BYTES // 4)] if rank == 1 else []
    for step in range(3):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fails == "raises" and rank == 1 and step == 1:
            raise MemoryError("planted on rank 1")
        if fails == "killed" and rank == 1 and step == 1:
            os.kill(os.getpid(), 9)
    if fails == "sleeps":
        time.sleep(1.5)
    assert len(kept) == (rank == 1)
