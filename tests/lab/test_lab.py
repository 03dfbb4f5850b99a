"""A Lab without a front end: runs, comparisons, the table, files, code."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from lab_samples import Listener, tiny
from processes import python
from torch import nn

import memlab
from memlab import Lab
from memlab.api import workload_run
from memlab.api.advise.search import level
from memlab.api.runs import runs
from memlab.errors import DoesNotApply, MemlabError
from memlab.lab import experiment
from memlab.lab.experiment import HostMemoryTooSmall
from memlab.lab.run_table import LabRun, RunTable
from memlab.lab.state import LabState
from memlab.probes.host import HostMemory, HostReading
from memlab.units import GiB, MiB
from memlab.workloads.workload import Workload

SAVING = "checkpoint_sequential"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def counted(monkeypatch):
    """Every workload that is run, as (techniques, habits)."""
    seen, real = [], workload_run.run_workload

    def run_workload(work, chosen=(), habits=(), **more):
        seen.append((tuple(chosen), tuple(habits)))
        return real(work, chosen, habits, **{**more, "timed": False})

    monkeypatch.setattr(workload_run, "run_workload", run_workload)
    return seen


def lab(**state) -> Lab:
    return Lab(tiny, **{"steps": 1, "force": True, **state})


def test_a_run_with_a_technique_is_compared_with_the_plain_job_which_runs_once(counted):
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    one = lab()
    run = one.run(techniques=[SAVING])
    assert torch.equal(torch.randn(3), expected)  # the user's random numbers go on where they were
    assert counted == [((), ()), ((SAVING,), ())]
    assert memlab.runs[run.name] is run
    assert one.comparison.b is run
    assert one.comparison.a.peak_bytes > run.peak_bytes
    assert one.sentence == f"tiny, measured on CPU, {one.comparison.sentence}."
    assert one.found is one.result and one.rows[0].where == one.rows[0].state.where  # as they were called before
    assert SAVING in str(one)
    table = one.table
    assert list(table["techniques"]) == ["", SAVING]
    assert table["saved_bytes"][1] == one.comparison.a.peak_bytes - run.peak_bytes
    assert table["results"][1] == "equal"
    one.run()
    assert counted[2:] == [((SAVING,), ())]
    assert one.rows[1].name != one.rows[2].name
    one.run(steps=2)  # is another job
    assert len(counted) == 5


def test_progress_says_which_run_from_the_first_moment_and_its_steps_only_rise(counted):
    told: list[tuple[str, int, int]] = []
    one = lab(steps=3)
    one.listener = Listener(lambda *what: told.append(what))
    one.run(techniques=[SAVING])
    assert told[0][1:] == (0, 3)
    for what in {what for what, _, _ in told}:
        counts = [(done, total) for which, done, total in told if which == what]
        assert counts == sorted(counts) and len({total for _, total in counts}) == 1, what


def test_without_a_technique_there_is_one_run_and_nothing_to_compare(counted):
    one = lab()
    one.run()
    assert counted == [((), ())]
    assert "peak" in one.sentence
    with pytest.raises(MemlabError, match="nothing was compared yet"):
        _ = one.comparison


def test_a_pinned_run_is_the_baseline_and_any_two_are_compared(counted):
    one = lab(techniques=[SAVING])
    first = one.run()
    one.pin()
    one.run(techniques=["in_place"])
    assert one.comparison.a is first
    assert one.state["baseline"] == first.name
    assert len(counted) == 3
    names = [row.name for row in one.rows]
    comparison = one.compare(names[2], names[0])
    assert (comparison.a.name, comparison.b.name) == (names[2], names[0])
    assert one.comparison is comparison
    assert one.rows[0].against == names[2]
    with pytest.raises(MemlabError, match=r"this Lab has no run .nonsense."):
        one.compare("nonsense")
    one.state = {"baseline": ""}
    one.run()
    assert one.comparison.a is one.rows[0].run


def test_what_the_notebook_holds_is_no_loss_of_a_technique(counted):
    one = lab(techniques=[SAVING])
    one.run()
    saved = one.comparison.saved_bytes
    assert one.result.remark == ""
    held = torch.zeros(25 << 20)  # 100 MiB
    one.run()
    assert counted[2:] == [((SAVING,), ()), ((), ())]  # the plain job once more, beside what is there now
    assert one.comparison.saved_bytes == saved == one.rows[2].saved_bytes.low
    assert "The peaks include 100.0 MiB that was there before: without that, peak 4.6" in one.sentence
    assert one.sentence.endswith("(−991.5 KiB, −17 %).")
    assert one.table["start_bytes"][0] < saved and one.table["start_bytes"][3] >= held.nbytes
    one.run()
    assert counted[4:] == [((SAVING,), ())]  # both start alike
    one.run(techniques=[])
    assert "100.0 MiB of the peak was there before the run: without that, " in one.sentence
    one.compare(one.names[2], one.names[0])  # what was asked for is shown, with what makes the difference
    assert "100.0 MiB and " in one.result.remark
    del held
    one.run(techniques=[SAVING])
    assert one.comparison.a.name == one.names[0] and one.result.remark == ""


def test_a_pinned_run_that_started_with_other_contents_is_no_baseline(counted):
    one = lab(techniques=["in_place"])
    one.run()
    pinned = one.pin()
    held = torch.zeros(25 << 20)
    one.run(techniques=[SAVING])
    assert one.comparison.a.name != pinned and one.comparison.saved_bytes > 0
    assert f"{pinned!r} is pinned but not compared: " in one.sentence and "100.0 MiB before this run." in one.sentence
    one.run(techniques=[])
    assert one.result.comparison is None and held.any() == 0


def test_a_pinned_run_of_another_workload_or_device_is_no_baseline(counted):
    one = Lab(workloads={"tiny": tiny, "other": lambda: tiny()}, steps=1, force=True)
    one.run()
    pinned = one.pin()
    one.run(workload="other")
    assert one.result.comparison is None
    assert one.rows[-1].saved_bytes is None
    assert f"{pinned!r} is pinned but not compared: its workload, size or device differs." in one.sentence
    one.run(techniques=[SAVING])  # is compared with the plain job of its own
    assert (one.comparison.a.name, one.comparison.b.name) == ("other", f"other + {SAVING}")
    assert one.run(workload="tiny", techniques=["in_place"]) is one.comparison.b
    assert one.comparison.a.name == pinned
    one.run(techniques=[], card="RTX 4060")
    assert one.result.comparison is None


def test_an_inapplicable_technique_is_left_out_and_named(counted):
    one = lab()
    one.run(techniques=[SAVING, "conv_bn_fusion"])
    row = one.rows[-1]
    assert row.techniques == (SAVING,) and set(row.left_out) == {"conv_bn_fusion"}
    assert "left out conv_bn_fusion" in one.table["note"].iloc[-1]
    assert one.comparison.saved_bytes > 0
    one.run(techniques=["densenet", "foreach_off"])  # a step finds out that the first does not apply
    assert one.rows[-1].techniques == ("foreach_off",) and "densenet" in one.rows[-1].left_out


def test_where_nothing_applies_the_baseline_is_kept(counted):
    one = lab(techniques=["conv_bn_fusion"])
    with pytest.raises(DoesNotApply):
        one.run()
    assert [row.name for row in one.rows] == ["tiny"], "nothing was run that could have figures"
    assert one.sentence.startswith("tiny + conv_bn_fusion: ") and one.sentence.count("conv_bn_fusion") == 1
    assert one.problem in one.sentence
    assert not one.is_running


def test_an_error_of_the_users_is_kept_in_the_table_and_raised():
    def broken():
        raise ValueError("<b>no data</b>")

    one = Lab(broken, force=True)
    with pytest.raises(ValueError, match="no data"):
        one.run()
    assert one.table["note"][0] == "ValueError: <b>no data</b>"
    assert "Traceback" in one.details and "<b>" not in one.listing().html()


def test_runs_that_cannot_be_compared_are_there_all_the_same(counted, monkeypatch):
    def refuse(a, b):
        raise MemlabError("two worlds")

    monkeypatch.setattr(experiment, "compare", refuse)
    one = lab(techniques=[SAVING])
    with pytest.raises(MemlabError, match="two worlds"):
        one.run()
    assert len(one.names) == 2 and one.problem == "two worlds"


def huge():
    """About 20 GiB: it runs without data only."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    model = nn.Sequential(*layers)
    rows = torch.randn(1 << 17, 4096)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (rows, rows), nn.functional.mse_loss


