"""Predictions of one rank of a job, compared with NCCL's process groups and PyTorch's own allocator on a simulated GPU.

    make agreement-ranks                    # every program of `rank_programs`; writes the table
    python -m benchmarks.ranks --only fsdp2

Both sides run the same CUDA build. The simulated NCCL connects nobody: each rank works as if all held what it holds, and what
others send has the right size and no values.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memlab.prediction.forecast import _RESERVED_ERROR

ROOT = Path(__file__).parent.parent
CUDA = ROOT / ".venv/cuda/bin/python"
RESULTS, TABLE = ROOT / "benchmarks/results/ranks.json", ROOT / "docs/ranks_agreement.md"
CARD = "A100 80GB"
Record = dict[str, Any]


def measured(name: str, rank: int) -> Record:
    """The peaks of one rank, by the real allocator; in a process of its own, without the other ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d
    from torch.distributed.pipelining import _utils, schedules
    from torch.distributed.pipelining.stage import PipelineStage

    from benchmarks.rank_programs import PROGRAMS, handed_on
    from memlab.fake_cuda.process_groups import ThisRank

    class Alone(dist.Store):
        """Where ranks leave notes for each other: what another rank would have left reads as NCCL's number of a group."""

        def __init__(self) -> None:
            super().__init__()
            self.notes: dict[str, bytes] = {}

        def set(self, key: str, value: bytes) -> None:
            self.notes[key] = value

        def get(self, key: str) -> bytes:
            return self.notes.get(key, bytes(128))

        def add(self, key: str, value: int) -> int:
            self.notes[key] = b"%d" % (int(self.notes.get(key, b"0")) + value)
            return int(self.notes[key])

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            return all(key in self.notes for key in keys)

    program, size, _ = PROGRAMS[name]
    job = ThisRank(rank, size, min(size, 8))
    os.environ.update(job.environment, LOCAL_RANK="0", TORCH_NCCL_RANKS_PER_ROOT=str(size))  # one root is asked
    store, begin = Alone(), dist.init_process_group
    warm_up = getattr(schedules._PipelineSchedule, "_warmup_p2p", None)  # since 2.12, which lets stages vote

    def alone(*args: Any, **kwargs: Any) -> None:
        begin("nccl", store=store, rank=rank, world_size=size)

    def vote(schedule: Any, stages: list[Any], has_backward: bool, *args: Any) -> None:
        """The stages vote on whether all were given shapes: a value, of which a simulated GPU computes none."""
        warm_up(schedule, stages, has_backward, *args)
        for stage in stages:
            lacks_shapes = _utils.InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            stage._inference_mode = _utils.InferenceMode.DYNAMIC if lacks_shapes else _utils.InferenceMode.STATIC

    def shapes(stage: Any, src_stage: int) -> Any:
        """What a stage of these programs would send."""
        metas = _utils.extract_tensor_metas((handed_on(),))
        backwards = src_stage > stage.stage_index
        return (
            _utils._StageBackwardMeta(_utils._derive_grad_metas(metas))
            if backwards
            else _utils._StageForwardMeta(metas)
        )

    if warm_up:
        schedules._PipelineSchedule._warmup_p2p, PipelineStage._recv_meta = vote, shapes
    for module in (dist, distributed_c10d, device_mesh):
        module.init_process_group = alone  # type: ignore[union-attr]
    program()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def predicted(name: str, rank: int) -> Record:
    """The peaks of one rank as memlab predicts them."""
    from benchmarks.rank_programs import PROGRAMS
    from memlab.api.predict import StepToPredict, predict_ranks, predict_step
    from memlab.fake_cuda.process_groups import ThisRank
    from memlab.prediction.cards import find

    program, size, _ = PROGRAMS[name]
    step, local = StepToPredict(program, find(CARD), name, ""), min(size, 8)
    if name.endswith("without shapes"):  # which a rank gets from those that were predicted before
        found = predict_ranks(step, ThisRank(0, size, local)).ranks[rank]
    else:
        found = predict_step(step, job=ThisRank(rank, size, local))
    return {"allocated": list(found.allocated_bytes), "reserved": list(found.reserved_bytes)}


