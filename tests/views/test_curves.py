"""The timeline of a run, drawn twice from one scene: as plotly and as SVG."""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from scripted_traces import GPU, HOST, Script, busy

from memlab.analysis.curves import Curve, Curves, curves
from memlab.trace import Bounded, Category, Device, MarkKind
from memlab.views import theme
from memlab.views.curves import described, sparkline, timeline_scene
from memlab.views.plotly import figure
from memlab.views.scene import Axis, Label, Line, Panel, Scene, Shade, byte_ticks, short_bytes
from memlab.views.shown import PLOTLY, bundle
from memlab.views.svg import WIDTH, Space, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def drawn(script: Script, **made_by: object) -> Curves:
    return curves(script.trace(**made_by), script.devices[0])


def step() -> Script:
    script = Script()
    script.segment(4 << 20, at=0)
    block = script.alloc(3 << 20, at=500_000_000)
    script.mark(MarkKind.PHASE_BEGIN, "backward", 600_000_000)
    script.free(block, at=1_000_000_000)
    return script


def trained() -> Script:
    script = Script()
    script.alloc(2 << 20, at=0, requested=(2 << 20) - 300, category=Category.PARAMETER)
    script.free(script.alloc(5 << 20, at=400_000_000, category=Category.ACTIVATION), at=900_000_000)
    script.alloc(1 << 20, at=1_000_000_000, category=Category.GRADIENT)
    return script


def plotted(curves: Curves, title: str = "") -> dict:
    return json.loads(figure(timeline_scene(curves, title)).to_json())


def numbers(packed: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


def picture(curves: Curves, title: str = "") -> tree.Element:
    root = tree.fromstring(svg(timeline_scene(curves, title)))
    assert root.tag == f"{NAMESPACE}svg"
    return root


def texts(root: tree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NAMESPACE}text")]


def paths(root: tree.Element) -> list[tree.Element]:
    return list(root.iter(f"{NAMESPACE}path"))


def places(path: tree.Element) -> tuple[list[int], list[int]]:
    """Every x and every y that a path comes to."""
    x = y = 0
    across, down = [], []
    for letter, first, second in re.findall(r"([MLHVhvZz])(-?\d+)? ?(-?\d+)?", path.get("d", "")):
        if letter in "ML":
            x, y = int(first), int(second)
        elif letter in "Hh":
            x = int(first) + (x if letter == "h" else 0)
        elif letter in "Vv":
            y = int(first) + (y if letter == "v" else 0)
        across.append(x)
        down.append(y)
    return across, down


def space(curves: Curves) -> Space:
    scene = timeline_scene(curves)
    return Space(scene, scene.panels[0])


# --- both -------------------------------------------------------------------------------------------------------------


def test_the_curves_are_stairs_with_the_peak_at_its_place():
    found = drawn(step())
    allocated, reserved = plotted(found)["data"][:2]
    assert (allocated["name"], reserved["name"]) == ("allocated", "reserved")
    assert allocated["line"]["shape"] == "hv"
    x, y = numbers(allocated["x"]), numbers(allocated["y"])
    assert (x[y.argmax()], y.max()) == (0.5, 3)
    (note,) = plotted(found)["layout"]["annotations"]
    assert (note["x"], note["y"], note["text"]) == (0.5, 3, "peak 3.00 MiB")
    root, at = picture(found), space(found)
    assert "peak 3.00 MiB" in texts(root)
    (dot,) = root.iter(f"{NAMESPACE}circle")
    assert (int(dot.get("cx", "")), int(dot.get("cy", ""))) == (int(at.x(0.5)), int(at.y(3 << 20)))
    assert int(at.y(3 << 20)) in [y for path in paths(root) for y in places(path)[1]]


def test_a_bounded_peak_has_no_place_and_the_stretch_a_shade():
    found = drawn(step(), bounded=(Bounded(0, 0, 600_000_000, 9),))
    layout = plotted(found)["layout"]
    assert "annotations" not in layout
    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(0, 0.6)]
    titles = [one.text for one in picture(found).iter(f"{NAMESPACE}title")]
    assert "not all events of this stretch are known" in titles
    assert not any("not all" in (one.text or "") for one in picture(drawn(step())).iter(f"{NAMESPACE}title"))


