"""The Lab in a real JupyterLab: by mouse and by keyboard, stopped, failing, saved and opened again without a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser import lab as harness

pytestmark = pytest.mark.browser
FIGURE = ".js-plotly-plot, .jp-RenderedPlotly img"
"""Plotly's extension of JupyterLab shows a picture it kept until the mouse comes near."""
SAVING, OTHER = "checkpoint_sequential", "checkpoint"

OPEN = """
import memlab, time
from lab_samples import tiny

def slow():
    model, optimizer, batch, loss = tiny()
    def slowly(output, target):
        time.sleep(0.1)
        return loss(output, target)
    return model, optimizer, batch, slowly

def broken():
    raise ValueError("<img src=x onerror='window.hacked = 1'> no data")

lab = memlab.Lab(workloads={"tiny": tiny, "slow": slow, "broken": broken}, force=True)
lab
"""
BUSY = "time.sleep(4)"
STATE = "print(lab.state['techniques'], lab.is_running, len(lab.rows))"
PROGRAM = "lab.state = {'workload': 'tiny', 'techniques': [], 'steps': 3}; run = lab.run(); run"
AGAIN = "%load_ext memlab\n%memlab mlp in_place"
LEFT = """
import threading, ipywidgets
%unload_ext memlab
lab.close()
print('widgets', [type(one).__name__ for one in ipywidgets.widgets.widget._instances.values()])
print('threads', [one.name for one in threading.enumerate() if 'memlab' in one.name])
print('hooks', [hook for hook in get_ipython().events.callbacks['pre_run_cell'] if 'memlab' in str(hook)])
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Lab]:
    with harness.opened(tmp_path_factory, "lab.ipynb", [OPEN, STATE, BUSY, PROGRAM, AGAIN, LEFT]) as made:
        made.run_until_shown(0, run_button(made, 0), timeout_s=120)  # a first import takes long
        yield made


def run_button(lab: harness.Lab, cell: int) -> Any:
    return lab.cell(cell).get_by_role("button", name="Run", exact=True)


def press(lab: harness.Lab, name: str, cell: int = 0) -> None:
    lab.cell(cell).get_by_role("button", name=name, exact=True).click()


def open_part(lab: harness.Lab, name: str) -> None:
    """Open a closed part of the controls."""
    opens = lab.cell(0).get_by_role("button", name=name)
    if "▸" in opens.inner_text():
        opens.click()


def status(lab: harness.Lab) -> str:
    """The lines that a screen reader is told."""
    return "\n".join(lab.cell(0).locator(".memlab-lab [role='status']").all_inner_texts())


def wait_status(lab: harness.Lab, text: str, timeout_s: float = 30.0) -> None:
    told = lab.cell(0).locator(".memlab-lab [role='status']", has_text=text)
    try:
        told.first.wait_for(timeout=1000 * timeout_s)
    except Exception as error:
        alerts = lab.cell(0).get_by_role("alert").all_inner_texts()
        raise AssertionError(f"no status {text!r}: {status(lab)!r}, {alerts}") from error


def choose(lab: harness.Lab, label: str, option: str) -> None:
    lab.cell(0).get_by_label(label, exact=True).first.select_option(label=option)


def test_a_switch_and_run_by_mouse_give_the_sentence_and_the_figure(lab):
    choose(lab, "Workload", "tiny")
    lab.cell(0).get_by_label(SAVING, exact=True).check()
    press(lab, "Run")
    wait_status(lab, f"with {SAVING}: peak")
    lab.cell(0).locator(FIGURE).first.wait_for(timeout=30_000)
    assert "results equal" in lab.text(0)
    assert "Runs of this Lab (2)" in lab.text(0)
    lab.picture("lab")


def test_what_each_would_save_is_predicted_while_nobody_waits_and_what_is_chosen_together(lab):
    card = lab.cell(0).locator(".memlab-card", has=lab.page.get_by_label("accumulation", exact=True))
    card.get_by_text("saves").first.wait_for(timeout=60_000)
    lab.cell(0).get_by_label("accumulation", exact=True).check()
    wait_status(lab, f"With {SAVING} + accumulation: peak", 60)
    assert "predicted for RTX 4060" in status(lab)
    lab.cell(0).get_by_label("accumulation", exact=True).uncheck()


def test_the_arrow_of_a_choice_has_the_colour_of_its_text(lab):
    choice = lab.cell(0).get_by_label("Workload", exact=True).first
    drawn = choice.evaluate("one => [getComputedStyle(one).backgroundImage, getComputedStyle(one).color]")
    assert "gradient" in drawn[0] and drawn[1] in drawn[0]


def test_what_is_excluded_says_why_in_words(lab):
    box = lab.cell(0).get_by_label(OTHER, exact=True)
    assert box.is_disabled()
    row = lab.cell(0).locator(".memlab-card", has=lab.page.get_by_label(OTHER, exact=True))
    assert "exclude each other" in row.inner_text()
    assert float(box.evaluate("box => getComputedStyle(box).opacity")) < 0.6  # as it looks
    lab.cell(0).get_by_label(SAVING, exact=True).uncheck()
    lab.page.wait_for_timeout(500)
    assert box.is_enabled()


def test_the_price_is_told_of_the_one_in_focus(lab):
    box = lab.cell(0).get_by_label(SAVING, exact=True)
    row = lab.cell(0).locator(".memlab-card", has=lab.page.get_by_label(SAVING, exact=True))
    lab.cell(0).get_by_label("Filter").click()
    assert "Price" not in row.inner_text()
    assert "Price" in row.locator("div[title]").get_attribute("title")
    lab.page.keyboard.press("Tab")
    box.focus()
    assert "Price" in row.inner_text()


def test_the_filter_and_the_groups_leave_what_was_asked_for(lab):
    lab.cell(0).get_by_label("Filter").fill("bf16")
    wait_status(lab, "techniques listed")
    assert not lab.cell(0).get_by_label(SAVING, exact=True).is_visible()
    lab.cell(0).get_by_label("Filter").fill("")
    lab.cell(0).get_by_label(SAVING, exact=True).wait_for()


def test_by_keyboard_alone(lab):
    page = lab.page
    lab.cell(0).get_by_label(SAVING, exact=True).focus()
    page.keyboard.press("Space")
    wait_status(lab, f"chosen: {SAVING}")
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == "Run":
            break
    page.keyboard.press("Enter")
    lab.cell(0).get_by_text("Runs of this Lab (3)").wait_for(timeout=60_000)
    assert f"tiny + {SAVING} (2)" in lab.text(0)
    assert page.evaluate("document.activeElement.innerText") == "Run", "the focus stays where it was"
    assert page.locator(".jp-Notebook.jp-mod-commandMode, .jp-Notebook.jp-mod-editMode").count() == 1
    assert lab.cell(1).locator(".jp-OutputArea-output").count() == 0, "no cell was run by the keys"


def test_a_run_is_stopped(lab):
    choose(lab, "Workload", "slow")
    open_part(lab, "More settings")
    lab.cell(0).get_by_label("Steps").fill("500")
    lab.cell(0).get_by_label("Steps").press("Enter")
    press(lab, "Run")
    wait_status(lab, " of 503")
    lab.cell(0).locator(".memlab-lab canvas").first.wait_for(timeout=10_000)  # the live curve
    lab.picture("lab-running")
    press(lab, "Stop")
    lab.cell(0).get_by_role("alert").get_by_text("Stopped").first.wait_for(timeout=20_000)
    assert "measuring slow" not in status(lab)


def test_a_run_waits_for_the_cell_and_is_stopped_while_the_kernel_is_busy(lab):
    lab.run_cell(2, wait=False)
    press(lab, "Run")
    lab.page.wait_for_timeout(700)
    assert lab.is_running(2)
    press(lab, "Stop")
    lab.cell(0).get_by_role("alert").get_by_text("Stopped").first.wait_for(timeout=3_000)
    assert lab.is_running(2), "Stop was heard while the cell ran"
    lab.wait_cell(2)


def test_an_error_is_shown_and_not_run_as_html(lab):
    choose(lab, "Workload", "broken")
    press(lab, "Run")
    alert = lab.cell(0).get_by_role("alert")
    alert.get_by_text("no data").first.wait_for(timeout=20_000)
    assert "<img src=x" in alert.inner_text()
    alert.get_by_text("Details").click()
    assert "Traceback" in alert.inner_text()
    assert lab.page.evaluate("window.hacked") is None
    lab.picture("lab-error")


def test_what_is_wrong_is_refused_where_it_was_chosen(lab):
    choose(lab, "Workload", "tiny")
    open_part(lab, "Runs, baseline")
    lab.cell(0).get_by_label("Folder").fill("/dev/null/x")
    press(lab, "Save")
    lab.cell(0).get_by_role("alert").get_by_text("cannot save").wait_for(timeout=10_000)
    lab.cell(0).get_by_label("Folder").fill("kept")
    press(lab, "Save")
    wait_status(lab, "Saved to kept")
    assert (lab.root / "kept" / "table.csv").exists()


def test_pin_compare_and_code(lab):
    choose(lab, "Run", f"tiny + {SAVING}")
    press(lab, "Pin as baseline")
    wait_status(lab, "Pinned")
    choose(lab, "Run", "tiny")
    press(lab, "Compare")
    lab.cell(0).get_by_text("Runs of this Lab").wait_for()
    press(lab, "Code")
    script = lab.cell(0).get_by_label("Script")
    script.wait_for()
    assert "lab.run()" in script.input_value()
    press(lab, "Unpin")


def test_a_program_drives_the_same_lab(lab):
    lab.run_cell(3)
    lab.cell(3).locator(FIGURE).first.wait_for(timeout=20_000)
    assert lab.cell(0).get_by_label("Workload").input_value() in ("tiny", "0")
    wait_status(lab, "tiny")


def test_in_a_narrow_window_nothing_is_cut_off(lab):
    lab.page.evaluate("async () => { await window.jupyterapp.commands.execute('application:toggle-left-area'); }")
    lab.page.set_viewport_size({"width": 480, "height": 1600})
    lab.page.wait_for_timeout(1000)
    inner, outer = lab.page.evaluate(
        "() => { const box = document.querySelector('.memlab-lab'); return [box.scrollWidth, box.clientWidth]; }"
    )
    lab.picture("lab-narrow")
    lab.page.set_viewport_size({"width": 1300, "height": 1000})
    assert inner <= outer + 1
    # The choice of a device can say more than there is room for.
    choice = lab.cell(0).get_by_label("Device", exact=True).first
    assert choice.evaluate("one => getComputedStyle(one).textOverflow") == "ellipsis"


def test_two_labs_in_one_notebook(lab):
    lab.run_until_shown(4, run_button(lab, 4))
    lab.cell(4).get_by_label("Size").select_option(label="tiny")
    press(lab, "Run", cell=4)
    lab.cell(4).locator(FIGURE).first.wait_for(timeout=60_000)
    assert "in_place" in lab.text(4)
    assert "mlp" not in status(lab)


def test_running_the_cell_again_leaves_one_lab(lab):
    lab.run_until_shown(4, run_button(lab, 4))
    assert lab.cell(4).locator(".memlab-lab").count() == 1


def test_a_saved_notebook_shows_the_result_and_words_without_a_kernel(lab):
    kept = lab.outputs(0)
    ours = sum(len(json.dumps(one)) for out in kept for mime, one in out["data"].items() if mime != "image/png")
    print(f"the Lab in a saved notebook: {ours} bytes of ours")
    assert ours < 60_000
    lab.reopen_without_kernel()
    lab.cell(0).get_by_text("Run this cell to use the Lab").wait_for(timeout=30_000)
    lab.cell(0).locator(FIGURE).first.wait_for(timeout=30_000)
    lab.page.wait_for_timeout(3000)
    assert "Runs of this Lab" in lab.text(0)
    shown = lab.cell(0).locator(".jp-OutputArea-child").all()
    seen = "\n".join(one.inner_text() for one in shown if one.is_visible())
    assert "Error displaying widget" not in seen
    assert "Loading" not in seen
    assert len(shown) == 1 + sum(one.is_visible() for one in shown), "the output without its controls is hidden"
    lab.picture("lab-reopened")


def test_it_is_used_again_after_its_cell_was_run_and_leaves_nothing_when_closed(lab):
    lab.open("lab.ipynb")
    lab.run_until_shown(0, run_button(lab, 0))
    assert not lab.cell(0).get_by_text("Run this cell to use the Lab").is_visible()
    lab.run_cell(4)
    lab.run_cell(5)
    assert "widgets []" in lab.text(5)
    assert "threads []" in lab.text(5)
    assert "hooks []" in lab.text(5)
    lab.cell(0).get_by_text("This Lab is closed").wait_for(timeout=10_000)


def test_controls_that_lost_their_kernel_give_way_to_the_words(lab):
    lab.run_cell(0)
    controls = lab.cell(0).locator(".memlab-lab")
    words = lab.cell(0).get_by_text("Run this cell to use the Lab")
    controls.wait_for(timeout=30_000)
    assert not words.is_visible()
    lab.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:restart-kernel'); }")
    lab.page.get_by_role("button", name="Confirm Kernel Restart").click(timeout=10_000)
    words.wait_for(timeout=30_000)
    assert not controls.is_visible()
    # Without its earlier number it is seen to have run, also where the restarting kernel lost the first keys.
    lab.page.evaluate("async () => { await window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs'); }")
    lab.run_cell(0)
    controls.wait_for(timeout=30_000)
    assert not words.is_visible()


def test_nothing_was_fetched_and_nothing_failed_in_the_page(lab):
    assert lab.foreign == []
    assert lab.page_errors == []
