"""The widgets of a Lab, without a browser: they set its state, follow it, say why not, and leave nothing when closed."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

import ipywidgets
import pytest
import torch
from lab_samples import tiny

from memlab import Lab
from memlab.lab import words
from memlab.lab.controls import Controls
from memlab.lab.view import View
from memlab.savings import techniques
from memlab.workloads.workload import Workload


class Place:
    """Stands for an output."""

    def update(self, content, raw):
        assert raw
        assert "text/plain" in content


SAVING, OTHER = "checkpoint_sequential", "checkpoint"


@pytest.fixture(autouse=True)
def no_widget_is_left() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    known = set(ipywidgets.widgets.widget._instances)
    yield
    torch.set_num_threads(before)
    assert set(ipywidgets.widgets.widget._instances) == known


@pytest.fixture
def shown() -> Iterator[tuple[Lab, Controls]]:
    """A Lab and its controls, which hear of it as they do in a notebook."""
    lab = Lab(workloads={"tiny": tiny, "<b>other</b>": tiny}, steps=1, force=True)
    view = View(lab)
    view._is_open, lab._view = True, view
    view._places = dict.fromkeys(("figure", "table"), Place())
    yield lab, view.controls
    lab._view = None
    view.controls.close()


def boxes(controls: Controls) -> dict[str, ipywidgets.Checkbox]:
    return controls.toggles._boxes


def test_widgets_set_the_state(shown):
    lab, controls = shown
    boxes(controls)[SAVING].value = True
    assert lab.state["techniques"] == [SAVING]
    controls.workload.value = "mlp"
    controls.size.value = "tiny"
    controls.steps.value = 7
    controls.device.value = "card"
    controls.card.value = "RTX 3060"
    state = lab.state
    assert (state["workload"], state["size"], state["steps"]) == ("mlp", "tiny", 7)
    assert (state["device"], state["card"]) == ("card", "RTX 3060")


def test_the_state_sets_the_widgets(shown):
    lab, controls = shown
    lab.state = {"workload": "gpt", "size": "tiny", "techniques": [SAVING], "card": "RTX 3060", "steps": 9}
    assert controls.workload.value == "gpt"
    assert controls.size.value == "tiny"
    assert boxes(controls)[SAVING].value
    assert (controls.device.value, controls.card.value, controls.steps.value) == ("card", "RTX 3060", 9)
    assert not controls.card.disabled
    lab.state = {"device": "cpu"}
    assert controls.card.disabled


def test_settings_are_those_of_the_size_and_old_ones_are_closed(shown):
    lab, controls = shown
    lab.state = {"workload": "gpt", "size": "tiny"}
    own = lab.choices.settings("gpt", "tiny")
    assert set(controls._settings) == {key for key, one in own.items() if isinstance(one, bool | int | float | str)}
    controls._settings["batch"].value = own["batch"] + 1
    assert lab.state["settings"] == {"batch": own["batch"] + 1}
    lab.state = {"size": "laptop"}
    assert lab.state["settings"] == {}
    assert controls._settings["batch"].value == lab.choices.settings("gpt", "laptop")["batch"]


def test_a_refusal_is_not_hidden_by_an_older_problem(shown):
    lab, controls = shown
    lab.problem = "an older one"
    controls.pin.click()
    assert "no run yet" in controls.problem.value


def test_what_is_refused_is_said_and_the_widget_goes_back(shown):
    lab, controls = shown
    lab.state = {"workload": "gpt", "size": "tiny"}
    before = controls._settings["batch"].value
    controls._settings["batch"].value = -3
    assert "must be above 0" in controls.problem.value
    assert controls._settings["batch"].value == before
    assert lab.state["settings"] == {}


def test_what_is_excluded_is_disabled_and_says_why_in_words(shown):
    _, controls = shown
    boxes(controls)[SAVING].value = True
    assert boxes(controls)[OTHER].disabled
    assert "exclude each other" in controls.toggles._texts[OTHER].value
    boxes(controls)[SAVING].value = False
    assert not boxes(controls)[OTHER].disabled
    assert "exclude each other" not in controls.toggles._texts[OTHER].value


def test_there_is_a_switch_for_each_saving_and_myth_that_changes_a_job(shown):
    _, controls = shown
    assert set(boxes(controls)) == {
        name
        for name, one in techniques.items()
        if one.kind in ("saving", "myth") and (one.before or one.apply or one.habit)
    }


def test_filter_and_groups_hide_rows_and_empty_heads(shown):
    lab, controls = shown
    rows = controls.toggles._rows
    controls.toggles.filter.value = "CHECKPOINT_seq"
    seen = [name for name, row in rows.items() if row.layout.display != "none"]
    assert seen == [SAVING]
    heads = [name for name, head in controls.toggles._heads.items() if head.layout.display != "none"]
    assert heads == [techniques[SAVING].attacks[0]]
    controls.toggles.filter.value = ""
    lab.state = {"techniques": [SAVING]}
    controls.toggles.group.value = "chosen"
    assert [name for name, row in rows.items() if row.layout.display != "none"] == [SAVING]


def test_a_press_of_run_and_what_it_found(shown):
    lab, controls = shown
    lab.state = {"techniques": [SAVING]}
    controls.run.click()
    assert lab.wait(60)
    assert lab.problem == ""
    assert SAVING in controls.status.value
    assert [name for name, _ in controls.chosen_run.options] == [f"tiny + {SAVING}", "tiny"]
    assert controls.against.value == "tiny"
    controls.pin.click()
    assert lab.state["baseline"] == f"tiny + {SAVING}"
    assert controls.against.options[0] == (f"tiny + {SAVING} (pinned)", f"tiny + {SAVING}")
    controls.against.value = "tiny"
    controls.compare.click()
    assert lab.comparison.a.name == "tiny"
    controls.code.click()
    assert "lab.run()" in controls.script.value
    controls.unpin.click()
    assert lab.state["baseline"] == ""


def test_presses_that_make_no_sense_are_answered(shown):
    _, controls = shown
    for button in (controls.pin, controls.compare, controls.save):
        button.click()
        assert "no run yet" in controls.problem.value
    controls.stop.click()


def test_errors_of_a_run_are_shown_with_details_and_escaped(shown):
    lab, controls = shown

    def broken():
        raise ValueError("<script>alert(1)</script>")

    lab.choices.own["tiny"] = broken
    controls.run.click()
    assert lab.wait(60)
    assert "&lt;script&gt;" in controls.problem.value
    assert "<script>" not in controls.problem.value
    assert "Traceback" in controls.problem.value
    assert not lab.is_running


def test_everything_to_use_has_a_label(shown):
    _, controls = shown

    def all_of(widget):
        yield widget
        for child in getattr(widget, "children", ()):
            yield from all_of(child)

    used = [one for one in all_of(controls.box) if not isinstance(one, ipywidgets.Box | ipywidgets.HTML)]
    assert used
    assert [one for one in used if not one.description.strip()] == []


class Tags(HTMLParser):
    """The tags of a piece of HTML; fails where they do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_hostile_texts_of_a_workload_are_escaped():
    nasty = Workload("<i>x</i>", "<script>idea</script>", tiny, {"tiny": {}, "laptop": {}})
    lab = Lab(nasty)
    controls = Controls(lab, "name")
    assert "<script>" not in controls.idea.value
    controls.close()


def test_the_html_is_whole(shown):
    lab, controls = shown
    lab.run(techniques=[SAVING])
    for text in (controls.status.value, controls.toggles._texts[OTHER].value, words.bundle("n")["text/html"]):
        Tags(text)
    assert lab._view is not None
    results = lab._view._results()
    Tags(results["table"]["text/html"])
    assert "text/html" not in results["figure"]


def test_the_bundle_has_words_for_front_ends_without_widgets(shown):
    _, controls = shown
    bundle = controls.bundle()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "Run this cell" in bundle["text/plain"]