@pytest.mark.parametrize(("share", "x", "anchor"), [(0.9, 0, "start"), (0.1, 1, "end")])
def test_the_name_of_the_capacity_stands_away_from_the_peak(share, x, anchor):
    script = Script(Device(0, "small", capacity_bytes=8 << 20))
    script.alloc(2 << 20, at=0)
    script.free(script.alloc(5 << 20, at=round(share * 1e9)), at=round(share * 1e9) + 10_000_000)
    script.alloc(1 << 20, at=1_000_000_000)
    made = drawn(script)
    (named,) = (one for one in plotted(made)["layout"]["annotations"] if one["text"] == "capacity 8.00 MiB")
    assert named["x"] == x
    (text,) = (one for one in picture(made).iter(f"{NAMESPACE}text") if one.text == "capacity 8.00 MiB")
    assert text.get("text-anchor") == anchor


@pytest.mark.parametrize("size_mib", [8, 7.9, 7.5, 5])
def test_the_name_of_the_peak_is_not_crossed_by_the_capacity(size_mib):
    script = Script(Device(0, "small", capacity_bytes=8 << 20))
    script.free(script.alloc(int(size_mib * (1 << 20)), at=500_000_000), at=1_000_000_000)
    found = drawn(script)
    svg = picture(found)
    (dot,) = svg.iter(f"{NAMESPACE}circle")
    (text,) = (one for one in svg.iter(f"{NAMESPACE}text") if (one.text or "").startswith("peak "))
    (rule,) = (one for one in svg.iter(f"{NAMESPACE}path") if one.get("stroke-dasharray") == "6 3")
    line, baseline = int(re.findall(r" (\d+)H", rule.get("d", ""))[0]), int(text.get("y", ""))
    assert baseline == min(int(dot.get("cy", "")), line if size_mib > 7 else 999) - 5 and baseline > 20
    (named,) = (one for one in plotted(found)["layout"]["annotations"] if one["text"].startswith("peak "))
    assert named["ay"] == (8 if size_mib > 7 else -16)


