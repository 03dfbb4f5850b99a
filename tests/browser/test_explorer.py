"""The explorer in a real JupyterLab, in a page of its own and in a converted notebook, used by mouse and keyboard."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import lab as harness

pytestmark = pytest.mark.browser

SETUP = """%load_ext memlab
import torch, memlab
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(4)], nn.Linear(64, 3000))
optimizer, history, x = torch.optim.Adam(model.parameters()), [], torch.ones(512, 64)"""
TRAIN = """%%memtrack --name "<img src=x onerror='window.hacked = 1'>" --lines --quiet
cache = torch.zeros(3 << 20)
for _ in range(6):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(torch.ones(256, 1024))"""
OTHER = """%%memtrack --name other --lines --quiet
model(x[:64]).square().mean().backward()"""
EXPLORE = "run = next(iter(memlab.runs.values()))\nrun.explore()"
TWO = "run.explore(memlab.runs['other'])"
SAVE = """run.explore().save('explorer.html')
print(max(run.breakdown('module'), key=run.breakdown('module').get).replace('elsewhere', 'outside any module'))"""

# Its capacity is drawn a few pixels below the top of the plot.
NEAR = """from scripted_traces import Script
from memlab.api.run import Run
from memlab.trace import Device
script = Script(Device(0, "small", capacity_bytes=int(7.4 * (1 << 20))))
script.free(script.alloc(7 << 20, at=10), at=20)
Run("near", script.trace(duration=30)).explore()"""
NOTES_TEXTS = """() => {
  const draw = CanvasRenderingContext2D.prototype.fillText;
  window.texts = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    window.texts.push([text, y]);
    draw.call(this, text, x, y); }; }"""

CACHE = 12 << 20
EXPLORER = ".memlab-explorer"
READY = """root => root && root.memlabExplorer && root.memlabExplorer.explorer &&
  root.memlabExplorer.explorer.plots.every(plot => plot.picture && !plot.isBusy && !plot.isStale)"""
# The middle of the longest row of pixels that belong to a block of this size.
PLACE = """async (root, size) => {
  const {explorer} = root.memlabExplorer, plot = explorer.plots[0], {blocks, view} = plot.picture;
  for (const piece of new Set(blocks)) {
    if (piece < 0 || (await explorer.engine.ask('facts', {run: 0, piece})).size !== size) continue;
    let best = [0, 0, 0];
    for (let y = 0; y < view.height; y++) for (let x = 0, first = 0; x < view.width; x++) {
      if (blocks[y * view.width + x] !== piece) first = x + 1;
      else if (x - first > best[0]) best = [x - first, (x + first) / 2, y];
    }
    const box = plot.canvas.getBoundingClientRect();
    return [box.x + 70 + best[1] / view.width * plot.width, box.y + 18 + (best[2] + 0.5) / view.height * plot.inner];
  }
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Lab]:
    cells = [SETUP, TRAIN, OTHER, EXPLORE, TWO, SAVE]
    with harness.opened(tmp_path_factory, "explorer.ipynb", cells) as lab:
        for cell in range(len(cells)):
            lab.run_cell(cell)
        yield lab


class Shown:
    """One explorer on a page."""

    def __init__(self, page: Any, root: Any) -> None:
        self.page, self.root = page, root
        root.locator("canvas").first.wait_for(timeout=20_000)
        root.scroll_into_view_if_needed()
        self.settle()

    def settle(self) -> None:
        """Wait until the picture is that of what is asked for."""
        self.page.wait_for_timeout(300)
        self.page.wait_for_function(READY, arg=self.root.element_handle(), timeout=20_000)

    def view(self) -> dict[str, Any]:
        return self.root.evaluate("root => root.memlabExplorer.explorer.view")

    def rows(self, column: int) -> list[list[str]]:
        """The rows of the left (0) or right (1) table below the picture."""
        part = self.root.locator(".memlab-below > div").nth(column)
        return [row.locator("th, td").all_inner_texts() for row in part.locator("tr").all()]

    def details(self) -> str:
        return self.root.locator(".memlab-below > div").nth(1).inner_text()

    def click_block(self, size: int) -> None:
        self.root.locator("canvas").first.scroll_into_view_if_needed()
        self.page.mouse.click(*self.root.evaluate(PLACE, size))
        self.page.wait_for_function("root => root.querySelector('.memlab-below dl')", arg=self.root.element_handle())
        self.settle()

    def drag(self, begin: float, end: float) -> None:
        """Drag over these shares of the picture's width."""
        box = self.root.locator("canvas").first.bounding_box()
        across = lambda share: box["x"] + 70 + share * (box["width"] - 84)  # noqa: E731
        self.page.mouse.move(across(begin), box["y"] + 60)
        self.page.mouse.down()
        self.page.mouse.move(across(end), box["y"] + 60, steps=5)
        self.page.mouse.up()
        self.settle()

    def press(self, name: str) -> None:
        self.root.get_by_role("button", name=name, exact=True).click()
        self.settle()


