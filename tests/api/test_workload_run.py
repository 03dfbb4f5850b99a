from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from job_runs import no_new_runs
from torch import nn

from memlab.api.prediction import Prediction
from memlab.api.run import Run
from memlab.api.runs import MAX_RUNS, load, runs
from memlab.api.workload_run import TIMED_STEPS, Work, run_workload, work_of
from memlab.errors import MemlabError
from memlab.prediction.cards import find
from memlab.saving_techniques import Demo, Equality, Technique, techniques
from memlab.workloads.job import Job, Parts
from memlab.workloads.workload import Workload


def mine(width: int = 64, rows: int = 256) -> Parts:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    batch = torch.randn(rows, width), torch.randn(rows, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.01), batch, nn.functional.mse_loss


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two techniques of our own: one that halves the batch, one that holds every output."""

    def halve(job: Job) -> None:
        job.batch = tuple(one[: len(one) // 2] for one in job.batch)
        job.notes.append("half of the rows")

    def hold(job: Job) -> None:
        job.keep = lambda output, loss: job.held.append(output.detach().clone())

    facts = {"attacks": ("activation",), "kind": "saving", "stage": "step", "equality": Equality("exact"), "price": "-"}
    facts |= {"not_when": "-", "code": "pass", "references": (), "demo": Demo("mlp")}
    facts_of_drop = facts | {"baseline_pattern": hold, "excludes": {"halve": "a test says so"}}
    known = (
        Technique("halve", "half of it", apply=halve, **facts),
        Technique("drop", "-", apply=lambda job: None, **facts_of_drop),
    )
    monkeypatch.setattr(techniques, "_known", {one.name: one for one in known})
    yield from no_new_runs()


def test_measured_with_values_seconds_and_facts(toy: None) -> None:
    run = run_workload(work_of(mine), steps=2)
    facts = run.trace.notes["trial"]
    assert (facts["workload"], facts["techniques"], facts["habits"], facts["on"]) == ("mine", [], [], "cpu")
    assert facts["steps"] == 2 and len(facts["step_s"]) == TIMED_STEPS and min(facts["step_s"]) > 0
    # x and the hidden layer, its ReLU, of 256 rows of 64 floats, are all alive in backward.
    assert run.peak_allocated_bytes > 3 * 256 * 64 * 4
    assert run.name == "mine" and runs["mine"] is run


def test_twice_the_same(toy: None) -> None:
    runs_of_it = [run_workload(work_of(mine), timed=False) for _ in range(2)]
    assert len({run.peak_allocated_bytes for run in runs_of_it}) == 1
    first, second = (run.trace.notes["result"] for run in runs_of_it)
    assert first == second and "digest" in str(first)
    assert runs_of_it[0].trace.notes["trial"]["step_s"] == []


def test_techniques_and_habits(toy: None) -> None:
    work = work_of(mine)
    plain, half = run_workload(work, timed=False), run_workload(work, ["halve"], timed=False)
    held = run_workload(work, habits=["drop"], steps=8, timed=False)
    assert half.peak_allocated_bytes < plain.peak_allocated_bytes < held.peak_allocated_bytes
    assert half.trace.notes["trial"]["notes"] == ["half of the rows"]
    assert (half.name, held.name) == ("mine + halve", "mine + habit of drop")


def test_predicted_for_a_card(toy: None) -> None:
    heard: list[tuple[int, int]] = []
    plain, half = (
        run_workload(work_of(mine), names, on=find("RTX 4060"), on_step=lambda done, total: heard.append((done, total)))
        for names in ([], ["halve"])
    )
    assert isinstance(half, Prediction) and half.fits == "yes"
    assert half.peak_allocated_bytes < plain.peak_allocated_bytes
    assert [one for one in dict.fromkeys(heard) if one[0]] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]  # between steps it is called, too
    assert half.trace.notes["trial"]["on"] == "RTX 4060" and half.trace.notes["trial"]["step_s"] == []
    assert any("half of the rows" in note for note in half.trace.notes["notes"])


def test_the_users_random_numbers_go_on(toy: None) -> None:
    torch.manual_seed(7)
    random.seed(7)
    expected = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)
    run_workload(work_of(mine), timed=False)
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]


def test_stopped_in_a_step(toy: None) -> None:
    for _ in range(MAX_RUNS):  # as many as are kept: none of them may go for a run that is not kept
        runs.add(Run(runs.new_name()))
    before = list(runs)

    def stop(done: int, total: int) -> None:
        assert total == 3 + TIMED_STEPS
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workload(work_of(mine), on_step=stop)
    run_workload(work_of(mine), keep=False, timed=False)
    assert list(runs) == before


def test_what_else_is_tracked_meanwhile_is_kept(toy: None) -> None:
    def step(done: int, total: int) -> None:
        runs.add(Run("of another thread"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workload(work_of(mine), on_step=step)
    assert list(runs)[-1] == "of another thread"


def test_a_workload_with_sizes(toy: None) -> None:
    known = Workload("toy", "a toy", mine, {"tiny": {"width": 8, "rows": 4}, "laptop": {"width": 64, "rows": 256}})
    work = work_of(known, "tiny", rows=6)
    assert (work.name, work.size, str(work)) == ("toy", "tiny", "toy tiny rows=6")
    assert work.make()[2][0].shape == (6, 8)
    with pytest.raises(MemlabError, match=r"no setting 'depth'\. It has width, rows"):
        work_of(known, "tiny", depth=3)
    with pytest.raises(MemlabError, match="no size 'huge'"):
        work_of(known, "huge")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (3, "got int"),
        ((1, 2), "got tuple of 2"),
        ((1, None, (1,), None), "the first is a torch.nn.Module, got int"),
        ((nn.Identity(), 5, (1,), None), "the second is an optimizer, or None for inference, got int"),
        ((nn.Identity(), None, (), None), r"the third is \(input, ..., target\), for inference"),
    ],
)
def test_what_is_no_workload(toy: None, made: object, says: str) -> None:
    with pytest.raises(MemlabError, match=says):
        run_workload(Work("wrong", lambda: made))  # type: ignore[arg-type,return-value]


def test_wrong_arguments(toy: None) -> None:
    with pytest.raises(MemlabError, match=r"drop and halve exclude each other: a test says so\. Leave one out\."):
        run_workload(work_of(mine), ["halve", "drop"])
    with pytest.raises(MemlabError, match="takes no settings, got batch"):
        work_of(mine, batch=3)
    with pytest.raises(MemlabError, match="a workload is a name, or a function"):
        work_of(5)  # type: ignore[arg-type]
    for steps in (0, -1, True, 1.5):
        with pytest.raises(MemlabError, match="steps is a number from 1 to 1000"):
            run_workload(work_of(mine), steps=steps)  # type: ignore[arg-type]


def test_a_saved_trial_keeps_its_facts(toy: None, tmp_path) -> None:
    run = run_workload(work_of(mine), ["halve"], timed=False)
    assert load(run.save(tmp_path / "run.memlab")).trace.notes["trial"] == run.trace.notes["trial"]


@pytest.mark.simulated
def test_measured_on_cuda(toy: None) -> None:
    run_workload(work_of(mine), on="cuda")  # the first call allocates cuBLAS's workspace
    run = run_workload(work_of(mine), on="cuda")
    assert run.devices[0].device.label == "cuda:0"
    # What PyTorch's own counter says of the same job, from an empty card.
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    job = Job("cuda", 3)
    techniques.prepare(job, mine)
    job.run()
    assert torch.cuda.max_memory_allocated() - begin == run.peak_allocated_bytes - run.devices[0].levels[0].start_bytes
