"""`memlab.advise` on real work: a workload, a step, runs; everything is run here, on the CPU or predicted."""

from __future__ import annotations

import random
import re
import sys

import pytest
import torch
from torch import nn

import memlab
from memlab.api.advise import Checked
from memlab.api.advise.search import candidates
from memlab.api.advise.subject import OfStep, WorkloadSubject, card_of
from memlab.api.oom import keep_oom, note_oom
from memlab.api.runs import runs
from memlab.api.workload_run import run_workload, work_of
from memlab.errors import MemlabError
from memlab.prediction.child import Child
from memlab.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = 6
forks = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")


def blocks() -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(BLOCKS)]
    )


def make(batch: int = 512):
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, (torch.randn(batch, 64), torch.randn(batch, 64)), nn.functional.mse_loss


def step():
    model, optimizer, (x, y), loss_of = make()
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.detach()


WORK = Workload("blocks", "", make, {"laptop": {}})
LARGE = Workload("large", "", lambda batch: make(batch), {"laptop": {"batch": 1 << 16}})


def test_what_was_measured_on_the_cpu_is_pasted_for_the_cpu():
    advice = memlab.advise(WORK, techniques=["autocast_bf16"], steps=1)
    assert advice.before.trace.notes["trial"]["steps"] == 1
    assert advice.recommended == ("autocast_bf16",)
    assert 'torch.autocast("cpu"' in advice.code and '"cuda"' not in advice.code


def test_a_workload_is_measured_with_each_technique():
    advice = memlab.advise(WORK, techniques=["checkpoint", "offload"])
    assert advice.recommended == ("checkpoint",)
    saved = advice.findings.tried[0]
    assert saved.least_bytes > 0.3 * advice.findings.before_bytes[0]
    assert saved.results == "equal"
    assert saved.ratio is not None
    assert "does not apply" in advice.findings.tried[1].failed
    assert "checkpoint(" in advice.code
    compile(advice.code, "code", "exec")
    bundle = advice._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert len(bundle["text/html"]) < 35_000
    checked = advice.measure()
    assert checked.off_bytes == 0, str(checked)
    assert "as the advice said" in checked.sentence
    assert (checked.results, checked.to_pandas().index.tolist()) == ("equal", ["said", "measured"])


def test_a_prediction_is_closed_by_a_measurement():
    advice = memlab.advise(WORK, techniques=["checkpoint"], card="T4")
    assert advice.findings.is_predicted
    assert advice.findings.tried[0].ratio is None
    assert advice.findings.tried[0].results == "not checked"
    checked = advice.measure()
    assert sum(checked.said_bytes) == pytest.approx(sum(checked.measured_bytes), rel=0.25)
    assert min(checked.measured_bytes) > 0
    assert "predicted" in str(checked)


@forks
def test_a_step_runs_in_a_child_and_nothing_of_it_changes_or_is_printed_here(capfd):
    model, x = blocks(), torch.randn(1024, 64)
    seen: list[int] = []

    def mine():
        seen.append(1)
        print("again and again")
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), list(runs)
    forwards = [one.forward for one in model.modules()]
    advice = memlab.advise(mine, techniques=["checkpoint", "in_place", "retain_graph"])
    assert capfd.readouterr() == ("", "")
    assert advice.recommended[0] == "checkpoint"
    assert advice.findings.tried[0].results == "equal"
    assert advice.findings.tried[0].ratio is not None
    assert seen == []
    assert all(one.grad is None for one in model.parameters())
    assert not any(one.inplace for one in model.modules() if isinstance(one, nn.ReLU))
    assert [one.forward for one in model.modules()] == forwards
    after = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), list(runs)
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@forks
def test_a_function_that_gives_the_parts_is_taken_as_a_workload():
    advice = memlab.advise(make, techniques=["attention", "checkpoint"])
    reasons = {one.name: one.failed for one in advice.findings.tried}
    assert "does not apply" in reasons["attention"], "which from outside could not even be tried"
    assert advice.recommended == ("checkpoint",)


@forks
def test_a_step_for_cuda_is_predicted_and_checked_by_a_run_of_the_changed_one():
    def on_card():
        with torch.device("cuda"):
            step()

    advice = memlab.advise(on_card, techniques=["checkpoint"], card="T4")
    assert advice.recommended == ("checkpoint",)
    assert min(advice.saved_bytes) > 0
    with pytest.raises(MemlabError, match=r"advice\.check\(memlab\.last_run\(\)\)"):
        advice.measure()
    with memlab.track("changed") as run:
        step()
    assert "said" in str(advice.check(run))
    with pytest.raises(MemlabError, match="check needs a run, got str"):
        advice.check("changed")  # type: ignore[arg-type]


def test_a_run_of_the_lab_is_run_again_with_what_it_had():
    run = run_workload(work_of("mlp", "tiny"), ["in_place"], timed=False)
    advice = memlab.advise(run, techniques=["sgd", "in_place"])
    assert advice.findings.name.endswith("+ in_place")
    assert advice.findings.left_out == (("in_place", "is in use"),)
    assert advice.findings.before_bytes[0] == run.peak_bytes
    assert advice.recommended == ("sgd",)
    runs.discard(run)