def test_a_prediction_says_first_of_all_whether_it_fits():
    one = Lab(workloads={"tiny": tiny, "huge": huge}, steps=1, card="RTX 4060")
    run = one.run()
    assert run.card.name == "RTX 4060"
    assert one.sentence.startswith("Fits on RTX 4060: needs ")
    one.run(workload="huge")
    assert one.sentence.startswith("Does not fit on RTX 4060: needs ")
    assert " GiB usable. huge on RTX 4060, predicted for RTX 4060: peak " in one.sentence
    assert one.table["how"].tolist() == ["predicted", "predicted"]
    assert one.table["fits"].tolist() == ["yes", "no"]
    assert one.table["step_s"].isna().all()
    assert "  fits" in one.listing().text()
    low, high = one.rows[0].peak_bytes
    assert 0 < low <= high


def test_a_prediction_can_be_for_another_pytorch():
    one = Lab(tiny, steps=1, card="T4", techniques=["accumulation"], torch_version="2.10")
    run = one.run()
    assert run.trace.made_by.versions["torch"] == "2.10"
    assert one.sentence.startswith("Fits on T4 with PyTorch 2.10: needs ")
    assert "'torch_version': '2.10'" in one.code()
    before = one.rows[0]
    one.run(torch_version="")
    assert one.rows[-1].against != before.name, "another PyTorch is another baseline"
    assert "torch_version" not in one.code()
    one.state = {"device": "cpu", "torch_version": "2.10"}
    assert "torch_version" not in one.code()


