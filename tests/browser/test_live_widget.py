"""In a real JupyterLab: the curve moves while the cell runs, Stop stops it, with no network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import lab as harness

pytestmark = pytest.mark.browser

LIVE = """
import math, threading, time
from IPython.display import display
from memlab.views.live import LiveView

MiB, stop = 1 << 20, threading.Event()
view = LiveView("training", capacity_bytes=CAPACITY * MiB, can_stop=True, on_stop=stop.set)
display(view)
start, tick, peak, seen = time.monotonic(), 0, 0, 0.0
while (now := time.monotonic() - start) < SECONDS and not stop.is_set():
    held = (900 + 700 * abs(math.sin(2 * now)) + 60 * math.sin(31 * now)) * MiB
    peak = max(peak, held)
    columns = dict(allocated=[held], reserved=[1.06 * peak], used=[1.06 * peak + 400 * MiB], rss=[1.1e9 + 2e7 * now])
    phases = [(step + begin, min(now, step + end), code) for step in sorted({max(0, int(now) - 1), int(now)})
              for code, begin, end in ((0, 0.0, 0.35), (1, 0.35, 0.85), (2, 0.85, 1.0))
              if seen <= step + end and step + begin < now]
    seen = now
    view.push([now], columns, phases, int(peak), tick % 2 == 0, now,
              ["<img src=x onerror='window.hacked = 1'> host memory is low"] if now > 1 else [])
    tick += 1
    time.sleep(0.1)
view.finish()
print("stopped", stop.is_set(), "broken", view.broken)
"""

LATE = """
import time
from IPython.display import display
from memlab.views.live import LiveView

view = LiveView("late", series=("allocated",))
display(view)
for tick in range(80):
    view.push([tick / 20], {"allocated": [tick << 20]}, elapsed_s=tick / 20)
    time.sleep(0.05)
    if tick == 30:
        display(view)
view.finish()
print("broken", view.broken)
"""

LONG = """
import numpy as np
from IPython.display import display
from memlab.views.live import LiveView

view = LiveView("long", series=("allocated",))
display(view)
for tick in range(120):
    times = tick + np.arange(300) / 300
    view.push(times, {"allocated": np.where(times == 7.5, 4e9, 1e9 + times)}, elapsed_s=tick)
view.finish()
print("broken", view.broken)
"""


MISSED = """
from IPython.display import display
from memlab.views.live import LiveView

view = LiveView("missed", series=("allocated",))
display(view)
phases = [(0.0, 1.0, 0), *((1 + i / 1000, 1 + (i + 1) / 1000, 1 + i % 2) for i in range(100)), (1.1, 2.0, 0)]
view.push([0.0, 1.0, 2.0], {"allocated": [1e8, 6.8e8, 4e8]}, phases, 840_000_000, True, 2.0)
view.finish()
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Lab]:
    with harness.opened(tmp_path_factory, "live.ipynb", [live_cell(4, 4096)]) as made:
        yield made


def live_cell(seconds: int, capacity_mib: int) -> str:
    return LIVE.replace("SECONDS", str(seconds)).replace("CAPACITY", str(capacity_mib))


def test_the_curve_moves_before_the_cell_ends(lab: harness.Lab) -> None:
    lab.run_cell(0, wait=False)
    lab.page.wait_for_function("() => window.__memlab_live && window.__memlab_live.chunks > 8", timeout=30_000)
    assert lab.is_running(0)
    before = lab.page.evaluate("[window.__memlab_live.data[0].length, window.__memlab_live.drawn]")
    lab.page.wait_for_function(
        "([n, d]) => window.__memlab_live.data[0].length > n && window.__memlab_live.drawn > d", arg=before
    )
    assert lab.is_running(0)
    lab.wait_cell(0)
    assert "broken None" in lab.text(0)
    assert lab.page.evaluate("window.__memlab_live.dropped") == 0
    lab.page.wait_for_function("() => window.__memlab_live.done")
    assert "peak allocated" in lab.text(0) and "<img src=x" in lab.text(0)
    assert lab.page.evaluate("window.hacked") is None
    label = lab.cell(0).get_by_role("img").first.get_attribute("aria-label")
    assert label.startswith("Memory timeline of training after") and "peak allocated" in label
    lab.picture("live")
    assert (lab.foreign, lab.page_errors) == ([], [])


