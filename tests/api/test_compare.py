from __future__ import annotations

import dataclasses
import gc
import json
from types import SimpleNamespace

import pytest
import torch
from job_runs import no_new_runs
from scripted_traces import GPU, HOST, Script

import memlab
from memlab.analysis.comparison import Difference
from memlab.analysis.results import devices_of, read_result
from memlab.api import compare as comparing
from memlab.api import results
from memlab.api.compare import Comparison, compare
from memlab.api.results import serialized
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.trace import Bounded, Category, Device
from memlab.trace.trace import is_simulated_gpu
from memlab.units import ByteRange, MiB


def made(name: str, *sizes: int, duration: int = 10**9, device: Device = HOST, result: object = None, **notes) -> Run:
    """A run that holds activations of these sizes at its peak."""
    script = Script(device)
    for size in sizes:
        script.alloc(size, category=Category.ACTIVATION, module="net.0")
    run = Run(name, script.trace(duration=duration, notes={"name": name, **notes}))
    if result is not None:
        run.result(result)
    return run


def trial(name: str, nbytes: int, techniques: list[str], step_s: list[float], result: object = 1.0, **facts) -> Run:
    """A run as `memlab.api.workload_run` leaves it."""
    noted = {"workload": "net", "size": "tiny", "settings": {}, "steps": 3, "techniques": techniques, "habits": []}
    return made(name, nbytes, result=result, trial={**noted, "on": "cpu", "step_s": step_s, "notes": [], **facts})


def predict_step(name: str, low: int, high: int, size: int | None = None) -> Run:
    """A run as a prediction leaves it; its trace reaches `size`."""
    peaks = {"allocated": [low, high], "reserved": [low, high], "device used": [low, high]}
    card = Device(0, "Pretty Card 9", capacity_bytes=1 << 33)
    return made(name, size or low, device=card, prediction={"peaks": peaks})


@pytest.fixture(autouse=True)
def no_registry(monkeypatch):
    """What techniques promise is the registry's; here two of them are enough."""
    from memlab.saving_techniques import Equality

    known = {"checkpoint": Equality("exact"), "sgd": Equality("changes", why="another formula")}
    known = {name: SimpleNamespace(equality=equality) for name, equality in known.items()}
    monkeypatch.setattr(comparing, "techniques", known)
    gc.collect()
    yield from no_new_runs()


# --- the sentence ---


@pytest.mark.parametrize(
    ("turned", "peak", "times"),
    [
        (
            False,
            "with checkpoint: peak 412.0 MiB instead of 803.0 MiB (−391.0 MiB, −49 %)",
            "1.31 times as long (1.09 to 1.56)",
        ),
        (
            True,
            "without checkpoint: peak 803.0 MiB instead of 412.0 MiB (+391.0 MiB, +95 %)",
            "0.76 times as long (0.64 to 0.92)",
        ),
    ],
)
def test_the_sentence_says_bytes_seconds_and_whether_results_agree(turned, peak, times):
    a = trial("before", 803 * MiB, [], [1.0, 1.1, 0.9])
    b = trial("after", 412 * MiB, ["checkpoint"], [1.31, 1.2, 1.4])
    found = compare(*((b, a) if turned else (a, b)))
    assert found.sentence == f"{peak}, a step takes {times}, results equal bit for bit"


@pytest.mark.parametrize(
    ("of_a", "of_b", "words"),
    [
        (["checkpoint"], ["checkpoint"], "after"),
        ([], ["checkpoint", "sgd"], "with checkpoint + sgd"),
        (["checkpoint"], ["sgd"], "with sgd without checkpoint"),
    ],
)
def test_two_trials_are_called_after_what_makes_the_difference(of_a, of_b, words):
    found = compare(trial("before", 9, of_a, []), trial("after", 9, of_b, []))
    assert found.sentence.startswith(f"{words}: peak 9 B, as before")


def test_what_techniques_promise_stands_beside_what_came_of_it():
    found = compare(trial("a", 9, ["checkpoint"], [1.0]), trial("b", 9, ["checkpoint", "sgd"], [1.0], result=2.0))
    assert "results differ by 50 % of the largest value" in found.sentence
    assert found.notes == ("sgd changes training: another formula",)
    text = compare(trial("a", 9, [], []), trial("b", 9, ["checkpoint"], [])).text
    assert "checkpoint promises results that are equal bit for bit" in text


@pytest.mark.parametrize(
    ("size", "words"),
    [(100_000, "as before"), (99_999, "−1 B, −<0.1 %"), (99_900, "−0.1 %"), (50_000, "−50 %"), (300_000, "+200 %")],
)
def test_percents_are_never_more_exact_than_they_are(size, words):
    assert words in compare(made("a", 100_000), made("b", size)).sentence