def test_what_is_saved_is_read_again_and_files_of_others_stay(counted, tmp_path):
    one = lab(techniques=[SAVING])
    with pytest.raises(MemlabError, match="no run yet"):
        one.save(tmp_path)
    one.run()
    folder = one.save(tmp_path / "runs")
    files = sorted(folder.glob("*.memlab"))
    assert [memlab.load(file).name for file in files] == one.names
    assert SAVING in (folder / "table.csv").read_text()
    one.run(techniques=["in_place"])
    one.save(folder)
    assert len(list(folder.glob("*.memlab"))) == 3
    (tmp_path / "table.csv").write_text("mine")
    with pytest.raises(MemlabError, match=r"table.csv' is there already"):
        one.save(tmp_path)
    assert (tmp_path / "table.csv").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(MemlabError, match="cannot save to"):
        one.save(tmp_path / "file")


@pytest.mark.parametrize("folder", ["", " ", None, 5])
def test_a_folder_that_is_none_is_refused_in_one_line(folder):
    with pytest.raises(MemlabError, match="name a folder"):
        RunTable().save(folder)


def test_old_runs_are_dropped_where_there_are_too_many_bytes(counted, monkeypatch):
    monkeypatch.setattr("memlab.lab.run_table.MOST_BYTES", 1)
    one = lab()
    one.run()
    one.pin()
    one.run()
    one.run()
    assert [row.run is None for row in one.rows] == [False, True, False]
    assert one.rows[1].peak_bytes == one.rows[0].peak_bytes
    with pytest.raises(MemlabError, match="dropped"):
        one.compare(one.rows[1].name)


@pytest.mark.slow
def test_the_code_of_a_row_runs_as_it_stands(tmp_path):
    one = Lab("mlp", size="tiny", techniques=["in_place"], steps=1, force=True)
    one.run()
    file = tmp_path / "again.py"
    file.write_text(one.code(one.rows[-1].name))
    assert str(one.rows[-1].peak_bytes) in python(file)


def test_the_code_names_the_users_function_and_card():
    one = Lab(tiny, card=memlab.Card("mine", total_bytes="6GiB", compute_capability=(8, 6)))
    code = one.code()
    compile(code, "code", "exec")
    assert "def tiny()" in code and "memlab.Card(name='mine'" in code and "'card': card" in code
    assert "NotImplementedError" in Lab(workloads={"mine": lambda: None}).code()


def test_a_lab_that_runs_does_not_begin_again_and_an_interrupt_leaves_nothing(counted):
    one, tries = lab(), []
    one.listener = Listener(lambda *_: tries.append(one.start()))  # what is shown is shown while it runs
    one.run()
    assert tries and not any(tries)

    def interrupt(*_):
        raise KeyboardInterrupt

    one.listener = Listener(interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert not one.is_running and len(one.rows) == 1 and "Stopped" in one.problem


def test_a_lower_bound_is_not_called_exact():
    """A storage that another thread resized: only its sizes are unknown, so the peak has a lower bound alone."""
    with memlab.track(show=False, device="cpu") as run:
        resized = torch.ones(1000)
        resizer = threading.Thread(target=resized.untyped_storage().resize_, args=(8000,))
        resizer.start()
        resizer.join()
    row = LabRun.of(run, LabState(""), (), ())
    assert row.peak_bytes == level(run, "allocated") == run.devices[0].levels[0].peak.bytes
    assert row.peak_bytes.high > row.peak_bytes.low
    assert math.isnan(row.facts()["peak_high_bytes"])


# --- a run that may need more memory than the host has ---

SIZED = Workload("sized", "a test", tiny, {"tiny": {}, "laptop": {}, "card": {}})


@pytest.fixture
def host(monkeypatch):
    """Sets what is free on the host."""

    def free(count: int) -> None:
        monkeypatch.setattr(HostMemory, "read", lambda self: HostReading(0, count, 16 * GiB))

    return free


def test_too_little_free_memory_is_refused_and_can_be_allowed(host):
    host(100 * MiB)
    lab = Lab(SIZED, size="tiny", steps=1)
    with pytest.raises(HostMemoryTooSmall, match=r"should have 1.00 GiB on the host, and 100.0 MiB is free"):
        lab.run()
    assert lab.rows == ()
    assert 'tick "measure even if host memory may not be enough" (force=True)' in lab.problem
    assert lab.run(force=True).peak_bytes > 0


def test_the_need_of_a_large_one_is_predicted_first(host):
    host(6 * MiB)
    lab = Lab(SIZED, size="card", steps=1)
    before = list(runs)
    with pytest.raises(HostMemoryTooSmall, match=r"needs about 2\d.\d+ MiB on the host, and 6.00 MiB is free"):
        lab.run()
    assert list(runs) == before
    assert lab.run(card="RTX 4060").allocated_bytes[0] > 0  # a prediction needs no room
    host(GiB // 2)
    assert lab.run(device="cpu").peak_bytes > 0  # less than is asked of a laptop's size, as the need is known