def test_stop_works_while_the_kernel_is_busy(lab: harness.Lab) -> None:
    lab.write("stop.ipynb", [live_cell(40, 80 * 1024)])
    lab.open("stop.ipynb")
    lab.run_cell(0, wait=False)
    stop = lab.cell(0).get_by_role("button", name="Stop", exact=True)
    stop.wait_for(timeout=30_000)
    lab.page.wait_for_function("() => window.__memlab_live.chunks > 5")  # by then JupyterLab has put its focus in place
    stop.focus()
    lab.page.keyboard.press("Enter")
    lab.wait_cell(0, 20)
    assert "stopped True" in lab.text(0)
    assert "off the scale" in lab.text(0)
    lab.picture("live-off-the-scale")
    assert (lab.foreign, lab.page_errors) == ([], [])


def test_a_stop_that_cannot_arrive_says_so(lab: harness.Lab) -> None:
    deaf = live_cell(5, 4096).replace("display(view)", "del view.comm._reply_subshell_for\ndisplay(view)")
    lab.write("deaf.ipynb", [deaf])
    lab.open("deaf.ipynb")
    lab.run_cell(0, wait=False)
    stop = lab.cell(0).get_by_role("button", name="Stop", exact=True)
    stop.wait_for(timeout=30_000)
    stop.click()
    assert lab.cell(0).get_by_role("button", name="Stopping…").is_disabled()
    lab.page.wait_for_function(
        "() => document.querySelector('.memlab-said').textContent.includes('when the cell ends')", timeout=4000
    )
    lab.picture("live-deaf")
    lab.wait_cell(0)


def test_a_view_whose_kernel_was_restarted_says_so_and_has_no_stop(lab: harness.Lab) -> None:
    lab.write("lost.ipynb", [live_cell(60, 4096)])
    lab.open("lost.ipynb")
    lab.run_cell(0, wait=False)
    stop = lab.cell(0).get_by_role("button", name="Stop", exact=True)
    stop.wait_for(timeout=30_000)
    lab.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:restart-kernel'); }")
    lab.page.get_by_role("button", name="Confirm Kernel Restart").click(timeout=10_000)
    lab.cell(0).get_by_text("The kernel was restarted").wait_for(timeout=30_000)
    assert not stop.is_visible()
    assert lab.page_errors == []


def test_the_axis_reaches_a_peak_that_no_sample_saw_and_only_some_phases_are_too_short(lab: harness.Lab) -> None:
    lab.write("missed.ipynb", [MISSED])
    lab.open("missed.ipynb")
    lab.run_cell(0)
    lab.page.wait_for_function("() => window.__memlab_live && window.__memlab_live.done && window.__memlab_live.top")
    assert lab.page.evaluate("window.__memlab_live.top") >= 840_000_000
    lab.cell(0).get_by_text("other phases are too short to shade at this scale").wait_for(timeout=10_000)


def test_a_view_opened_later_has_every_point(lab: harness.Lab) -> None:
    lab.write("late.ipynb", [LATE])
    lab.open("late.ipynb")
    lab.run_cell(0)
    lab.page.wait_for_function("() => window.__memlab_live && window.__memlab_live.done")
    assert lab.cell(0).locator(".memlab-live").count() == 2
    assert lab.page.evaluate("[window.__memlab_live.data[0].length, window.__memlab_live.dropped]") == [80, 0]
    assert "broken None" in lab.text(0)


def test_a_long_run_is_thinned_without_losing_its_peak(lab: harness.Lab) -> None:
    lab.write("long.ipynb", [LONG])
    lab.open("long.ipynb")
    lab.run_cell(0)
    lab.page.wait_for_function("() => window.__memlab_live && window.__memlab_live.done")
    lengths, highest, sorted_, dropped = lab.page.evaluate("""() => {
      const {data, dropped} = window.__memlab_live, sorted = data[0].every((t, i, all) => i === 0 || all[i - 1] <= t);
      return [data.map(row => row.length), Math.max(...data[1]), sorted, dropped]; }""")
    assert lengths[0] == lengths[1] <= 20_000
    assert (highest, sorted_, dropped) == (4e9, True, 0)