def test_nothing_before_is_no_division_by_zero():
    empty = Run("empty", Script(HOST).trace(duration=10))
    assert "(+5 B, from nothing)" in compare(empty, made("b", 5)).sentence
    assert "as before" in compare(empty, Run("other", Script(HOST).trace(duration=10))).sentence


def test_the_same_run_twice_says_so():
    run = made("only", 100, result=1)
    found = compare(run, run)
    assert found.sentence == "only: the same run twice, so nothing differs; peak 100 B, as before"
    assert found.saved_bytes == 0


# --- predictions ---


def test_a_prediction_is_an_interval_and_nothing_of_it_was_checked():
    found = compare(made("measured", 800 * MiB, result=1), predict_step("predicted", 400 * MiB, 420 * MiB))
    assert found.saved_bytes == (380 * MiB, 400 * MiB)
    assert found.sentence == (
        "predicted: peak 400.0 to 420.0 MiB instead of 800.0 MiB (−380.0 MiB, −48 % to −400.0 MiB, −50 %), "
        "results not checked (predicted)"
    )
    assert found.seconds is None
    assert found.results.verdict == "not checked"
    assert "'predicted' is predicted for Pretty Card 9: no seconds, no values" in found.text
    assert not found.picture.has_times


def test_a_prediction_for_a_card_that_is_too_small_has_what_it_needs():
    found = compare(made("a", 100), predict_step("b", 1000, 1000, size=300))
    assert found.saved_bytes == -900
    assert found.by("category")["not attributed"] == Difference(0, 700)


def test_a_prediction_for_a_pytorch_whose_blocks_hang_on_addresses_keeps_its_range():
    found = [
        memlab.predict(lambda: torch.empty(MiB, device="cuda"), "T4", torch_version=one) for one in ("2.11", "2.13")
    ]
    (low, high), exact = found[0].allocated_bytes, found[1].allocated_bytes.low
    assert low < exact < high
    assert compare(*found).saved_bytes == ByteRange(low - exact, high - exact)
    assert compare(*found).by("category").total == Difference(exact, exact)


def test_a_measured_and_a_predicted_run_of_one_name_are_told_apart():
    found = compare(made("gpt", 5), predict_step("gpt", 6, 6))
    assert (found.side_a.name, found.side_b.name) == ("gpt (measured)", "gpt (predicted for Pretty Card 9)")
    assert compare(made("x", 1), made("x", 2)).side_a.name == "x (a)"


def test_a_peak_that_is_not_exact_is_an_interval_too():
    lost = by(made("x", 100), bounded=(Bounded(-1, 0, 5, 7),))
    found = compare(lost, made("b", 50))
    assert found.saved_bytes[0] == 50
    assert "by an unknown amount" in found.sentence
    assert "≥ 100 B" in found.sentence


# --- seconds ---


def test_seconds_are_the_median_of_timed_steps():
    found = compare(trial("a", 9, [], [1.0, 9.0, 1.2]), trial("b", 9, [], [2.4, 2.0, 3.0]))
    assert (*found.seconds,) == (1.2, 2.4)
    assert (found.seconds.of, found.seconds.ratio, found.seconds[1]) == ("step", 2.0, 2.4)
    assert found.seconds.ratios == (2.0 / 9.0, 3.0)
    assert "2.00 times as long (0.22 to 3.00)" in found.sentence and "2.00 times as long (0.22 to 3.00)" in found.text


def test_without_timed_steps_the_runs_of_one_engine_are_compared():
    found = compare(made("a", 9, duration=10**9), made("b", 9, duration=3 * 10**9))
    assert (*found.seconds,) == (1.0, 3.0)
    assert "the run took 3.00 times as long" in found.sentence
    assert "Seconds are those of the whole runs" in found.text
    before, now = by(made("a", 9), engine="CPU dispatch tally"), by(made("b", 9), engine="CPU tensor tracker")
    assert compare(before, now).seconds is not None  # an engine that was renamed


def by(run: Run, **facts: object) -> Run:
    """The same run, made by another."""
    return Run(run.name, dataclasses.replace(run.trace, made_by=dataclasses.replace(run.trace.made_by, **facts)))


@pytest.mark.parametrize(
    "other",
    [
        by(made("b", 9), engine="another"),
        by(made("b", 9), engine="fake CUDA, from a snapshot"),
        made("b", 9, duration=0),
        made("b", 9, device=Device(0, "FakeGPU sm_80")),
    ],
)
def test_runs_of_different_engines_or_of_no_time_have_no_seconds(other):
    assert compare(made("a", 9), other).seconds is None


@pytest.mark.parametrize("step_s", [None, 5, ["1"], [float("nan")], [-1.0], [0.0], [True]])
def test_times_from_a_file_that_are_none_do_not_count(step_s):
    found = compare(trial("a", 9, [], step_s), trial("b", 9, [], [1.0]))
    assert found.seconds.of == "run"


