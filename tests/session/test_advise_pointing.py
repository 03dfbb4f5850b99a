from __future__ import annotations

from handmade import GPU, HOST, Script

import memlab
from memlab.analysis.oom.facts import Failure
from memlab.analysis.oom.text import read_message
from memlab.session.advise.pointing import pointer_of
from memlab.session.oom import OomExplained, _pointer
from memlab.session.run import Run
from memlab.session.show import RunReport
from memlab.trace import Category

MiB = 1 << 20


def run_of(large: int = 80 * MiB, name: str = "mine", again: str = "step()\n", **notes: object) -> Run:
    script = Script(HOST)
    script.alloc(20 * MiB, category=Category.PARAMETER)
    script.alloc(large, category=Category.ACTIVATION)
    run = Run(name, script.trace(notes=notes))
    run.again = again
    return run


def test_a_cell_points_by_its_name_and_says_how_many_are_tried():
    line = RunReport(run_of()).text.splitlines()[-1]
    count = sum(one.kind == "saving" and "activation" in one.attacks and one.outside is not None and one.equality.kind != "changes"
                for one in memlab.techniques.values())  # fmt: skip
    assert (
        line
        == f"Activations hold 80 % of the peak: memlab.advise(memlab.runs['mine']) tries {count} techniques on them."
    )
    assert line in RunReport(run_of()).html.replace("&#x27;", "'")


def test_nothing_where_it_cannot_be_run_again_or_is_small():
    assert pointer_of(run_of(again="")) == ""
    assert pointer_of(run_of(large=1 * MiB)) == ""
    assert pointer_of(Run("nothing", Script(HOST).trace())) == ""


def test_a_run_of_the_lab_points_too():
    assert "memlab.advise" in pointer_of(run_of(again="", trial={"workload": "gpt", "size": "tiny"}))
    assert pointer_of(run_of(again="", trial={"workload": "mine", "size": ""})) == ""
    assert pointer_of(run_of(again="", trial="?")) == ""


def test_a_name_from_outside_is_escaped():
    report = RunReport(run_of(name="<i>'\x1b"))
    assert "<i>" not in report.html
    assert "\x1b" not in report.text


def test_a_report_is_shown_whatever_becomes_of_the_line(monkeypatch):
    monkeypatch.setattr("memlab.session.advise.pointing._counts", lambda from_outside: 1 / 0)
    assert "memlab · mine" in RunReport(run_of()).text


def out_of_memory() -> Failure:
    return Failure(
        read_message("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB")
    )


def test_an_out_of_memory_ends_with_it_also_after_a_release():
    explained = OomExplained(out_of_memory(), pointer="Activations hold <all>.")
    for one in (explained, explained.released("1 GiB")):
        assert one.text.splitlines()[-1] == "Activations hold <all>."
        assert "Activations hold &lt;all&gt;." in one.html
    assert "Activations hold" not in OomExplained(out_of_memory()).text


def test_an_out_of_memory_without_a_tracked_cell_points_nowhere():
    assert _pointer(out_of_memory(), None) == ""
    assert _pointer(out_of_memory(), run_of()) == ""
    script = Script(GPU)
    script.alloc(80 * MiB)
    assert pointer_of(Run("cuda", script.trace())) == ""
