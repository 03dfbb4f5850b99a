"""`run.explore()`: what keeps a block alive is said of runs that this process measured, and of what is still there."""

from __future__ import annotations

import gc

import pytest
import torch
from scripted_traces import Script

import memlab
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.units import MiB


def holders(run: Run) -> dict[int, list[str]]:
    """Requested bytes -> what keeps the block alive; the allocator may give it a larger one that it has."""
    (shown,) = run.explore().runs
    assert shown.holders is not None
    sizes = dict(zip(run.trace.events.block.tolist(), run.trace.events.requested_bytes.tolist(), strict=True))
    return {sizes[block]: list(names) for block, names in shown.holders.items()}


def test_what_keeps_a_block_alive_is_named_and_what_was_freed_is_not() -> None:
    kept = {}
    with memlab.track("explored", show=False) as run:
        kept["cache"] = [torch.zeros(3 * MiB // 4)]
        freed_later = torch.zeros(5 * MiB // 4)
        torch.zeros(7 * MiB // 4)
    found = holders(run)
    assert "'cache'" in found[3 * MiB][0] and "kept" in found[3 * MiB][0]
    assert "freed_later" in found[5 * MiB][0]
    assert 7 * MiB not in found
    del freed_later
    gc.collect()
    assert 5 * MiB not in holders(run)
    assert 3 * MiB in holders(run)


def test_of_a_run_from_a_file_nothing_is_said(tmp_path) -> None:
    with memlab.track("explored", show=False) as run:
        kept = torch.zeros(1000)
    (shown,) = memlab.load(run.save(tmp_path / "run.memlab")).explore().runs
    assert shown.holders is None
    assert len(kept) == 1000


def test_two_runs_are_shown_and_anything_else_is_refused() -> None:
    script = Script()
    script.alloc(512)
    run = Run("one", script.trace())
    assert [shown.title.split(" ")[0] for shown in run.explore(Run("two", script.trace())).runs] == ["one", "two"]
    with pytest.raises(MemlabError, match=r"takes another run, got a str"):
        run.explore("two")  # type: ignore[arg-type]


@pytest.mark.simulated
def test_blocks_of_a_gpu_have_their_stack_and_holder() -> None:
    with memlab.track("explored", show=False) as run:
        kept = torch.zeros(3 * MiB // 4, device="cuda")
    assert "kept" in holders(run)[3 * MiB][0]
    (shown,) = run.explore().runs
    assert any("test_explore.py" in stack for stack in shown.trace.texts["stack"])
    assert kept.is_cuda