def test_a_target_that_is_there_already_needs_no_run():
    advice = memlab.advise(WORK, "1GiB")
    assert (advice.tried, advice.reaches, advice.recommended, advice.code) == ((), True, (), "")
    assert "already met" in advice.text
    with pytest.raises(MemlabError, match="nothing is recommended"):
        advice.measure()
    with pytest.raises(MemlabError, match="nothing to compare"):
        _ = advice.comparison


def test_without_a_target_a_card_that_is_too_small_is_one():
    card = memlab.Card("small", 64 << 20, (8, 6), context_bytes=(0, 0), multiprocessors=28)
    advice = memlab.advise(LARGE, card=card, techniques=["checkpoint"])
    assert advice.findings.target_bytes == card.usable_bytes
    assert advice.findings.of == "device"
    assert "No target was given" in advice.text
    assert "batch" not in advice.text, "which was not tried"
    (name,) = re.findall(r"With checkpoint the smallest GPU that it was predicted to fit is (.*) \(", advice.text)
    there = memlab.cards[name]
    with_it = run_workload(work_of(LARGE), ["checkpoint"], on=there, keep=False)
    assert with_it.fits == "yes"
    smaller = [one for one in memlab.cards.values() if one.usable_bytes < there.usable_bytes]
    assert all(with_it.for_card(one).fits != "yes" for one in smaller if one.compute_capability >= (8, 0))


def test_a_target_of_bytes_that_is_missed_names_no_gpu():
    card = memlab.Card("small", 64 << 20, (8, 6), context_bytes=(0, 0), multiprocessors=28)
    text = memlab.advise(LARGE, "1MiB", card=card, techniques=["checkpoint"]).text
    assert "is missed by" in text and "GPU" not in text


@forks
def test_a_peak_that_moves_is_followed_by_techniques_for_what_holds_it_then():
    def trains():
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
            optimizer.step()

    card = memlab.Card("small", 2000 << 20, (8, 9), context_bytes=(0, 0), multiprocessors=24)
    advice = memlab.advise(trains, card=card)
    assert "offload" not in [one.name for one in advice.tried], "activations hold little of the first peak"
    assert (set(advice.recommended), advice.reaches) == ({"offload", "step_in_backward"}, True)


def test_only_what_attacks_the_peak_is_tried_and_what_changes_training_only_when_allowed():
    subject = WorkloadSubject(work_of("mlp", "tiny"), "cpu")
    shares = {"optimizer": 90, "activation": 1, "parameter": 9}
    chosen, left_out = candidates(subject, shares, "allocated", None, allow_changes=False)
    assert not {"sgd", "checkpoint"} & set(chosen)
    assert "allow_changes=True" in dict(left_out)["sgd"]
    assert dict(left_out)["checkpoint"] == "acts on activation, which holds little of the peak"
    assert "sgd" in candidates(subject, shares, "allocated", None, allow_changes=True)[0]
    assert {"checkpoint"} <= set(candidates(subject, {}, "allocated", None, allow_changes=False)[0]), (
        "nobody knows who held it"
    )


def test_what_a_forward_without_a_graph_makes_counts_for_techniques_of_inference():
    def inference():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 100_000)).cuda().eval()
        with torch.no_grad():
            return nn.functional.cross_entropy(
                model(torch.randn(4096, 64, device="cuda")), torch.zeros(4096).long().cuda()
            )

    advice = memlab.advise(inference, card="A100 40GB")
    assert advice.recommended == ("half_inference",)
    assert not {"no_grad", "inference_mode", "checkpoint", "offload"} & {one.name for one in advice.tried}


def test_what_the_allocator_is_told_counts_for_a_card_and_its_device():
    card = memlab.cards["T4"]
    on_card, on_cpu = (WorkloadSubject(work_of("mlp", "tiny"), on) for on in (card, "cpu"))
    for name in [one.name for one in memlab.techniques.values() if one.conf]:
        shares = {"activation": 100}
        assert name in candidates(on_card, shares, "device", None, False)[0]
        assert name not in candidates(on_card, shares, "allocated", None, False)[0]
        assert "CUDA's allocator" in dict(candidates(on_cpu, shares, "device", None, False)[1])[name]


@forks
def test_a_setting_of_the_allocator_needs_no_further_child(monkeypatch):
    class Pieces:
        __hash__ = None  # a step may be an object that is compared by value

        def __call__(self) -> None:
            for size in (30, 50, 70, 90):
                torch.empty(size << 20, dtype=torch.uint8, device="cuda")

    pieces = Pieces()
    card, children, run = memlab.cards["T4"], [], Child.run
    monkeypatch.setattr(Child, "run", lambda child, *args: children.append(1) or run(child, *args))
    names = ("expandable_segments",)
    alone = OfStep("pieces", card, pieces).attempt(names, lambda text: None, 60)
    subject = OfStep("pieces", card, pieces)
    before = subject.attempt((), lambda text: None, 60)
    assert len(children) == 2
    after = subject.attempt(names, lambda text: None, 60)
    assert len(children) == 2 and isinstance(after, memlab.Prediction)
    assert after.peak_reserved_bytes == alone.peak_reserved_bytes < before.peak_reserved_bytes
    assert after.conf == alone.conf and after.peak_allocated_bytes == before.peak_allocated_bytes