@pytest.fixture
def explorer(lab: harness.Lab) -> Shown:
    shown = Shown(lab.page, lab.cell(3).locator(EXPLORER).first)
    shown.root.get_by_label("Layers").select_option("category")
    shown.press("Show the whole run")
    return shown


@pytest.fixture
def page(lab: harness.Lab) -> Iterator[Any]:
    """A page outside of JupyterLab, without a network."""
    context = lab.browser.new_context(viewport={"width": 1300, "height": 1000}, offline=True)
    yield context.new_page()
    context.close()


def test_the_last_line_of_a_cell_shows_it_once_and_nothing_else(lab: harness.Lab, explorer: Shown) -> None:
    assert lab.cell(3).locator("canvas").count() == 1
    assert lab.cell(3).locator(".jp-OutputArea-child").count() == 1
    assert "Held at the peak" in lab.text(3)
    assert "To explore: trust" not in lab.text(3)
    assert "<img src=x onerror=" in lab.text(3)
    assert lab.page.evaluate("window.hacked") is None


def test_the_module_that_holds_the_peak_is_the_first_row(lab: harness.Lab, explorer: Shown) -> None:
    explorer.root.get_by_label("Layers").select_option("module")
    explorer.settle()
    assert explorer.rows(0)[0][0] == lab.text(5).strip()
    lab.picture("explorer_modules", 3)


def test_a_range_names_the_line_that_leaks(explorer: Shown) -> None:
    explorer.press("Select a range by dragging")
    explorer.drag(0.3, 0.8)
    text = explorer.details()
    assert "Peak " in text and "never freed in the run, by line" in text
    first = explorer.rows(1)[0]
    assert first[0].endswith(":8") and first[1].endswith("MiB")
    # A click on the name shows its blocks alone.
    explorer.root.locator(".memlab-below > div").nth(1).locator("button").first.click()
    explorer.settle()
    assert "6 blocks, " in explorer.root.locator(".memlab-tools").inner_text()
    explorer.root.get_by_label("Search").fill("")
    explorer.settle()


def test_a_click_on_a_block_says_what_it_is_and_what_keeps_it_alive(lab: harness.Lab, explorer: Shown) -> None:
    explorer.click_block(CACHE)
    text = explorer.details()
    for words in (
        "12.00 MiB",
        "12,582,912 B",
        "Category",
        "aten.zeros",
        "not freed in the run",
        "Kept alive by\ncache",
    ):
        assert words in text, (words, text)
    lab.picture("explorer_block", 3)


def test_search_counts_what_matches(explorer: Shown) -> None:
    explorer.root.get_by_label("Search").fill("aten.ONES.d")
    explorer.page.wait_for_timeout(500)
    explorer.settle()
    assert "6 blocks" in explorer.root.locator(".memlab-tools").inner_text()
    explorer.root.get_by_label("Search").fill("")
    explorer.page.wait_for_timeout(500)
    explorer.settle()
    assert "blocks" not in explorer.root.locator(".memlab-tools").inner_text()


def test_wheel_keys_and_drags_move_the_view(explorer: Shown) -> None:
    whole = explorer.view()
    explorer.click_block(CACHE)
    assert explorer.view() == whole
    explorer.page.mouse.wheel(0, -400)
    explorer.settle()
    near = explorer.view()
    assert near["x1"] - near["x0"] < 0.8 * (whole["x1"] - whole["x0"])
    explorer.drag(0.5, 0.3)
    assert explorer.view()["x0"] > near["x0"]
    explorer.root.locator("canvas").first.focus()
    for key, is_wider in (("+", False), ("-", True)):
        before = explorer.view()
        explorer.page.keyboard.press(key)
        explorer.settle()
        after = explorer.view()
        assert (after["x1"] - after["x0"] > before["x1"] - before["x0"]) is is_wider
    explorer.page.keyboard.press("ArrowUp")
    explorer.settle()
    assert explorer.view()["y1"] is not None
    explorer.page.keyboard.press("0")
    explorer.settle()
    assert explorer.view() == whole


