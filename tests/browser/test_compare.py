"""`%memcompare` in a real JupyterLab: both runs on one axis, the switch, legible on light and dark, saved and small."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from browser import lab as harness

pytestmark = pytest.mark.browser

SETUP = """%load_ext memlab
import torch, memlab
from torch import nn
from torch.utils.checkpoint import checkpoint
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)])
x = torch.ones(256, 64)
checkpoint(model[0], x, use_reentrant=False).sum().backward()"""
BEFORE = """%%memtrack --name before --lines --quiet
model.zero_grad()
h = x
for block in model:
    h = block(h)
h.square().mean().backward()
float(model[0][0].weight.grad.norm())"""
AFTER = """%%memtrack --name "<b>with</b> checkpoint" --lines --quiet
model.zero_grad()
h = x
for block in model:
    h = checkpoint(block, h, use_reentrant=False)
h.square().mean().backward()
float(model[0][0].weight.grad.norm())"""
COMPARE = '%memcompare before "<b>with</b> checkpoint"'
SHORT = """import time
begin = time.perf_counter()
with memlab.track('short', show=False):
    x.repeat(2, 1)
took_s = time.perf_counter() - begin  # a busy machine makes that long, too
with memlab.track('long', show=False):
    x.repeat(2, 1)
    time.sleep(10 * took_s + 1)
memlab.compare('long', 'short')"""
PLOTLY, SVG = "application/vnd.plotly.v1+json", "image/svg+xml"
OURS = (PLOTLY, SVG, "text/plain", "text/html")
FIGURE = ".jp-OutputArea-output .main-svg"
AXIS = "seconds since the start of each"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Lab]:
    with harness.opened(tmp_path_factory, "compare.ipynb", [SETUP, BEFORE, AFTER, COMPARE, SHORT]) as lab:
        for cell in range(5):
            lab.run_cell(cell)
        lab.cell(3).locator(FIGURE).first.wait_for(timeout=30_000)
        yield lab


def test_the_figure_the_sentence_and_the_tables_are_shown(lab):
    text = lab.text(3)
    assert "<b>with</b> checkpoint: peak " in text
    assert "results equal bit for bit" in text
    for words in ("a: before", "by category", "by module", "by line", "h = checkpoint(block, h", " of each"):
        assert words in text, words
    assert lab.cell(3).locator(".barlayer .point").count() >= 6
    assert lab.cell(3).locator(".scatterlayer .trace").count() == 2


def test_both_themes_show_it(lab):
    for theme in ("light", "dark"):
        lab.theme(theme)
        assert lab.cell(3).locator(".barlayer .point").first.is_visible()
    lab.picture("compare", 3)


def test_the_switch_changes_the_axis_and_back(lab):
    figure = lab.cell(3)
    figure.scroll_into_view_if_needed()
    for label, words in (("share", "share of each run"), ("seconds", AXIS)):
        figure.locator(".updatemenu-button", has_text=label).click()
        figure.locator(".annotation-text", has_text=words).wait_for(timeout=10_000)
        ticks = figure.locator(".xtick text").all_text_contents()
        assert any("%" in tick for tick in ticks) == (label == "share")


def test_a_far_shorter_run_opens_with_shares(lab):
    assert "share of each run (one took " in lab.text(4)
    lab.picture("compare_short", 4)


def test_it_is_saved_small_and_shown_without_a_kernel(lab):
    outputs = lab.outputs(3)
    kinds = [set(output["data"]) for output in outputs]
    assert {PLOTLY, SVG} <= kinds[0]
    assert {"text/html", "text/plain"} == kinds[1]
    ours = sum(len(json.dumps(out["data"][mime])) for out in outputs for mime in OURS if mime in out["data"])
    whole = len(json.dumps(outputs))
    print(f"a comparison in a saved notebook: {ours} bytes of ours, {whole} with what JupyterLab added")
    assert ours <= 35_000
    assert whole <= 120_000
    lab.reopen_without_kernel()
    figure = lab.cell(3).locator(".jp-RenderedPlotly").first  # until somebody touches it, the PNG that was saved
    figure.wait_for(timeout=60_000)
    lab.page.wait_for_timeout(1000)
    assert figure.bounding_box()["height"] > 150
    assert "results equal bit for bit" in lab.text(3)


def test_nothing_was_fetched_and_no_name_became_markup(lab):
    assert lab.foreign == []
    assert lab.cell(3).locator("b", has_text="with").count() <= 1  # the sentence is bold, the name in it is text
    assert lab.page_errors == []