# --- results ---


@pytest.mark.parametrize(
    ("a", "b", "short"),
    [
        (made("a", 1), made("b", 1, result=1), "no result"),
        (made("a", 1, result=1), made("b", 1), "no result"),
        (made("a", 1, result=1, device=Device(0, "FakeGPU sm_80")), made("b", 1, result=1), "simulated GPU"),
        (trial("a", 1, [], []), trial("b", 1, [], [], size="laptop"), "other work"),
        (trial("a", 1, [], []), trial("b", 1, [], [], settings={"batch": 2}), "other work"),
    ],
)
def test_what_was_not_checked_is_never_passed(a, b, short):
    found = compare(a, b).results
    assert (found.verdict, found.short) == ("not checked", f"not checked ({short})")
    assert (found.largest_difference, found.relative) == (None, None)


def test_a_damaged_result_in_a_file_is_said_and_the_rest_is_compared():
    a, b = made("a", 5, result=1), made("b", 7)
    b.note("result", {"version": 1, "value": {"kind": "evil"}})
    found = compare(a, b)
    assert found.results.short == "not checked (unreadable)"
    assert "cannot be read" in found.text
    assert found.saved_bytes == -2


def test_a_run_on_the_cpu_and_one_on_a_card_are_compared_and_their_engines_named():
    found = compare(made("a", 5, result=torch.ones(2)), made("b", 5, result=torch.ones(2), device=GPU))
    assert found.results.verdict == "equal"
    assert "round differently" in found.results.notes[0]
    assert "'a' was on cpu, 'b' on cuda:0" in found.text


def test_what_is_close_can_be_said():
    a, b = made("a", 5, result=1.0), made("b", 5, result=1.01)
    assert [compare(a, b, **how).results.verdict for how in ({}, {"tolerance": 0.02})] == ["different", "close"]


# --- which runs ---


def test_runs_are_found_by_name_by_last_and_by_file(tmp_path):
    with memlab.track("first one", show=False) as first:
        first.result(1)
    path = first.save(tmp_path / "saved.memlab")
    with memlab.track("second", show=False) as second:
        second.result(1)
    assert compare("first one", "second").b is second
    assert compare("first one", "last").b is second
    assert compare(second, path).results.verdict == "equal"
    assert compare(str(path), second).side_a.name == "first one"


@pytest.mark.parametrize("what", ["nobody", 5, None, b"x", "a\0b", "x" * 5000, "<script>"])
def test_what_is_no_run_is_refused_in_one_line(what):
    for pair in ((made("a", 1), what), (what, made("a", 1))):
        with pytest.raises(MemlabError) as caught:
            compare(*pair)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700


def test_a_run_without_figures_is_refused(tmp_path):
    with memlab.track("open", show=False) as run, pytest.raises(MemlabError, match="still going on"):
        compare(run, run)
    none, one = Script(), made("a", 1)
    none.devices = ()
    for other, more, words in ((Run("none", none.trace()), {}, "used no device"), (tmp_path / "absent", {}, "no file"),
                               (one, {"tolerance": "x"}, "tolerance is a share")):  # fmt: skip
        with pytest.raises(MemlabError, match=words):
            compare(one, other, **more)


@pytest.mark.parametrize("facts", [{}, {"peaks": 5}, {"peaks": {"allocated": "x"}}, {"peaks": {"allocated": [1]}}])
def test_a_file_that_only_says_it_holds_a_prediction_is_refused_in_one_line(facts):
    with pytest.raises(MemlabError, match="cannot be read") as caught:
        compare(made("a", 1), made("b", 1, device=GPU, prediction=facts))
    assert "\n" not in str(caught.value)


def test_several_devices_are_named():
    script = Script(GPU, Device(1, "second"))
    script.alloc(100)
    script.alloc(50, device=1)
    found = compare(Run("two", script.trace(duration=10)), made("b", 10))
    assert "'two' used cuda:1 as well; compared is cuda:0" in found.text


# --- measured ---


def test_two_measured_runs_with_their_categories_and_modules():
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    found: list[Run] = []
    for batch in (64, 256):
        with memlab.track(f"batch {batch}", show=False) as run:
            x = torch.ones(batch, 64)
            loss = net(x).square().mean()
            loss.backward()
            run.result(loss)
        net.zero_grad()
        found.append(run)
    both = compare(*found)
    assert both.saved_bytes == found[0].peak_bytes - found[1].peak_bytes < 0
    for by in ("category", "module"):
        assert both.by(by).total == Difference(found[0].peak_bytes, found[1].peak_bytes)
    assert both.by("category")["activation"].difference_bytes > 0
    assert both.by("category")["parameter"].difference_bytes == 0
    frame = both.to_pandas()
    assert set(frame["by"]) == {"category", "module"}
    assert frame[frame["by"] == "module"]["difference_bytes"].sum() == -both.saved_bytes