def test_the_table_reaches_blocks_without_the_picture(explorer: Shown) -> None:
    explorer.root.get_by_text("Largest blocks of what is seen").click()
    button = explorer.root.locator(".memlab-list tbody button").first
    button.wait_for(timeout=10_000)
    assert button.inner_text() == "12.00 MiB"
    button.focus()
    explorer.page.keyboard.press("Enter")
    explorer.page.wait_for_timeout(500)
    assert "Kept alive by\ncache" in explorer.details()
    explorer.root.get_by_text("Largest blocks of what is seen").click()


def test_a_worker_that_was_closed_is_started_again_with_what_it_knew(explorer: Shown) -> None:
    explorer.root.get_by_label("Layers").select_option("module")
    explorer.press("Show the peak")
    before = explorer.rows(0)
    explorer.root.evaluate("root => root.memlabExplorer.explorer.engine.close()")
    explorer.press("Zoom in")
    explorer.press("Show the peak")
    assert explorer.rows(0) == before
    assert explorer.root.evaluate("root => root.memlabExplorer.explorer.plots[0].picture.view.x0") > 0


def test_the_axis_can_be_the_order_of_events(explorer: Shown) -> None:
    explorer.root.get_by_label("Axis").select_option("order")
    explorer.settle()
    assert explorer.view()["x1"] > 100
    explorer.root.get_by_label("Axis").select_option("time")
    explorer.settle()


def test_two_runs_have_one_scale(lab: harness.Lab) -> None:
    shown = Shown(lab.page, lab.cell(4).locator(EXPLORER).first)
    assert shown.root.locator("canvas").count() == 2
    tops = shown.root.evaluate("root => root.memlabExplorer.explorer.plots.map(plot => plot.picture.y1)")
    assert tops[0] == tops[1]
    lab.picture("explorer_two", 4)


def test_a_saved_page_needs_no_kernel_and_no_worker(lab: harness.Lab, page: Any) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    path = (lab.root / "explorer.html").as_uri()
    page.goto(path)
    shown = Shown(page, page.locator(EXPLORER))
    shown.click_block(CACHE)
    assert "Kept alive by\ncache" in shown.details()
    page.add_init_script("window.Worker = class { constructor() { throw new Error('refused'); } };")
    page.goto(path)
    shown = Shown(page, page.locator(EXPLORER))
    shown.click_block(CACHE)
    assert "Kept alive by\ncache" in shown.details()
    assert errors == []
    assert page.evaluate("window.hacked") is None


def test_without_scripts_the_largest_blocks_are_a_table(lab: harness.Lab) -> None:
    context = lab.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((lab.root / "explorer.html").as_uri())
    assert page.get_by_text("12.00 MiB").first.is_visible()
    assert "To explore: trust the notebook" in page.inner_text("body")
    context.close()


def test_a_converted_notebook_has_it(lab: harness.Lab, page: Any, tmp_path: Path) -> None:
    lab.save()
    notebook = str(lab.root / "explorer.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "html", notebook, "--output-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    page.goto((tmp_path / "explorer.html").as_uri())
    shown = Shown(page, page.locator(EXPLORER).first)
    shown.click_block(CACHE)
    assert "12.00 MiB" in shown.details()


def test_nothing_was_asked_of_the_network_and_nothing_failed(lab: harness.Lab) -> None:
    assert lab.foreign == []
    assert lab.page_errors == []


def test_the_name_of_a_capacity_near_the_top_is_not_cut(lab: harness.Lab) -> None:
    lab.write("near.ipynb", [NEAR])
    lab.open("near.ipynb")
    lab.page.evaluate(NOTES_TEXTS)
    lab.run_cell(0)
    Shown(lab.page, lab.cell(0).locator(EXPLORER))
    places = [y for text, y in lab.page.evaluate("window.texts") if text.startswith("capacity")]
    assert places and min(places) >= 18 + 7  # the top of the plot, and half a line
