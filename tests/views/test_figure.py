from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from handmade import GPU, HOST, Script, busy

from memlab.analysis.curves import Curves, curves
from memlab.trace import Bounded, Device
from memlab.views.figure import timeline_figure


def drawn(script: Script, **made_by: object) -> Curves:
    return curves(script.trace(**made_by), script.devices[0])


def step() -> Script:
    script = Script()
    script.segment(4 << 20, at=0)
    script.free(script.alloc(3 << 20, at=500_000_000), at=1_000_000_000)
    return script


def sent(figure: object) -> dict:
    return json.loads(figure.to_json())


def numbers(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


def test_the_curves_are_stairs_with_the_peak_at_its_place():
    figure = sent(timeline_figure(drawn(step())))
    allocated, reserved = figure["data"][:2]
    assert (allocated["name"], reserved["name"]) == ("allocated", "reserved")
    assert allocated["line"]["shape"] == "hv"
    x, y = numbers(allocated["x"]), numbers(allocated["y"])
    assert (x[y.argmax()], y.max()) == (0.5, 3 << 20)
    (note,) = figure["layout"]["annotations"]
    assert (note["x"], note["y"], note["text"]) == (0.5, 3 << 20, "peak 3.00 MiB")


def test_a_bounded_peak_has_no_place_and_the_stretch_a_shade():
    layout = sent(timeline_figure(drawn(step(), bounded=(Bounded(0, 0, 600_000_000, 9),))))["layout"]
    assert "annotations" not in layout
    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(0, 0.6)]


def test_numbers_take_four_bytes():
    figure = sent(timeline_figure(drawn(step())))
    assert {figure["data"][0][axis]["dtype"] for axis in "xy"} == {"f4"}


@pytest.mark.parametrize("title", ["<b>x</b><script>alert(1)</script>", "<a href='javascript:x'>y</a>"])
def test_a_title_stays_text(title):
    shown = sent(timeline_figure(drawn(step()), title))["layout"]["title"]["text"]
    assert "<" not in shown
    assert "&lt;" in shown


def test_a_title_has_no_characters_that_steer():
    shown = sent(timeline_figure(drawn(step()), "a\x1b[1m\nb"))["layout"]["title"]["text"]
    assert shown == "a [1m b"


def test_the_page_shows_through():
    layout = sent(timeline_figure(drawn(step())))["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert len(json.dumps(layout["template"])) < 100  # plotly's own has white pages, and 7 kB


def test_the_capacity_is_a_line_where_the_curves_come_near_it():
    near = Script(Device(0, "small", capacity_bytes=4 << 20))
    near.alloc(3 << 20, at=1)
    (line,) = sent(timeline_figure(drawn(near)))["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 4 << 20
    far = Script(GPU)
    far.alloc(3 << 20, at=1)
    assert "shapes" not in sent(timeline_figure(drawn(far)))["layout"]


@pytest.mark.parametrize("script", [Script(), Script(HOST)])
def test_an_empty_run_is_still_a_figure(script):
    assert len(sent(timeline_figure(drawn(script)))["data"]) >= 1


def test_nothing_is_fetched():
    trace = busy(2000)
    text = timeline_figure(curves(trace, trace.made_by.devices[0]), "x").to_json()
    assert "http" not in text