def test_a_comparison_prints_and_shows_itself(capsys):
    found = compare(made("a", 5, result=1), made("b", 7, result=1))
    assert isinstance(found, Comparison)
    assert str(found) == found.text
    assert found.sentence in found.text
    assert found.sentence in repr(found)
    found._ipython_display_()
    assert capsys.readouterr().out == found.text + "\n"
    assert json.loads(json.dumps(found.bundle())) == found.bundle()
    assert {*found.figure_bundle(), *found.table_bundle()} == {*found.bundle()}


# --- where the CUDA build runs; on the simulated GPU no value is ever passed ---


def tracked(name: str, size: int, note: bool = True, **options) -> Run:
    with memlab.track(name, show=False, **options) as run:
        kept = torch.empty(size, dtype=torch.uint8, device="cuda")
        if note:
            run.result([kept[:10], kept[::1000]])
        del kept
    return run


@pytest.mark.simulated
def test_values_of_the_simulated_gpu_are_never_passed():
    a, b = tracked("a", 8 * MiB), tracked("b", 4 * MiB)
    found = compare(a, b)
    assert found.saved_bytes == 4 * MiB
    assert found.results.verdict == "not checked"
    assert found.results.short == "not checked (simulated GPU)"
    assert found.seconds is None
    assert "ran on a simulated GPU" in found.text
    assert found.by("category").total == Difference(a.peak_bytes, b.peak_bytes)


@pytest.mark.simulated
def test_a_value_that_comes_from_the_simulated_gpu_is_known_by_its_name_in_runs_of_the_cpu_too():
    with memlab.track("cpu", device="cpu", show=False) as run:
        torch.ones(5)
        run.result({"x": [torch.ones(3, device="cuda")]})
    assert is_simulated_gpu(devices_of(run.trace.notes["result"])[0])
    with memlab.track("other", device="cpu", show=False) as other:
        torch.ones(5)
        other.result({"x": [torch.ones(3)]})
    assert compare(run, other).results.short == "not checked (simulated GPU)"
    assert compare(other, other).results.verdict == "equal"


@pytest.mark.simulated
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x, lambda x: x.t(), lambda x: x[::3], lambda x: x[:, ::2], lambda x: x.bfloat16().t(),
        lambda x: x.expand(2, *x.shape), lambda x: torch.complex(x, x).conj(), lambda x: x[:0],
        lambda x: x.permute(1, 0)[5:, 7:], lambda x: torch.complex(x, x).conj().imag, torch._neg_view,
        lambda x: torch.complex(x, x).conj()[::2].t(),
    ],
)  # fmt: skip
def test_noting_takes_no_memory_of_the_device(make):
    value = make(torch.empty(300, 700, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    note = serialized(value)
    after = torch.cuda.memory_stats()
    for figure in ("allocation.all.allocated", "allocated_bytes.all.peak", "reserved_bytes.all.peak"):
        assert after[figure] == before[figure], figure
    assert read_result(note)[()].shape == tuple(value.shape)


@pytest.mark.simulated
def test_noting_a_tensor_too_large_to_be_read_takes_none_either(monkeypatch):
    monkeypatch.setattr(results, "READ_BYTES", MiB)
    value = torch.empty(3000, 700, device="cuda").t()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert read_result(serialized(value))[()].sha256 == ""
    assert read_result(serialized(value[::2, ::2]))[()].sha256 == ""
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.simulated
def test_a_result_inside_of_a_run_does_not_change_its_figures():
    runs_ = [tracked("plain", 8 * MiB, note=False), tracked("noted", 8 * MiB)]
    assert runs_[0].peak_bytes == runs_[1].peak_bytes
    assert len({run.peak_reserved_bytes for run in runs_}) == 1


@pytest.mark.simulated
def test_a_run_of_the_cpu_against_one_of_cuda_and_against_a_prediction():
    with memlab.track("cpu", device="cpu", show=False) as cpu:
        torch.ones(MiB)
    # Before 2.12 a peak is a range, as it hangs on where the driver puts segments.
    how = {"name": "predicted", "torch_version": "2.12"}
    predicted = memlab.predict(lambda: torch.empty(MiB, device="cuda"), "RTX 4060", **how)
    for other in (tracked("cuda", 8 * MiB), predicted):
        found = compare(cpu, other)
        assert found.results.verdict == "not checked"
        assert found.by("category").total.b_bytes == found.side_b.peak.low
        assert "cuda:0" in found.text
        assert found.seconds is None
