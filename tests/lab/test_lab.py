"""A Lab without a front end: runs, comparisons, the table, files, code."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lab_samples import FakeComparison, tiny

import memlab
from memlab import Lab
from memlab.errors import DoesNotApply, MemlabError
from memlab.lab import experiment
from memlab.lab.table import Table
from memlab.session import trial as trials


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def counted(monkeypatch):
    """Every trial that is run, as (techniques, habits)."""
    seen, real = [], trials.trial

    def trial(work, chosen=(), habits=(), **more):
        seen.append((tuple(chosen), tuple(habits)))
        return real(work, chosen, habits, **{**more, "timed": False})

    monkeypatch.setattr(trials, "trial", trial)
    return seen


SAVING = "checkpoint_sequential"


def lab(**state) -> Lab:
    return Lab(tiny, **{"steps": 1, "force": True, **state})


def test_a_run_with_a_technique_is_compared_with_the_plain_job(counted):
    one = lab()
    run = one.run(techniques=[SAVING])
    assert counted == [((), ()), ((SAVING,), ())]
    assert one.comparison.b is run
    assert one.comparison.a.peak_bytes > run.peak_bytes
    assert one.sentence == one.comparison.sentence
    assert SAVING in str(one)
    table = one.table
    assert list(table["techniques"]) == ["", SAVING]
    assert table["saved_bytes"][1] == one.comparison.a.peak_bytes - run.peak_bytes
    assert table["results"][1] == "equal"


def test_a_baseline_that_is_known_is_not_run_again(counted):
    one = lab(techniques=[SAVING])
    one.run()
    one.run()
    one.run(techniques=["in_place"])
    assert [chosen for chosen, _ in counted] == [(), (SAVING,), (SAVING,), ("in_place",)]
    assert one.rows[1].name != one.rows[2].name
    one.run(steps=2)
    assert len(counted) == 6


def test_without_a_technique_there_is_one_run_and_nothing_to_compare(counted):
    one = lab()
    one.run()
    assert counted == [((), ())]
    assert "peak" in one.sentence
    with pytest.raises(MemlabError, match="nothing was compared yet"):
        _ = one.comparison


def test_a_pinned_run_is_the_baseline(counted):
    one = lab(techniques=[SAVING])
    first = one.run()
    one.pin()
    one.run(techniques=["in_place"])
    assert one.comparison.a is first
    assert one.state["baseline"] == first.name
    assert len(counted) == 3
    one.state = {"baseline": ""}
    one.run()
    assert one.comparison.a is one.rows[0].run


def test_any_two_are_compared(counted):
    one = lab(techniques=[SAVING])
    one.run()
    one.run(techniques=["in_place"])
    names = [row.name for row in one.rows]
    found = one.compare(names[2], names[1])
    assert (found.a.name, found.b.name) == (names[2], names[1])
    assert one.comparison is found
    assert one.rows[1].against == names[2]
    with pytest.raises(MemlabError, match=r"this Lab has no run .nonsense."):
        one.compare("nonsense")


def test_what_does_not_apply_is_left_out_and_said(counted):
    one = lab()
    one.run(techniques=[SAVING, "conv_bn_fusion"])
    row = one.rows[-1]
    assert row.techniques == (SAVING,)
    assert "conv_bn_fusion" in row.left_out
    assert "left out conv_bn_fusion" in one.table["note"].iloc[-1]
    assert one.comparison.saved_bytes > 0


def test_what_turns_out_in_a_step_not_to_apply_is_left_out_too(counted):
    one = lab()
    with pytest.raises(DoesNotApply):
        one.run(techniques=["densenet"])
    one.run(techniques=["densenet", "foreach_off"])
    assert one.rows[-1].techniques == ("foreach_off",)
    assert "densenet" in one.rows[-1].left_out


def test_where_nothing_applies_the_baseline_is_kept(counted):
    one = lab(techniques=["conv_bn_fusion"])
    with pytest.raises(DoesNotApply):
        one.run()
    assert [row.run is None for row in one.rows] == [False, True]
    assert "conv_bn_fusion" in one.sentence
    assert "conv_bn_fusion" in one.problem
    assert not one.is_running


def test_an_error_of_the_users_is_kept_in_the_table_and_raised():
    def broken():
        raise ValueError("<b>no data</b>")

    one = Lab(broken, force=True)
    with pytest.raises(ValueError, match="no data"):
        one.run()
    assert one.table["note"][0] == "ValueError: <b>no data</b>"
    assert "Traceback" in one.details
    assert "<b>" not in one.listing().html().replace("<b>Runs of this Lab (1)</b>", "")


def test_runs_that_cannot_be_compared_are_there_all_the_same(counted, monkeypatch):
    def refuse(a, b):
        raise MemlabError("two worlds")

    monkeypatch.setattr(experiment, "compare", refuse)
    one = lab(techniques=[SAVING])
    with pytest.raises(MemlabError, match="two worlds"):
        one.run()
    assert len(one.names) == 2
    assert one.problem == "two worlds"


def test_a_run_has_a_name_in_memlabs_runs(counted):
    run = lab().run()
    assert memlab.runs[run.name] is run


def test_the_users_random_numbers_go_on_where_they_were(counted):
    torch.manual_seed(3)
    expected = torch.randn(3)
    torch.manual_seed(3)
    lab().run()
    assert torch.equal(torch.randn(3), expected)


def test_predicted_for_a_card_without_one():
    one = lab(card="RTX 4060", techniques=[SAVING])
    run = one.run()
    assert run.card.name == "RTX 4060"
    assert one.table["how"].tolist() == ["predicted", "predicted"]
    assert one.table["step_s"].isna().all()
    low, high = one.rows[0].peak_bytes
    assert 0 < low <= high


@pytest.mark.parametrize("folder", ["", " ", None, 5])
def test_a_folder_that_is_none_is_refused_in_one_line(folder):
    with pytest.raises(MemlabError, match="name a folder"):
        Table().save(folder)


def test_what_is_saved_is_read_again(counted, tmp_path):
    one = lab(techniques=[SAVING])
    one.run()
    folder = one.save(tmp_path / "runs")
    files = sorted(folder.glob("*.memlab"))
    assert [memlab.load(file).name for file in files] == one.names
    assert SAVING in (folder / "table.csv").read_text()
    one.run(techniques=["in_place"])
    one.save(folder)
    assert len(list(folder.glob("*.memlab"))) == 3


def test_files_of_others_are_not_written_over(counted, tmp_path):
    one = lab()
    with pytest.raises(MemlabError, match="no run yet"):
        one.save(tmp_path)
    one.run()
    (tmp_path / "table.csv").write_text("mine")
    with pytest.raises(MemlabError, match=r"table.csv' is there already"):
        one.save(tmp_path)
    assert (tmp_path / "table.csv").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(MemlabError, match="cannot save to"):
        one.save(tmp_path / "file")
    with pytest.raises(MemlabError, match="name a folder"):
        one.save(" ")


def test_old_runs_are_let_go_where_there_are_too_many_bytes(counted, monkeypatch):
    monkeypatch.setattr("memlab.lab.table.MOST_BYTES", 1)
    one = lab()
    one.run()
    one.pin()
    one.run()
    one.run()
    assert [row.run is None for row in one.rows] == [False, True, False]
    assert one.rows[1].peak_bytes == one.rows[0].peak_bytes
    with pytest.raises(MemlabError, match="let go"):
        one.compare(one.rows[1].name)


@pytest.mark.slow
def test_the_code_of_a_row_runs_as_it_stands(tmp_path):
    one = Lab("mlp", size="tiny", techniques=["in_place"], steps=1, force=True)
    one.run()
    file = tmp_path / "again.py"
    file.write_text(one.code(one.rows[-1].name))
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak = one.rows[-1].cells()[0]
    assert peak in done.stdout


def test_a_lab_that_runs_does_not_begin_again(counted):
    one, tries = lab(), []
    one._tell = lambda *_: tries.append(one.start())  # what is told is told in the run
    one._experiment._tell = one._tell
    one.run()
    assert tries
    assert not any(tries)


def test_an_interrupt_ends_the_run_and_nothing_is_left(counted):
    one = lab()

    def interrupt(*_):
        raise KeyboardInterrupt

    one._experiment._tell = interrupt
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert not one.is_running
    assert len(one.rows) == 0
    assert "Stopped" in one.problem


def test_a_fake_comparison_has_the_face_that_is_used(counted, monkeypatch):
    monkeypatch.setattr(experiment, "compare", FakeComparison)
    one = lab()
    one.run(techniques=[SAVING])
    assert one.sentence.startswith("tiny + ")