def main() -> int:
    """Compare the programs; the exit status is 1 if a measured peak lies outside of what was predicted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", help="programs whose names begin so; the others stay as they are in the table")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        side, name, rank = asked.one
        print(json.dumps((measured if side == "measured" else predicted)(name, int(rank))), flush=True)
        os._exit(0)  # groups whose other ranks are not there cannot be ended
    from benchmarks.rank_programs import PROGRAMS

    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    found = {(one["program"], one["rank"]): one for one in known if one["program"] in PROGRAMS}
    for name, (_, size, ranks) in PROGRAMS.items():
        if asked.only and not name.startswith(asked.only):
            continue
        for rank in ranks:
            sides = {side: in_a_process(side, name, rank) for side in ("measured", "predicted")}
            found[name, rank] = {"program": name, "ranks": size, "rank": rank, **sides}
            print(_row(found[name, rank]), flush=True)
            rows = [found[one, each] for one, (_, _, its) in PROGRAMS.items() for each in its if (one, each) in found]
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            TABLE.write_text(_table(rows))
    return any(_outside(one) for one in found.values())


def in_a_process(side: str, name: str, rank: int) -> Record:
    """One side of one program in a process of its own, on a simulated GPU."""
    python = str(CUDA)
    command = [python, "-m", "memlab", "simulate", "--card", CARD, "--", python, "-m", "benchmarks.ranks", "--one"]
    ended = subprocess.run(
        [*command, side, name, str(rank)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.stderr.write(ended.stderr[-2000:])
        raise SystemExit(f"{name}, rank {rank}, {side}: it did not answer")
    record: Record = json.loads(lines[-1])
    return record


def _errors(one: Record) -> dict[str, float]:
    """The distance of what was measured from the nearest end of what was predicted, as a share."""
    errors = {}
    for of, widened in (("allocated", 0), ("reserved", _RESERVED_ERROR)):
        (low, high), was = one["predicted"][of], one["measured"][of]
        errors[of] = max(round(low / (1 - widened)) - was, was - round(high / (1 + widened)), 0) / was
    return errors


def _outside(one: Record) -> bool:
    errors = _errors(one)
    return errors["allocated"] > 0.01 or errors["reserved"] > 0.03


def _row(one: Record) -> str:
    errors = _errors(one)
    shown = [" to ".join(f"{end:,}" for end in sorted(set(one["predicted"]["allocated"])))]
    shown += [f"{one['measured']['allocated']:,}", f"{errors['allocated']:.2%}"]
    shown.append(" to ".join(f"{end / 2**20:.0f}" for end in one["predicted"]["reserved"]))
    shown += [f"{one['measured']['reserved'] / 2**20:.0f}", f"{errors['reserved']:.2%}"]
    return f"| {one['program']} | {one['rank']} of {one['ranks']} | {' | '.join(shown)} |"


def _table(found: list[Record]) -> str:
    errors = [_errors(one) for one in found]
    equal = {of: sum(each[of] < 1e-6 for each in errors) for of in ("allocated", "reserved")}
    worst = {of: max(each[of] for each in errors) for of in ("allocated", "reserved")}
    head = "| program | rank | allocated predicted, bytes | measured | error | reserved predicted, MiB | measured | error |"
    text = f"""# One rank of a job, predicted and measured

Made by `make agreement-ranks`: memlab's prediction, and PyTorch's own allocator and process groups on a simulated {CARD}.
Of {len(errors)} comparisons {equal["allocated"]} agree in *allocated* to the byte, {equal["reserved"]} in *reserved* (before it is
widened by 2 %). The largest errors are {worst["allocated"]:.2%} and {worst["reserved"]:.2%}. A range of *allocated* includes
what NCCL may hold a while longer than DDP: which end is measured is a matter of time, and with steps of less than 50 ms, as here,
NCCL may hold more than that. What others send has no values; of pipelines "without shapes" (`input_args`, `output_args`) the
measured stages got them from the benchmark, and the predicted ones from the stages that were predicted before.

"""
    return text + "\n".join((head, "|---|---|---|---|---|---|---|---|", *map(_row, found), ""))


if __name__ == "__main__":
    sys.exit(main())
