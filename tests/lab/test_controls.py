"""The widgets of a Lab, without a browser: they set its state, follow it, say why not, and leave nothing when closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ipywidgets
import pytest
from html_text import Words
from lab_samples import tiny

from memlab import Lab
from memlab.lab import widgets
from memlab.lab.controls import LabControls
from memlab.lab.view import LabView
from memlab.lab.widgets import problem, prose
from memlab.saving_techniques import techniques
from memlab.workloads.workload import Workload

SAVING, OTHER = "checkpoint_sequential", "checkpoint"


@pytest.fixture(autouse=True)
def no_widget_is_left(one_thread: None) -> Iterator[None]:
    known = set(ipywidgets.widgets.widget._instances)
    yield
    assert set(ipywidgets.widgets.widget._instances) == known


@pytest.fixture
def shown() -> Iterator[tuple[Lab, LabControls]]:
    """A Lab and its controls, which hear of it as they do in a notebook."""
    lab = Lab(workloads={"tiny": tiny, "<b>other</b>": tiny}, steps=1, force=True)
    view = LabView(lab)
    lab.listener = view
    yield lab, view.controls
    lab.close()


def all_of(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from all_of(child)


def rows(controls: LabControls) -> dict[str, tuple[Any, Any, Any]]:
    """Technique -> its card, check box and text."""
    pairs = (one for one in all_of(controls.techniques.box) if len(getattr(one, "children", ())) == 2)
    return {
        row.children[0].description: (row, *row.children)
        for row in pairs
        if isinstance(row.children[0], ipywidgets.Checkbox)
    }


def visible(controls: LabControls) -> list[str]:
    return [name for name, (row, _, _) in rows(controls).items() if row.layout.display != "none"]


def settings(controls: LabControls) -> dict[str, Any]:
    return {entry.description: entry for entry in controls.settings.children}


def test_widgets_set_the_state_and_the_state_sets_the_widgets(shown):
    lab, controls = shown
    rows(controls)[SAVING][1].value = True
    controls.workload.value, controls.size.value, controls.steps.value = "mlp", "tiny", 7
    controls.device.value, controls.card.value = "card", "RTX 3060"
    expected = {"techniques": [SAVING], "workload": "mlp", "size": "tiny", "steps": 7}
    assert {**expected, "device": "card", "card": "RTX 3060"}.items() <= lab.state.items()
    lab.state = {"workload": "gpt", "size": "laptop", "techniques": [OTHER], "card": "RTX 4060", "steps": 9}
    assert (controls.workload.value, controls.size.value, rows(controls)[OTHER][1].value) == ("gpt", "laptop", True)
    assert (controls.device.value, controls.card.value, controls.steps.value) == ("card", "RTX 4060", 9)
    assert not rows(controls)[SAVING][1].value
    controls.version.value = "2.10"
    assert lab.state["torch_version"] == "2.10"
    lab.state = {"torch_version": "2.12.1"}
    assert controls.version.value == "2.12.1"
    assert controls.card.layout.display == controls.version.layout.display == "flex"
    lab.state = {"device": "cpu"}
    assert controls.card.layout.display == controls.version.layout.display == "none"


def test_settings_are_those_of_the_size_and_a_refused_one_goes_back(shown):
    lab, controls = shown
    lab.state = {"workload": "gpt", "size": "tiny"}
    own = lab.choices.settings("gpt", "tiny")
    assert set(settings(controls)) == {key for key, one in own.items() if isinstance(one, bool | int | float | str)}
    settings(controls)["batch"].value = own["batch"] + 1
    assert lab.state["settings"] == {"batch": own["batch"] + 1}
    settings(controls)["batch"].value = -3
    assert "must be above 0" in controls.problem.value
    assert settings(controls)["batch"].value == own["batch"] + 1
    lab.state = {"size": "laptop"}
    assert lab.state["settings"] == {}
    assert settings(controls)["batch"].value == lab.choices.settings("gpt", "laptop")["batch"]


def test_an_excluded_technique_is_disabled_and_says_why(shown):
    _, controls = shown
    _, box, text = rows(controls)[OTHER]
    for on in (True, False):
        rows(controls)[SAVING][1].value = on
        assert box.disabled is on
        assert ("exclude each other" in text.value) is on


def test_there_is_a_check_box_for_each_technique_that_changes_a_job(shown):
    assert set(rows(shown[1])) == {name for name, one in techniques.items() if one.apply or one.baseline_pattern}


def test_filter_and_groups_hide_cards(shown):
    lab, controls = shown
    controls.techniques.filter.value = "CHECKPOINT_seq"
    assert visible(controls) == [SAVING]
    controls.techniques.filter.value = ""
    lab.state = {"techniques": [SAVING]}
    controls.techniques.group.value = "chosen"
    assert visible(controls) == [SAVING]


def test_a_press_of_run_and_what_came_of_it(shown):
    lab, controls = shown
    lab.state = {"techniques": [SAVING]}
    controls.run.click()
    assert lab.wait(120)
    assert lab.problem == ""
    assert SAVING in controls.verdict.value
    assert controls.run.description == "Run"
    runs = controls.runs
    assert [name for name, _ in runs.chosen_run.options] == [f"tiny + {SAVING}", "tiny"]
    assert runs.against.value == "tiny"
    assert runs.unpin.disabled
    runs.pin.click()
    assert lab.state["baseline"] == f"tiny + {SAVING}"
    assert runs.against.options[0] == (f"tiny + {SAVING} (pinned)", f"tiny + {SAVING}")
    runs.against.value = "tiny"
    runs.compare.click()
    assert lab.comparison.a.name == "tiny"
    runs.code.click()
    assert "lab.run()" in runs.script.value
    runs.unpin.click()
    assert lab.state["baseline"] == ""
    results = lab.listener.results()
    for html in (controls.verdict.value, widgets.placeholder("n")["text/html"], results["table"]["text/html"]):
        Words(html)
    assert "text/html" not in results["figure"]


def test_why_a_technique_does_not_apply_is_said_once(shown):
    lab, controls = shown
    lab.state = {"techniques": ["conv_bn_fusion"]}
    controls.run.click()
    assert lab.wait(120)
    table = lab.listener.results()["table"]["text/plain"]
    assert lab.problem in controls.problem.value and controls.verdict.value == ""
    assert table.count("conv_bn_fusion") == 1 and "no figures" not in table


def test_a_verdict_names_its_workload_and_is_none_of_other_choices(shown):
    lab, controls = shown
    lab.run(techniques=[SAVING])
    said = f"tiny, measured on CPU, with {SAVING}: peak "
    assert said in controls.verdict.value and "role='note'" not in controls.verdict.value
    lab.pin()
    assert said in controls.verdict.value and "role='note'" not in controls.verdict.value
    lab.state = {"workload": "<b>other</b>", "techniques": [SAVING, "offload"], "baseline": ""}

    def stopped(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    controls.estimates.close()
    lab.listener.progress = stopped
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert "Stopped" in controls.problem.value
    now, _, before = controls.verdict.value.partition("role='note'")
    assert now.startswith("<div role='status'>Predicting what &lt;b&gt;other&lt;/b&gt; needs") and said not in now
    assert f"The result below is of another choice: {said}" in before


def test_a_press_that_would_mean_nothing_is_not_offered_and_answered_all_the_same(shown):
    lab, controls = shown
    lab.problem = "an older one"
    runs = controls.runs
    for button in (runs.pin, runs.compare, runs.save):
        assert button.disabled
        button.click()
        assert "no run yet" in controls.problem.value
    assert runs.unpin.disabled


def test_the_button_stops_what_it_has_started_but_not_by_a_double_click(shown, monkeypatch):
    lab, controls = shown
    running = threading.Event()
    monkeypatch.setattr(lab, "start", running.set)
    monkeypatch.setattr(type(lab), "is_running", property(lambda _: running.is_set()))
    monkeypatch.setattr(lab, "stop", running.clear)
    controls.run.click()
    controls.run.click()
    assert running.is_set()
    controls.show()
    assert controls.run.description == "Stop"
    monkeypatch.setattr(controls, "began_s", -10.0)
    controls.run.click()
    assert not running.is_set()


def test_parts_are_closed_at_first_and_opened_by_their_button(shown):
    _, controls = shown
    for opens, inside in ((controls.more, controls.steps), (controls.about_runs, controls.runs.box)):
        part = next(one for one in all_of(controls.box) if inside in getattr(one, "children", ()))
        assert part.layout.display == "none"
        opens.value = True
        assert part.layout.display == "flex"


def test_errors_of_a_run_are_shown_with_details_and_escaped(shown):
    lab, controls = shown

    def broken():
        raise ValueError("<script>alert(1)</script>")

    lab.choices.own["tiny"] = broken
    controls.run.click()
    assert lab.wait(120)
    said = controls.problem.value
    assert "&lt;script&gt;" in said and "<script>" not in said and "Traceback" in said
    assert not lab.is_running


def test_everything_to_use_has_a_label_and_there_are_words_for_front_ends_without_widgets(shown):
    used = [one for one in all_of(shown[1].box) if not isinstance(one, ipywidgets.Box | ipywidgets.HTML)]
    assert used
    assert [one for one in used if not one.description.strip()] == []
    bundle = shown[1].bundle()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == widgets.USE


def test_texts_are_escaped_and_code_in_backticks_is_code(shown):
    assert prose("<i> `a < b` of `x`") == "&lt;i&gt; <code>a &lt; b</code> of <code>x</code>"
    assert problem("", "more") == "" and problem("`x`", "").endswith("<b><code>x</code></b></div>")
    assert "<details><summary>Details</summary><pre>&lt;i&gt;</pre></details>" in problem("x", "<i>")
    for name, (_, _, text) in rows(shown[1]).items():
        Words(text.value)
        assert "`" not in text.value, name
    lab = Lab(Workload("<i>x</i>", "<script>idea</script>", tiny, {"tiny": {}, "laptop": {}}))
    controls = LabControls(lab, "name")
    assert "<script>" not in controls.idea.value
    controls.close()
