from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from handmade import GPU, HOST, Script, busy

from memlab.analysis.curves import Curves, curves
from memlab.trace import Bounded, Category, Device
from memlab.views import theme
from memlab.views.figure import Unit, timeline_figure


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
    assert (x[y.argmax()], y.max()) == (0.5, 3)
    (note,) = figure["layout"]["annotations"]
    assert (note["x"], note["y"], note["text"]) == (0.5, 3, "peak 3.00 MiB")


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
    assert line["y0"] == line["y1"] == 4
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


def trained() -> Script:
    script = Script()
    script.alloc(2 << 20, at=0, requested=(2 << 20) - 300, category=Category.PARAMETER)
    script.free(script.alloc(5 << 20, at=400_000_000, category=Category.ACTIVATION), at=900_000_000)
    script.alloc(1 << 20, at=1_000_000_000, category=Category.GRADIENT)
    return script


def test_under_the_allocated_line_lie_the_categories_in_one_order_each_in_its_colour():
    layers = [one for one in sent(timeline_figure(drawn(trained())))["data"] if "stackgroup" in one]
    assert [one["name"] for one in layers] == ["parameter", "gradient", "activation", "rounding"]
    assert [one["fillcolor"] for one in layers] == [theme.CATEGORIES[one["name"]] for one in layers]
    assert len({one["stackgroup"] for one in layers}) == 1


def test_the_layers_sum_to_the_line_at_its_own_times():
    figure = sent(timeline_figure(drawn(trained())))["data"]
    (line,) = (one for one in figure if one["name"] == "allocated")
    layers = [one for one in figure if "stackgroup" in one]
    assert all(one["x"] == line["x"] for one in layers)
    assert np.allclose(sum(numbers(one["y"]).astype("f8") for one in layers), numbers(line["y"]), rtol=1e-6)
    assert "fill" not in line


def test_without_categories_there_are_no_layers():
    figure = sent(timeline_figure(drawn(step())))
    assert not any("stackgroup" in one for one in figure["data"])
    assert "legend2" not in figure["layout"]


def test_evenly_spaced_times_are_not_written_down():
    trace = busy(2000)
    first = sent(timeline_figure(curves(trace, trace.made_by.devices[0])))["data"][0]
    assert "x" not in first
    assert first["dx"] * (len(numbers(first["y"])) - 1) == pytest.approx(trace.made_by.duration_ns / 1e9)


@pytest.mark.parametrize(("top", "unit"), [(5 << 30, "MiB"), (1 << 20, "MiB"), (5000, "KiB"), (17, "B")])
def test_the_axis_counts_in_a_unit_that_suits(top, unit):
    assert Unit(top).name == unit
    assert Unit(top).of(top) * Unit(top).bytes == top
    assert Unit(top).hover.endswith(unit)
