"""Names, modules and categories reach through what torch.distributed does: shards, flat buffers, buckets.

The runs are those of `sharded_jobs`: two real gloo processes on the CPU, a fake group of two on the simulated GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sharded_jobs
from processes import python
from unnamed import LIMIT, unnamed

import memlab

FLOAT = 4
PARAMETERS = sharded_jobs.LAYERS * (8 * sharded_jobs.WIDTH**2 + 5 * sharded_jobs.WIDTH) * FLOAT
SHARDED = [kind.__name__ for kind in sharded_jobs.KINDS if kind is not sharded_jobs.whole]
WITHOUT_BUCKETS = [kind for kind in SHARDED if kind not in ("ddp", "zero1")]
"""DistributedDataParallel does not run on a fake group."""


def check(whole: Any, run: Any, kind: str) -> None:
    """At most as much is unnamed as allowed, and this rank holds its share of parameters and optimizer state."""
    assert unnamed(run) <= max(LIMIT, unnamed(whole)), run.breakdown("tensor")
    held = run.breakdown("category")
    own = PARAMETERS if kind in ("ddp", "zero1") else PARAMETERS // 2
    optimizer = {"ddp": 2 * PARAMETERS, "zero1": PARAMETERS}.get(kind, PARAMETERS)
    assert held["parameter"] >= 0.99 * own
    # Biases of a row-wise layer are on each rank, steps are counters, ZeRO-1 gives whole parameters to ranks.
    assert 0.75 * optimizer <= held["optimizer"] <= 1.25 * optimizer


@pytest.fixture(scope="module")
def of_gloo(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("gloo")
    names = ",".join(kind.__name__ for kind in sharded_jobs.KINDS)
    python(sharded_jobs.__file__, names, folder)
    return folder


@pytest.mark.parametrize("kind", SHARDED)
def test_two_gloo_processes(of_gloo, kind):
    run, whole = memlab.load(of_gloo / f"{kind}.memlab"), memlab.load(of_gloo / "whole.memlab")
    check(whole, run, kind)
    level = run.devices[0].levels[0]
    gaps = {gap.name for gap in run.trace.made_by.gaps}
    assert level.peak.is_exact and "collectives" in gaps and "resized unseen" not in gaps
    assert not gaps & {"seen late", "unseen", "objects not asked"}
    assert level.end_bytes > level.start_bytes >= PARAMETERS // 2


def test_what_fsdp_gathers_and_reduces_has_names(of_gloo):
    run = memlab.load(of_gloo / "fsdp2.memlab")
    names = set(run.trace.texts["name"])
    module = "FSDPSequential"
    for name in ("0.up.weight", "0.up.weight, gathered"):
        assert f"{module}.{name}" in names
    for name in (
        f"all-gather buffer of {module}.1",
        f"reduce-scatter buffer of {module}.1",
        f"grad of {module}.2.down.weight, before reduce-scatter",
        f"gradient shards of {module}.0",
        f"exp_avg of {module}.0.up.weight",
    ):
        assert name in names
    assert "gradient buckets of DistributedDataParallel" in memlab.load(of_gloo / "ddp.memlab").trace.texts["name"]


@pytest.fixture(scope="module")
def on_simulated_gpu(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("fake")
    python(sharded_jobs.__file__, ",".join(["whole", *WITHOUT_BUCKETS]), folder, "--fake", "cuda")
    return folder


@pytest.mark.simulated
@pytest.mark.parametrize("kind", WITHOUT_BUCKETS)
def test_a_fake_group_on_the_simulated_gpu(on_simulated_gpu, kind):
    folder = on_simulated_gpu
    run, whole = memlab.load(folder / f"{kind}.memlab"), memlab.load(folder / "whole.memlab")
    check(whole, run, kind)
    assert run.devices[0].levels[0].peak.is_exact
    assert not {gap.name for gap in run.trace.made_by.gaps} & {"objects not asked", "counters differ"}