@pytest.mark.parametrize(
    ("what", "more", "line"),
    [
        ("nonsense", {}, "nonsense"),
        (3, {}, "advise needs a workload, a step or a run, got int"),
        (WORK, {"target": "a lot"}, "not a size: 'a lot'"),
        (WORK, {"card": "no such card"}, "no such card"),
        (WORK, {"techniques": ["no such"]}, "there is no technique 'no such'"),
        (WORK, {"habits": ["no such"]}, "there is no technique 'no such'"),
        (WORK, {"steps": 0}, "steps is a number from 1 to 100"),
        (WORK, {"limit_s": -1}, "limit_s is a number of seconds above 0"),
        (WORK, {"size": "huge"}, "no size 'huge'"),
        (WORK, {"settings": {"colour": 1}}, "no setting 'colour'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(what, more, line):
    with pytest.raises(MemlabError, match=line):
        memlab.advise(what, **more)


def test_a_run_of_a_block_cannot_be_run_again():
    with memlab.track("a block") as run:
        step()
    with pytest.raises(MemlabError, match=r"run 'a block' cannot be run again.*memlab\.advise\(step\)"):
        memlab.advise(run)


def test_what_takes_more_than_before_is_not_said_to_save():
    said, measured = ((100, 100), (60, 60)), ((100, 100), (130, 130))
    found = Checked(("checkpoint",), "cpu", said, measured, False, None, "not checked", None, None)
    assert found.sentence == "It saves nothing and takes 30 B more; the advice said 40 B."
    frame = found.to_pandas()
    assert frame.loc["said"].tolist() == [100, 100, 60, 60, 40, 40]
    assert frame.loc["measured"].tolist() == [100, 100, 130, 130, -30, -30]


@forks
def test_a_step_that_fails_says_so_at_once():
    def broken():
        raise ValueError("the data is gone\nfor good")

    line = "the step failed when it was run again: ValueError: the data is gone for good"
    with pytest.raises(MemlabError, match=line):
        memlab.advise(broken)
    with pytest.raises(MemlabError, match='is it written for "cuda"'):
        memlab.advise(step, card="T4")


# --- where CUDA is ---


@pytest.mark.simulated
def test_it_is_measured_on_cuda_where_there_is_one():
    advice = memlab.advise(LARGE, techniques=["checkpoint"])
    assert (advice.findings.on, advice.recommended) == ("cuda", ("checkpoint",))
    assert advice.findings.tried[0].results == "not checked", "a simulated GPU computes nothing"


@pytest.mark.simulated
def test_what_was_predicted_for_this_device_is_what_its_allocator_says():
    with memlab.track("here") as run:
        torch.ones(1 << 20, device="cuda")
    card = card_of(run)
    assert card is not None
    advice = memlab.advise(LARGE, techniques=["checkpoint"], card=card)
    checked = advice.measure()
    assert checked.on == "cuda"
    assert abs(checked.off_bytes) <= 0.01 * sum(checked.measured[0]) / 2, str(checked)


@pytest.mark.simulated
def test_a_trial_on_cuda_is_run_again_there():
    run = run_workload(work_of("mlp", "tiny"), on="cuda", timed=False)
    advice = memlab.advise(run, techniques=["sgd"])
    assert (advice.findings.on, advice.recommended) == ("cuda", ("sgd",))
    runs.discard(run)


@pytest.mark.simulated
def test_a_step_for_this_device_is_not_measured_from_a_child():
    def step():
        with torch.device("cuda"):
            model, _, (x, y), loss = make(1 << 16)
        loss(model(x), y).backward()

    torch.ones(1, device="cuda")
    with pytest.raises(MemlabError, match="must not touch CUDA once this process has used it"):
        memlab.advise(step)
    assert memlab.advise(step, card="T4", techniques=["checkpoint"]).recommended == ("checkpoint",)


@pytest.mark.simulated
def test_an_out_of_memory_of_a_tracked_cell_points():
    held = []
    model = make()[0].to("cuda")
    error = None
    with memlab.track("full") as run:
        try:
            x = torch.randn(1 << 18, 64, device="cuda", requires_grad=True)
            while True:
                held.append(model(x))
        except torch.OutOfMemoryError as raised:
            error = raised
    run.cell_text = "the text of a cell"
    explained = note_oom(error, run)
    assert explained is not None
    last = explained.text.splitlines()[-1]
    assert "memlab.advise(memlab.runs['full'])" in last and " techniques, if any, would lower it" in last
    held.clear()
    keep_oom(None)


@pytest.mark.simulated
def test_on_a_simulated_gpu_no_seconds_count():
    said = str(memlab.advise("mlp", size="tiny", techniques=["checkpoint", "freezing"]))
    assert "on cuda, a simulated GPU: bytes are real, values and times are not" in said
    assert "times as long" not in said and "×" not in said
