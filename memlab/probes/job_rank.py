"""Which rank of a distributed job this process is."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

_GIVEN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


def job_rank() -> dict[str, Any] | None:
    """Rank, world size, and what tells the job from others; None if this process belongs to none.

    The default process group decides; before there is one, or without it, the variables that torchrun and other launchers set.
    `job` is a digest: it identifies, and discloses nothing of the environment.
    """
    given = tuple(os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    distributed = sys.modules.get("torch.distributed")  # not imported for it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        given = distributed.get_rank(), distributed.get_world_size()
    if not all(str(number).isdigit() for number in given):
        return None
    rank, world_size = map(int, given)
    if not rank < world_size:
        return None
    known = [os.environ.get(name, "") for name in _GIVEN]
    if known[0] in ("", "none") and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        known.append(str(os.getppid()))  # torchrun gives an id only if asked to; on one machine it is the parent of all
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {
        "rank": rank,
        "world_size": world_size,
        "job": hashlib.sha256("\n".join(known).encode()).hexdigest()[:12],
        "attempt": int(attempt) if attempt.isdigit() else 0,
    }
