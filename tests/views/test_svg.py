from __future__ import annotations

import re
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from handmade import GPU, HOST, Script, busy

from memlab.analysis.curves import Curve, Curves, curves
from memlab.trace import Bounded, Category, Device, MarkKind
from memlab.views import theme
from memlab.views.svg import HEIGHT, WIDTH, Frame, byte_ticks, described, short_bytes, sparkline, timeline_svg

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


def parsed(svg: str) -> tree.Element:
    root = tree.fromstring(svg)
    assert root.tag == f"{NAMESPACE}svg"
    return root


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{NAMESPACE}text")]


@pytest.mark.parametrize("title", ["plain", "<script>&\"'", "\x1b[31m\x00\x0b\nred", "ünïcödé 🚀", "\ud800", "﷐￾"])
def test_whatever_the_title_is_the_picture_is_well_formed(title):
    root = parsed(timeline_svg(drawn(step()), title))
    assert [child.tag for child in root][:2] == [f"{NAMESPACE}title", f"{NAMESPACE}desc"]
    assert not list(root.iter(f"{NAMESPACE}script"))


def test_the_title_is_the_one_that_was_given():
    title = parsed(timeline_svg(drawn(step()), "a < b & c")).find(f"{NAMESPACE}title")
    assert title is not None
    assert title.text == "a < b & c"


def test_the_peak_is_written_and_drawn_where_it_is():
    found = drawn(step())
    svg = timeline_svg(found, "")
    assert "peak 3.00 MiB" in texts(svg)
    (dot,) = parsed(svg).iter(f"{NAMESPACE}circle")
    frame = Frame(found)
    assert (int(dot.get("cx", "")), int(dot.get("cy", ""))) == (int(frame.x(0.5)), int(frame.y(3 << 20)))
    assert int(frame.y(3 << 20)) in [
        y for path in parsed(svg).iter(f"{NAMESPACE}path") for y in places(path.get("d", ""))[1]
    ]


def test_everything_lies_inside_the_picture():
    trace = busy(5000)
    svg = timeline_svg(curves(trace, trace.made_by.devices[0]), "busy")
    for path in parsed(svg).iter(f"{NAMESPACE}path"):
        across, down = places(path.get("d", ""))
        assert 0 <= min(across) <= max(across) <= WIDTH
        assert 0 <= min(down) <= max(down) <= HEIGHT


def places(path: str) -> tuple[list[int], list[int]]:
    """Every x and every y that a path comes to."""
    x = y = 0
    across, down = [], []
    for letter, first, second in re.findall(r"([MLHVhvZz])(-?\d+)? ?(-?\d+)?", path):
        if letter in "ML":
            x, y = int(first), int(second)
        elif letter in "Hh":
            x = int(first) + (x if letter == "h" else 0)
        elif letter in "Vv":
            y = int(first) + (y if letter == "v" else 0)
        across.append(x)
        down.append(y)
    return across, down


def test_the_line_is_drawn_as_long_as_the_curve_and_the_sides_of_its_area_stay_bare():
    area = next(
        p for p in parsed(timeline_svg(drawn(step()), "")).iter(f"{NAMESPACE}path") if p.get("stroke-dasharray")
    )
    frame = Frame(drawn(step()))
    rise = int(frame.y(0)) - int(frame.y(3 << 20))
    assert area.get("stroke-dasharray") == f"{int(frame.x(1.0)) - int(frame.x(0.0)) + 2 * rise} 99999"


def test_the_capacity_is_a_line_where_the_curves_come_near_it():
    far, near = Script(GPU), Script(Device(0, "small", capacity_bytes=8 << 20))
    for script in (far, near):
        script.alloc(6 << 20, at=1)
    assert not any("capacity" in text for text in texts(timeline_svg(drawn(far), "")))
    assert "capacity 8.00 MiB" in texts(timeline_svg(drawn(near), ""))


def test_a_stretch_without_events_is_shaded():
    plain = timeline_svg(drawn(step()), "")
    shaded = timeline_svg(drawn(step(), bounded=(Bounded(0, 1, 600_000_000, 9),)), "")
    assert "not all events" not in plain
    assert "not all events of this stretch are known" in shaded
    parsed(shaded)


@pytest.mark.parametrize("script", [Script(), Script(HOST)])
def test_an_empty_run_is_still_a_picture(script):
    assert "0" in texts(timeline_svg(drawn(script), "nothing"))


def test_the_twin_in_words_says_what_is_seen():
    words = described(drawn(step()))
    assert words.startswith(
        "Memory of cuda:0 over 1.0 s: allocated began at 0 B, peaked at 3.00 MiB at 500 ms and ended at 0 B."
    )
    bounded = described(drawn(step(), bounded=(Bounded(0, 1, 2, 3),)))
    assert "peaked at at least 3.00 MiB and ended" in bounded or "at least 3.00 MiB and ended" in bounded


def test_a_sparkline_shows_the_highest_of_each_stretch():
    curve = Curve("a", np.array([0.0, 0.9, 1.0, 3.0]), np.array([0, 80, 10, 20]), True)
    assert sparkline(curve, 4.0, width=4) == "█▂▂▃"
    assert sparkline(Curve("a", np.array([0.0]), np.array([0]), True), 0.0, width=3) == "▁▁▁"


@pytest.mark.parametrize("top", [1, 17, 1000, 1 << 20, 3 << 30, 5 << 40, 2.2e9])
def test_ticks_are_few_round_and_within(top):
    ticks = byte_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] <= top
    assert 2 <= len(ticks) <= 7
    assert len({short_bytes(tick) for tick in ticks}) == len(ticks)


def trained() -> Script:
    script = Script()
    script.alloc(2 << 20, at=0, requested=(2 << 20) - 300, category=Category.PARAMETER)
    script.free(script.alloc(5 << 20, at=400_000_000, category=Category.ACTIVATION), at=900_000_000)
    script.alloc(1 << 20, at=1_000_000_000, category=Category.GRADIENT)
    return script


def test_the_areas_are_drawn_from_the_highest_down_to_the_floor():
    svg = timeline_svg(drawn(trained()), "")
    fills = [path.get("fill", "") for path in parsed(svg).iter(f"{NAMESPACE}path") if path.get("d", "").endswith("Z")]
    names = {colour: name for name, colour in theme.CATEGORIES.items()}
    assert [names[fill] for fill in fills] == ["activation", "gradient", "parameter"]  # rounding is less than a pixel
    assert [word for word in texts(svg) if word in theme.CATEGORIES] == [
        "rounding", "activation", "gradient", "parameter"
    ]  # fmt: skip


def test_the_twin_in_words_names_the_categories_at_the_peak():
    assert "Held at the peak: activation 5.00 MiB, parameter 2.00 MiB, rounding 300 B. " in described(drawn(trained()))
    assert "Held" not in described(drawn(step()))
    assert "Held" not in described(drawn(trained(), bounded=(Bounded(0, 1, 2, 3),)))


def test_a_curve_of_highest_levels_has_its_other_end():
    script = Script(HOST)
    for i in range(2000):
        script.free(script.alloc(1 << 20, at=20 * i), at=20 * i + 10)
    found = drawn(script)
    assert found.lowest is not None
    svg = timeline_svg(found, "")
    assert f"V{HEIGHT - 30}H" in svg
    assert max(places(path.get("d", ""))[1][0] for path in parsed(svg).iter(f"{NAMESPACE}path")) == HEIGHT - 30