def test_the_capacity_is_a_line_where_the_curves_come_near_it():
    near, far = Script(Device(0, "small", capacity_bytes=8 << 20)), Script(GPU)
    for script in (near, far):
        script.alloc(6 << 20, at=1)
    (line,) = plotted(drawn(near))["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 8
    assert "shapes" not in plotted(drawn(far))["layout"]
    assert "capacity 8.00 MiB" in texts(picture(drawn(near)))
    assert not any("capacity" in text for text in texts(picture(drawn(far))))


@pytest.mark.parametrize(
    "title", ["plain", "<script>&\"'", "<b>x</b>", "\x1b[31m\x00\x0b\nred", "ünïcödé 🚀", "\ud800", "﷐￾"]
)
def test_a_title_stays_text(title):
    root = picture(drawn(step()), title)
    assert [child.tag for child in root][:2] == [f"{NAMESPACE}title", f"{NAMESPACE}desc"]
    assert not list(root.iter(f"{NAMESPACE}script"))
    shown = plotted(drawn(step()), title)["layout"].get("title", {}).get("text", "")
    assert "<" not in shown and shown.isprintable()


@pytest.mark.parametrize("script", [Script(), Script(HOST)])
def test_an_empty_run_is_still_a_picture(script):
    assert len(plotted(drawn(script), "nothing")["data"]) >= 1
    assert "0" in texts(picture(drawn(script), "nothing"))


def test_under_the_line_lie_the_categories_in_one_order_each_in_its_colour():
    found = drawn(trained())
    data = plotted(found)["data"]
    layers = [one for one in data if "stackgroup" in one]
    assert [one["name"] for one in layers] == ["parameter", "gradient", "activation", "rounding"]
    assert [one["fillcolor"] for one in layers] == [theme.CATEGORIES[one["name"]] for one in layers]
    (line,) = (one for one in data if one["name"] == "allocated")
    assert all(one["x"] == line["x"] for one in layers)
    assert np.allclose(sum(numbers(one["y"]).astype("f8") for one in layers), numbers(line["y"]), rtol=1e-6)
    assert "fill" not in line
    root = picture(found)
    names = {colour: name for name, colour in theme.CATEGORIES.items()}
    areas = [names[path.get("fill", "")] for path in paths(root) if path.get("d", "").endswith("Z")]
    assert areas == ["activation", "gradient", "parameter"]  # from the highest down; rounding is less than a pixel
    named = [word for word in texts(root) if word in theme.CATEGORIES]
    assert named == ["rounding", "activation", "gradient", "parameter"]


def test_without_categories_there_are_no_layers():
    found = plotted(drawn(step()))
    assert not any("stackgroup" in one for one in found["data"]) and "legend2" not in found["layout"]


def test_the_kinds_of_curves_labels_and_shades_are_told_apart_in_both():
    x, y = np.array([0.0, 1.0, 2.0]), np.array([0, 2 << 20, 0])
    lines = [Line(shape, x, y, "#123456", 2, shape=shape) for shape in ("stair", "samples", "joined")]
    lines.append(Line("hidden", x, y, "#123456", hidden=True))
    lines.append(Line("nameless", x, y, "#123456", named=False))
    labels = [Label(at, 1 << 20, str(at), points=True) for at in (0.5, 1.5)]
    axes = (Axis(0, 2, ()),)
    left = Panel(Axis.of_bytes(4 << 20), {"": axes}, (*lines, *labels, Shade(0, 1, "#654321", 0.25)), end=0.5)
    right = Panel(left.y, {"": axes}, (Label(1, 1 << 20, "there"),), begin=0.5)
    scene = Scene("title", "words", (left, right))
    content = json.loads(figure(scene).to_json())
    assert [one["line"].get("dash", one["line"].get("shape")) for one in content["data"]][:3] == ["hv", "dash", "solid"]
    assert [one.get("visible") for one in content["data"]] == [None, None, None, "legendonly", None]
    assert [one.get("showlegend") for one in content["data"]] == [None, None, None, None, False]
    notes, (shade,) = content["layout"]["annotations"], content["layout"]["shapes"]
    assert [(note.get("ax"), note.get("xref", "x")) for note in notes] == [(56, "x"), (-56, "x"), (None, "x2")]
    assert (shade["opacity"], shade["fillcolor"]) == (0.25, "#654321")
    found = tree.fromstring(svg(scene))
    assert [text for text in texts(found) if text.isalpha()] == ["there", "stair", "samples", "joined"]
    dashes = [path.get("stroke-dasharray") for path in paths(found) if path.get("stroke") == "#123456"]
    assert dashes == [None, None, "5 3", None]  # the first curve is drawn last


def test_a_limit_is_a_named_line_in_both_and_the_budget_is_one():
    script = Script(Device(0, "small", capacity_bytes=8 << 20))
    script.alloc(6 << 20, at=1)
    found = curves(script.trace(notes={"budget_bytes": 5 << 20}), script.devices[0])
    named = {"capacity 8.00 MiB", "budget 5.00 MiB"}
    assert named <= set(texts(picture(found)))
    assert named <= {note["text"] for note in plotted(found)["layout"]["annotations"]}
    # Each on its own ground: under it may be an area.
    notes = [note for note in plotted(found)["layout"]["annotations"] if note["text"] in named]
    assert {(note["bgcolor"], note["font"]["color"]) for note in notes} == {(theme.CAPACITY, theme.ON_CAPACITY)}
    grounds = [box for box in picture(found).iter(f"{NAMESPACE}rect") if box.get("fill") == theme.CAPACITY]
    assert len(grounds) == 2
    assert found.budget_bytes == 5 << 20
    far = curves(script.trace(notes={"budget_bytes": 1 << 40}), script.devices[0])
    assert not any("budget" in text for text in texts(picture(far)))


def test_host_memory_does_not_stretch_the_axis():
    script = Script(HOST)
    script.alloc(1 << 20, at=1)
    script.sample(2, -1, -1, -1, 2 << 20)
    found = drawn(script, duration=10)
    assert [curve.name for curve in found.curves] == ["allocated", "rss"] and found.top_bytes == 1 << 20
    assert "rss" not in texts(picture(found))


@pytest.mark.parametrize(("name", "notes"), [("card (simulated)", {}), ("card", {"prediction": {"peaks": {
    of: [3 << 20, 3 << 20] for of in ("allocated", "reserved", "device used")}}})])  # fmt: skip
def test_without_times_the_axis_is_the_order_of_events(name, notes):
    script = step()
    script.devices = (Device(0, name),)
    found = curves(script.trace(notes=notes), script.devices[0])
    axis = timeline_scene(found).panels[0].axes[0]
    assert (axis.high, axis.unit, axis.title) == (3, "events", "allocations and frees, in order")
    assert found.peak.time_ns == 2_000_000_000  # the second event
    (note,) = plotted(found)["layout"]["annotations"]
    assert note["x"] == 2 and "allocations and frees, in order" in texts(picture(found))
    assert ("predicted" if notes else "simulated GPU") in described(found)


def test_phases_that_are_too_short_to_draw_are_shares_and_the_lowest_line_has_a_name():
    few, many = Script(HOST), Script(HOST)
    for script, steps in ((few, 4), (many, 4000)):
        for begin in range(0, 2000 * steps, 2000):
            block = script.alloc(1 << 20, at=begin)
            script.mark(MarkKind.PHASE_BEGIN, "backward", begin)
            script.mark(MarkKind.PHASE_END, "backward", begin + 1000)
            script.free(block, at=begin + 1100)
    assert len(drawn(few).phases) and not timeline_scene(drawn(few)).keys[0][0].endswith("%")
    found = drawn(many)
    assert not len(found.phases)
    assert [name for name, _ in timeline_scene(found).keys] == ["backward 50 %"]
    assert "lowest of each moment" in texts(picture(found))


@pytest.mark.parametrize(
    ("duration", "texts"), [(0.618, ["0", *(f"{i}00 ms" for i in range(1, 7))]), (2.2, ["0", "0.5 s", "1 s", "1.5 s", "2 s"]),
    (805, ["0", "5 min", "10 min"]), (4e-6, ["0", "1 µs", "2 µs", "3 µs", "4 µs"])])  # fmt: skip
def test_ticks_of_time_are_round_and_in_one_unit(duration, texts):
    assert [text for _, text in Axis.of_seconds(duration, 5).ticks] == texts


def test_the_toolbar_shows_on_hover_alone():
    config = bundle(timeline_scene(drawn(step())))[PLOTLY]["config"]
    assert config["displayModeBar"] == "hover" and not config["displaylogo"]


def test_the_ticks_of_a_short_run_are_our_own_as_plotly_writes_100_microseconds_as_if_of_another_unit():
    script = Script(HOST)
    script.alloc(1 << 20, at=1000)
    short, long = (plotted(drawn(script, duration=ns))["layout"]["xaxis"] for ns in (600_000, 2_000_000_000))
    assert (short["tickmode"], short["ticktext"][:2], long["tickmode"]) == ("array", ["0", "100 µs"], "auto")


@pytest.mark.parametrize(("words", "room"), [(" ".join(["word"] * 13), 22), ("a title", 0)])
def test_a_long_heading_stands_below_the_toolbar(words, room):
    layout = plotted(drawn(step()), words)["layout"]
    assert layout["title"]["pad"]["t"] == 8 + room and layout["margin"]["t"] == 34 + 17 + room


# --- plotly -----------------------------------------------------------------------------------------------------------


def test_a_figure_is_small_fetches_nothing_and_lets_the_page_show_through():
    content = plotted(drawn(step()))
    assert {content["data"][0][axis]["dtype"] for axis in "xy"} == {"f4"}
    layout = content["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert len(json.dumps(layout["template"])) < 100  # plotly's own has white pages, and 7 kB
    trace = busy(2000)
    first = plotted(curves(trace, trace.made_by.devices[0]))
    assert "http" not in json.dumps(first)
    assert "x" not in first["data"][0]  # evenly spaced times are not written down
    width = first["data"][0]["dx"] * (len(numbers(first["data"][0]["y"])) - 1)
    assert width == pytest.approx(trace.made_by.duration_ns / 1e9)


@pytest.mark.parametrize(("top", "unit"), [(5 << 30, "MiB"), (1 << 20, "MiB"), (5000, "KiB"), (17, "B")])
def test_the_axis_counts_in_a_unit_that_suits(top, unit):
    assert Axis.of_bytes(top).unit == unit
    assert {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}[unit] == Axis.of_bytes(top).divisor


@pytest.mark.parametrize("template", ["plotly_white", "none"])
def test_what_a_pointer_finds_has_its_unit_whatever_the_template(template):
    found = figure(timeline_scene(drawn(step()), "one"))
    found.layout.template = template
    axis = json.loads(found.to_json())["layout"]["yaxis"]
    assert (axis["hoverformat"], axis["ticksuffix"]) == (",.4~r", " MiB")
    assert all(text.endswith("B") for text in axis["ticktext"] if text != "0")  # what it says next to a tick


# --- SVG --------------------------------------------------------------------------------------------------------------


def test_everything_lies_inside_the_picture():
    trace = busy(5000)
    root = picture(curves(trace, trace.made_by.devices[0]), "busy")
    height = int(root.get("viewBox", "").split()[-1])
    for path in paths(root):
        across, down = places(path)
        assert 0 <= min(across) <= max(across) <= WIDTH
        assert 0 <= min(down) <= max(down) <= height


def test_the_line_is_drawn_as_long_as_the_curve_and_the_sides_of_its_area_stay_bare():
    found = drawn(step())
    area = next(path for path in paths(picture(found)) if "99999" in path.get("stroke-dasharray", ""))
    at = space(found)
    rise = int(at.y(0)) - int(at.y(3 << 20))
    assert area.get("stroke-dasharray") == f"{int(at.x(1.0)) - int(at.x(0.0)) + 2 * rise} 99999"


def test_a_curve_of_highest_levels_has_its_other_end():
    script = Script(HOST)
    for i in range(2000):
        script.free(script.alloc(1 << 20, at=20 * i), at=20 * i + 10)
    found = drawn(script)
    assert found.lowest is not None
    begins = [places(path)[1][0] for path in paths(picture(found)) if path.get("fill") == "none"]
    assert int(space(found).y(0)) in begins


# --- words ------------------------------------------------------------------------------------------------------------


def test_the_twin_in_words_says_what_is_seen():
    assert described(drawn(step())).startswith(
        "Memory of cuda:0 over 1.0 s: allocated began at 0 B, peaked at 3.00 MiB at 500 ms and ended at 0 B."
    )
    assert "peaked at at least 3.00 MiB" in described(drawn(step(), bounded=(Bounded(0, 1, 2, 3),)))
    assert "Held at the peak: activation 5.00 MiB, parameter 2.00 MiB, rounding 300 B. " in described(drawn(trained()))
    assert "Held" not in described(drawn(step()))
    assert "Held" not in described(drawn(trained(), bounded=(Bounded(0, 1, 2, 3),)))


def test_a_sparkline_shows_the_highest_of_each_stretch():
    curve = Curve("a", np.array([0.0, 0.9, 1.0, 3.0]), np.array([0, 80, 10, 20]), True)
    assert sparkline(curve, 4.0, width=4) == "█▂▂▃"
    assert sparkline(Curve("a", np.array([0.0]), np.array([0]), True), 0.0, width=3) == "▁▁▁"


@pytest.mark.parametrize("top", [1, 17, 1000, 1 << 20, 3 << 30, 5 << 40, 2.2e9])
def test_ticks_are_few_round_and_within(top):
    ticks = byte_ticks(top)
    assert ticks[0] == 0 and ticks[-1] <= top and 2 <= len(ticks) <= 7
    assert len({short_bytes(tick) for tick in ticks}) == len(ticks)
