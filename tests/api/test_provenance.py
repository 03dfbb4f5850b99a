"""Wherever figures of a simulated GPU stand it is said, and no seconds are shown: of recorded runs, and of what is read live."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_traces import error, trained
from scripted_traces import Script

import memlab
from memlab.analysis.oom.explain import explain
from memlab.analysis.oom.facts import Failure
from memlab.analysis.oom.text import Message, read_message
from memlab.api import provenance
from memlab.api.display import LevelNow
from memlab.api.oom import ReleaseReport, explain_oom, keep_oom, note_oom, note_predicted_oom
from memlab.api.run import Run
from memlab.integrations.training import CallbackOptions, MeasuredTraining
from memlab.lesson import Lesson
from memlab.lesson.sweep import Sweep
from memlab.references.release import HeldLevel, Released
from memlab.scripts import run_page
from memlab.scripts.measured_script import MeasuredScript
from memlab.scripts.recording import Wanted
from memlab.scripts.step_times import StepTimes
from memlab.trace import Device, Phase, Trace
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import ByteRange, MiB
from memlab.views.live import LiveView
from memlab.views.shown import SVG

RECORDED = Path(__file__).parents[1] / "frozen" / "traces"
SECONDS = re.compile(r"\d (?:ms|s|min|seconds)\b")
TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free."
)


@pytest.fixture
def simulated(monkeypatch):
    """As if this process ran on a simulated GPU."""
    monkeypatch.setattr(provenance.simulated_gpu, "is_simulated", lambda: True)


@pytest.fixture(autouse=True)
def no_error_is_kept():
    keep_oom(None)
    yield
    keep_oom(None)


def scripted(name: str, device: str = "RTX 4060 (simulated)", **notes: object) -> Run:
    script = Script(Device(0, device, capacity_bytes=1 << 33))
    for at in range(5):
        script.alloc(MiB, at=350_000_000 * (at + 1), phase=Phase.FORWARD, module="net", line="cell:8")
    return Run(name, script.trace(duration=2_000_000_000, notes=notes))


def views_of(run: Run) -> dict[str, str]:
    report, against = run.report(), memlab.compare(run, scripted("other", device="RTX 4060"))
    scene = against.figure_bundle()
    return {
        "text": str(run), "html": report.html, "repr": repr(run), "svg": report.figure_bundle()[SVG], "title": report.title,
        "picture as text": report.figure_bundle()["text/plain"], "trace": repr(run.trace), "modules": run.modules().text,
        "modules as html": run.modules().html, "breakdown": str(run.breakdown()), "fit": memlab.fit(run, on=["T4"]).text,
        "compared": against.text, "its html": against.html, "its svg": scene[SVG], "its words": scene["text/plain"],
        "by": str(against.by("module")), "sweep": Sweep("rows", {1: run, 2: run}).text,
        "sweep as svg": Sweep("rows", {1: run, 2: run}).svg(),
    }  # fmt: skip


@pytest.mark.parametrize("run", [scripted("a"), memlab.load(RECORDED / "cuda-mlp.memlab")], ids=["written", "recorded"])
def test_every_view_of_a_run_says_it_and_shows_no_seconds(run):
    for what, shown in views_of(run).items():
        assert "simulated" in shown, what
        assert what in ("repr", "trace") or SIMULATED_GPU in " ".join(re.sub(r"<[^>]+>", " ", shown).split()), what
        assert not SECONDS.search(shown), what
        assert "measured" not in shown, what


def test_lines_and_leaks_say_it():
    leaks = memlab.load(RECORDED / "cuda-leaking.memlab").leaks()
    assert leaks and leaks.text.endswith(SIMULATED_GPU) and SIMULATED_GPU in leaks._repr_html_()
    script = Script(Device(0, "RTX 4060 (simulated)"))
    script.alloc(MiB, line="cell:1")
    lines = Run("lines", script.trace(notes={"executions": {}})).lines()
    assert all(SIMULATED_GPU in shown for shown in (lines.text, lines.html, lines.plain()))


def test_other_runs_keep_their_seconds_and_say_nothing_of_it():
    run = scripted("a", device="RTX 4060")
    assert run.trace.remark == "" and run.trace.has_times
    assert SECONDS.search(run.report().text) and SECONDS.search(run.report().figure_bundle()["text/plain"])
    assert not any("simulated" in one for one in (str(run), run.modules().text, str(run.breakdown()), repr(run)))


def test_a_saved_run_still_says_it(tmp_path):
    scripted("a").save(tmp_path / "a.memlab")
    loaded = memlab.load(tmp_path / "a.memlab")
    assert SIMULATED_GPU in loaded.report().text
    frame = loaded.report().to_pandas()
    assert set(frame["provenance"]) == {"simulated"} and frame["peak_time_s"].isna().all()


def test_runs_of_a_simulated_gpu_are_compared_without_an_axis_of_seconds_and_their_results_not_at_all():
    found = memlab.compare(scripted("a"), scripted("b", device="RTX 4060"))
    assert found.seconds is None and found.results.short == "not checked (simulated GPU)"
    assert [button.label for button in found.figure.layout.updatemenus[0].buttons] == ["events", "share"]
    measured = memlab.compare(scripted("a", device="RTX 4060"), scripted("b", device="RTX 4060"))
    assert measured.figure.layout.updatemenus[0].buttons[0].label == "seconds"


# --- what is read live ---


def test_an_explanation_says_where_its_figures_come_from_and_names_a_command_that_works_there():
    failure = Failure(read_message(TEXT), others_bytes=3 << 30)
    assert explain(failure).remark == "" and "`nvidia-smi`" in explain(failure).actions[0].text
    there = explain(Failure(read_message(TEXT), others_bytes=3 << 30, provenance="simulated"))
    assert there.remark == SIMULATED_GPU
    assert "nvidia-smi" not in there.actions[0].text and "`torch.cuda.list_gpu_processes()`" in there.actions[0].text


def test_a_cell_that_ran_out_on_a_simulated_gpu_says_so(simulated):
    explained = note_oom(torch.OutOfMemoryError(TEXT))
    assert explained is not None
    assert SIMULATED_GPU in explained.text and SIMULATED_GPU in explained.html
    assert (
        SIMULATED_GPU
        not in explain_oom("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.").text
    )


def test_a_context_that_does_not_fit_is_explained_with_the_sizes_of_the_device():
    message = Message("CUDA", device=0, capacity=ByteRange.exact(8 << 30), free=ByteRange.exact(68 << 20))
    found = explain(Failure(message, has_context=False, others_bytes=7 << 30))
    assert "68.00 MiB of 8.00 GiB were free, too little for the CUDA context of this process" in found.title
    assert "Other processes hold 7.00 GiB" in found.sentences[0]


def test_a_predicted_out_of_memory_is_the_last_one_and_says_what_it_is():
    run = scripted("big", prediction={"peaks": {}})
    note_predicted_oom(run, "RTX 4060", TEXT)
    text = explain_oom().text
    assert text.startswith("memlab · big · predicted for RTX 4060 · cuda:0 ran out of memory: 2.00 GiB requested")
    assert "predicted: nothing ran on a card" in text and SIMULATED_GPU not in text


@pytest.mark.parametrize(
    ("errors", "freed", "title"),
    [
        ((), 0, "nothing to release"),
        (("ValueError: x",), 0, "released the frames of 1 error; that freed no memory"),
        (("ValueError: x",), MiB, "released 1.00 MiB on cuda:0"),
    ],
)
def test_the_heading_of_a_release_says_what_was_done(simulated, errors, freed, title):
    levels = (HeldLevel("cpu", 0, 0), HeldLevel("cuda:0", 2 * MiB, 2 * MiB - freed))
    text = ReleaseReport(Released(levels, errors, (), (), True)).text
    assert text.splitlines()[0] == f"memlab · {title}"
    assert SIMULATED_GPU in text


def test_figures_of_the_cpu_are_measured_also_where_the_gpu_is_simulated(simulated):
    assert provenance.remark_here(["cpu"]) == ""
    assert provenance.remark_here(["cpu", "cuda:0"]) == SIMULATED_GPU
    assert SIMULATED_GPU not in memlab.who(torch.ones(3)).text


def test_the_live_view_gets_the_remark():
    view = LiveView("a", remark=SIMULATED_GPU)
    assert view.setup["remark"] == SIMULATED_GPU and LiveView("b").setup["remark"] == ""
    view.close()


# --- lessons ---


def test_the_answer_to_a_guess_names_the_source_of_the_runs_since_the_question(capsys):
    lesson = Lesson("x", needs="1 MiB")
    guesses = [lesson.guess("How much?", between=("1 MiB", "64 MiB")) for _ in range(3)]
    guesses[0].commit("4 MiB")
    assert str(guesses[2].compare(5 * MiB)) == "How much? The answer: 5.00 MiB. You skipped the guess."
    try:
        memlab.runs.add(scripted("of a guess"))
        assert str(guesses[0].compare(4 * MiB)) == "How much? You said 4.00 MiB, it was 4.00 MiB, simulated (right)."
        memlab.runs.add(scripted("of a guess", prediction={"peaks": {}}))
        assert str(guesses[1].compare(5 * MiB)) == "How much? Predicted: 5.00 MiB. You skipped the guess."
        assert guesses[1].compare(5 * MiB, scripted("another")).source == "simulated on cuda:0"
    finally:
        memlab.runs.discard(memlab.runs["of a guess"])


def test_a_lesson_on_a_simulated_gpu_is_its_claims_source(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "RTX 4060 (simulated)")
    lesson = Lesson("x", needs="1 MiB")
    assert lesson.source == "simulated" and SIMULATED_GPU in capsys.readouterr().out
    assert lesson.holds("it is so", True, scripted("a run")).source == "simulated on cuda:0"
    assert lesson.saves("half", 4, 2).source == "", "two numbers do not say it"
    said, *claims = lesson.end().text.splitlines()
    assert said == f"Lesson x: 2 claims held on a {SIMULATED_GPU}."
    assert claims[0] == "Claim holds (simulated on cuda:0): it is so" and "(-50%)" in claims[1]


def test_the_live_line_of_a_script_says_it_and_shows_no_seconds(simulated):
    lines: list[str] = []
    job = SimpleNamespace(
        _line=SimpleNamespace(show=lines.append),
        count=3,
        recording=SimpleNamespace(times=SimpleNamespace(recent_s=0.5)),
    )
    for label in ("cuda:0", "cpu"):
        MeasuredScript.show_level(job, LevelNow(label, MiB, MiB, True, None))  # type: ignore[arg-type]
    of_gpu, of_host = lines
    assert of_gpu.endswith(SIMULATED_GPU) and not SECONDS.search(of_gpu)
    assert of_host.endswith("500 ms/step")


def test_ranks_of_simulated_gpus_failed_at_no_time(tmp_path, monkeypatch):
    for rank in range(2):
        Run("train", trained(rank, world_size=2, **error("ValueError: no"))).save(tmp_path / f"rank{rank}.memlab")
    assert "after the job began" in memlab.ranks(tmp_path).text
    monkeypatch.setattr(Trace, "provenance", "simulated")
    found = memlab.ranks(tmp_path)
    for text in (found.text, run_page.as_html(found)):
        assert SIMULATED_GPU in text and not SECONDS.search(text)
    assert found.to_pandas()[["began_s", "ended_s"]].isna().all(axis=None)
    assert not any("ended_s" in one for one in json.loads(run_page.as_json(found))["ranks"])


def test_the_report_of_a_script_says_it_and_not_what_measuring_added():
    times = StepTimes()
    for is_measured in [True] * 5 + [False] * 5:
        times.stepped(is_measured)
    assert "A step took" in times.text
    run = scripted("a")
    for text in (run_page.as_text(run, times=times), run_page.as_html(run, times=times)):
        assert SIMULATED_GPU in text and "A step took" not in text
    assert not {"step", "duration_s"} & json.loads(run_page.as_json(run, times=times)).keys()
    assert "A step took" in run_page.as_text(scripted("a", device="RTX 4060"), times=times)


def test_a_trainers_log_is_said_once_to_be_of_a_simulated_gpu(monkeypatch, capsys):
    def train() -> str:
        training = MeasuredTraining(CallbackOptions(Wanted("training"), 5, None, None), "cpu")
        training.begin()
        for step in (1, 2):
            torch.ones(MiB)
            training.stepped(step)
            assert training.row()
        training.end()
        return capsys.readouterr().err

    assert train() == ""
    monkeypatch.setattr(Trace, "provenance", "simulated")
    assert train() == f"memlab: the figures in the log are of a {SIMULATED_GPU}.\n"


def test_the_explorer_says_it_in_a_notebook_in_a_terminal_and_in_its_file(tmp_path):
    explorer = scripted("a").explore()
    explorer.save(tmp_path / "a.html")
    for shown in (explorer.bundle()["text/html"], explorer.text, (tmp_path / "a.html").read_text("utf-8")):
        assert SIMULATED_GPU in shown
    assert not SECONDS.search(explorer.text)
    data = gzip.decompress(explorer.runs[0].packed())
    header = json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
    assert SIMULATED_GPU in header["title"] and not header["has_times"]  # of which the script makes the picture
