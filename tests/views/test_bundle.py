from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from handmade import HOST, Script, busy

from memlab.session.run import Run
from memlab.session.show import RunReport
from memlab.views.bundle import PLOTLY, SVG, weight

LIMIT = 35_000


@pytest.mark.parametrize("events", [40_000, 3_000])
def test_all_that_a_busy_cell_leaves_in_the_notebook_is_small(events):
    shown = RunReport(Run("n" * 200, busy(events)))
    figure, table = shown.figure_bundle(), shown.table_bundle()
    assert set(figure) == {PLOTLY, SVG, "text/plain"}
    assert set(table) == {"text/html", "text/plain"}
    assert weight(figure) + weight(table) <= LIMIT


@pytest.mark.parametrize("events", [40_000, 3_000, 150])
def test_with_areas_of_every_category_it_is_small_too(events):
    trace = busy(events)
    category = np.random.default_rng(0).integers(0, 8, len(trace.blocks))
    trace = dataclasses.replace(trace, blocks=trace.blocks.replace(category=category))
    shown = RunReport(Run("n" * 200, trace))
    figure, table = shown.figure_bundle(), shown.table_bundle()
    assert len([one for one in figure[PLOTLY]["data"] if "stackgroup" in one]) == 9
    assert weight(figure) + weight(table) <= LIMIT


def test_a_bundle_is_what_a_notebook_file_can_hold():
    bundle = RunReport(Run("x", busy(500))).bundle()
    assert json.loads(json.dumps(bundle)) == bundle
    tree.fromstring(bundle[SVG])
    assert bundle[PLOTLY]["data"]
    assert not any("widget" in kind for kind in bundle)


def test_the_report_of_a_run_prints_and_shows_itself():
    run = Run("x", busy(500))
    assert str(run) == str(run.report()) == repr(run.report()) == run.report().text
    assert set(run._repr_mimebundle_()) == {PLOTLY, SVG, "text/html", "text/plain"}
    assert run.report().figure.data
    assert run.report().to_pandas().shape[0] == 4


@pytest.mark.parametrize("name", ["<script>", "\x1b[2J", "a\nb", "x" * 10_000])
def test_a_name_is_text_everywhere(name):
    script = Script(HOST)
    script.alloc(10, at=1)
    bundle = RunReport(Run(name, script.trace())).bundle()
    assert "<script>" not in bundle["text/html"] + bundle[SVG] + bundle[PLOTLY]["layout"]["title"]["text"]
    assert not any("\x1b" in json.loads(json.dumps(content)) for content in bundle.values() if isinstance(content, str))


def test_a_run_without_a_device_says_so_instead_of_drawing():
    script = Script()
    script.devices = ()
    shown = RunReport(Run("none", script.trace()))
    assert set(shown.figure_bundle()) == {"text/plain"}
    assert "no device" in shown.figure_bundle()["text/plain"]
    assert "No device" in shown.text
    assert "no device was used" in repr(shown.run)
