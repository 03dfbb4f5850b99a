from __future__ import annotations

import base64
import dataclasses
import json
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from html_text import weight
from scripted_traces import GPU, HOST, Script, busy

from memlab.api.compare import compare
from memlab.api.run import Run
from memlab.trace import Bounded, Category, Device
from memlab.trace.trace import Trace
from memlab.units import MiB, format_bytes
from memlab.views import theme
from memlab.views.comparison import SIDES, described, times
from memlab.views.shown import PLOTLY, SVG

LIMIT = 35_000
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b[2J\n",
    "a' onload='x",
    "x" * 10_000,
    "&amp;",
]


def categorised(trace: Trace, seed: int = 0) -> Trace:
    category = np.random.default_rng(seed).integers(0, 8, len(trace.blocks))
    return dataclasses.replace(trace, blocks=trace.blocks.replace(category=category))


def run(name: str, *sizes: int, seconds: float = 1.0, device: Device = HOST, **known: object) -> Run:
    script = Script(device)
    script.preexisting(10)
    for i, size in enumerate(sizes):
        script.alloc(size, at=int(seconds * 5e8) + i, **({"category": Category.ACTIVATION} | known))
    return Run(name, script.trace(duration=int(seconds * 1e9)))


def figure_of(a: Run, b: Run) -> dict:
    return json.loads(compare(a, b).figure.to_json())


@pytest.mark.parametrize("events", [40_000, 3_000, 150])
def test_all_that_a_comparison_leaves_in_the_notebook_is_small(events):
    found = compare(Run("n" * 200, categorised(busy(events))), Run("m" * 200, categorised(busy(events + 99, 1), 1)))
    assert weight(found.figure_bundle()) + weight(found.table_bundle()) <= LIMIT
    assert weight(found.bundle()) <= LIMIT


def test_the_bundle_is_what_a_notebook_file_can_hold():
    bundle = compare(Run("a", busy(500)), Run("b", busy(700))).bundle()
    assert set(bundle) == {PLOTLY, SVG, "text/html", "text/plain"}
    tree.fromstring(bundle[SVG])
    assert len(json.dumps(bundle[PLOTLY]["layout"].get("template", {}))) < 100


def test_both_runs_are_stairs_on_one_axis_of_seconds_and_bars_on_the_same_scale():
    figure = figure_of(run("one", 8 * MiB), run("two", 4 * MiB, seconds=2.0))
    first, second, *bars = figure["data"]
    assert [first["line"]["color"], second["line"]["color"]] == list(SIDES)
    assert (first.get("xaxis", "x"), second["xaxis"]) == ("x", "x3")
    layout = figure["layout"]
    assert layout["xaxis"]["range"] == layout["xaxis3"]["range"] == [0, 2.0]
    assert layout["xaxis3"]["overlaying"] == "x"
    assert {bar["name"] for bar in bars} == {"other", "activation"}
    assert all("yaxis" not in trace for trace in figure["data"])
    assert all(bar["marker"]["color"] == theme.CATEGORIES[bar["name"]] for bar in bars)
    notes = {note["text"] for note in layout["annotations"]}
    assert notes == {"seconds since the start of each", "8.00<br>MiB", "4.00<br>MiB"}


def test_the_switch_changes_both_axes_and_the_words_below():
    figure = figure_of(run("one", 8), run("two", 4, seconds=2.0))
    (menu,) = figure["layout"]["updatemenus"]
    seconds, share = (button["args"][0] for button in menu["buttons"])
    assert menu["active"] == 0 and not menu["showactive"]  # plotly would paint it white
    assert set(seconds) == set(share)
    assert (share["xaxis.range"], share["xaxis3.range"]) == ([0, 1.0], [0, 2.0])
    assert share["annotations[0].text"] == "share of each run"
    assert share["xaxis.tickvals"] == [0, 0.25, 0.5, 0.75, 1]
    title, margin = figure["layout"]["annotations"][0], figure["layout"]["margin"]["b"]
    assert title["text"] == seconds["annotations[0].text"]
    # In a narrow notebook the buttons would cover the title if they stood next to it.
    height = figure["layout"]["height"] - margin - figure["layout"]["margin"]["t"]
    assert menu["pad"]["t"] - menu["y"] * height >= 12 - title["y"] * height
    assert menu["pad"]["t"] - menu["y"] * height + 30 <= margin


def test_where_one_took_far_longer_it_opens_with_shares_and_says_why():
    figure = figure_of(run("one", 8), run("two", 4, seconds=50.0))
    assert figure["layout"]["updatemenus"][0]["active"] == 1
    assert figure["layout"]["annotations"][0]["text"] == "share of each run (one took 50 times as long)"
    assert figure["layout"]["xaxis"]["ticktext"] == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    svg = compare(run("one", 8), run("two", 4, seconds=50.0)).figure_bundle()[SVG]
    assert "one took 50 times as long" in svg and "75 %" in svg


def test_an_interval_is_drawn_from_end_to_end():
    peaks = {of: [4 * MiB, 6 * MiB] for of in ("allocated", "reserved", "device used")}
    predicted = run("p", 4 * MiB - 512, device=Device(0, "a card"))
    predicted.note("prediction", {"peaks": peaks})
    found = compare(run("m", 8 * MiB), predicted)
    figure = json.loads(found.figure.to_json())
    ends = figure["data"][-1]
    values = np.frombuffer(base64.b64decode(ends["y"]["bdata"]), ends["y"]["dtype"])
    assert (ends["line"]["dash"], values.tolist()) == ("solid", [4] * 3 + [6] * 3)
    assert any(note["text"] == "4.00<br>to 6.00<br>MiB" for note in figure["layout"]["annotations"])
    assert ">to 6.00<" in found.figure_bundle()[SVG]
    assert figure["layout"]["annotations"][0]["text"] == "allocations and frees, in order"
    assert figure["layout"]["xaxis"]["range"] == figure["layout"]["xaxis3"]["range"]
    assert [button["label"] for button in figure["layout"]["updatemenus"][0]["buttons"]] == ["events", "share"]


def test_a_peak_without_an_upper_end_has_no_interval_and_a_saving_that_may_be_none_is_no_zero():
    script = Script(HOST)
    script.alloc(4 * MiB, at=1)
    lost = compare(run("m", 8 * MiB), Run("lost", script.trace(bounded=(Bounded(-1, 0, 1, 2),))))
    assert "between these" not in lost.figure.to_json() and "by an unknown amount" in lost.text
    predicted = run("p", 4 * MiB - 512, device=Device(0, "a card"))
    predicted.note("prediction", {"peaks": {of: [4 * MiB, 8 * MiB] for of in ("allocated", "reserved", "device used")}})
    found = compare(run("m", 8 * MiB - 10), predicted)
    assert "(0 B, +0 % to −4.00 MiB, −50 %)" in found.sentence and "to −4.00 MiB, −50 %\n" in found.text


def test_a_capacity_that_was_not_enough_is_drawn_and_says_which_run_ends_there():
    full = dataclasses.replace(GPU, capacity_bytes=24 * MiB, num_ooms=1)
    larger = dataclasses.replace(full, capacity_bytes=96 * MiB)
    predicted = run("needs more", 16 * MiB, device=full)
    peaks = {"allocated": [32 * MiB] * 2, "reserved": [32 * MiB] * 2, "device used": [32 * MiB] * 2}
    predicted.note("prediction", {"peaks": peaks})
    for other, said in (
        (run("fits", 8 * MiB, device=dataclasses.replace(full, num_ooms=0)), {24 * MiB: "a ends out of memory"}),
        (run("both", 20 * MiB, device=full), {24 * MiB: "a ends out of memory, b ran out of memory"}),
        (run("freed", 8 * MiB, device=larger), {24 * MiB: "a ends out of memory", 96 * MiB: "b ran out of memory"}),
    ):
        found = compare(predicted, other)
        layout = json.loads(found.figure.to_json())["layout"]
        texts = [f"capacity {format_bytes(limit)}: {text}" for limit, text in said.items()]
        assert [one["text"] for one in layout["annotations"] if one["text"].startswith("capacity")] == texts
        assert layout["yaxis"]["range"][1] > max(said) / MiB
        assert all(text in found.figure_bundle()["text/plain"] for text in texts)
    assert "capacity" not in str(figure_of(run("one", MiB, device=GPU), run("two", MiB, device=GPU))["layout"])


@pytest.mark.parametrize("name", HOSTILE)
def test_names_modules_and_lines_are_text_everywhere(name):
    a = run(name, 5, module=name, line=name)
    b = run("b" + name, 9, module="m" + name, line="l" + name)
    for one in (a, b):
        one.note("lines", {name: {"1": name}})
    found = compare(a, b)
    bundle = {**found.figure_bundle(), **found.table_bundle()}
    shown = bundle["text/html"] + bundle[SVG] + json.dumps(bundle[PLOTLY]) + json.dumps(found.bundle()[PLOTLY])
    assert "<script" not in shown and "<img" not in shown and "onload='x" not in bundle["text/html"]
    assert not any(c in found.text for c in "\x1b\r")
    assert len(found.sentence) < 600
    tree.fromstring(bundle[SVG])
    assert weight(bundle) < LIMIT


def test_text_and_html_tell_the_same():
    found = compare(run("a", 5, module="x.y"), run("b", 9, module="x.y"))
    for word in ("peak allocated", "activation", "x.y", "+4 B", "not checked"):
        assert word in found.text and word in found.html
    assert found.html.count("<table") == found.html.count("</table>") == 3


def test_of_many_modules_the_largest_differences_are_shown_and_the_rest_is_summed():
    script = {name: Script(HOST) for name in "ab"}
    for i in range(40):
        script["a"].alloc(100, module=f"m{i}")
        script["b"].alloc(100 + i, module=f"m{i}")
    a, b = (Run(name, one.trace(duration=10)) for name, one in script.items())
    lines = compare(a, b).text.splitlines()
    at = next(i for i, line in enumerate(lines) if "by module" in line)
    rows = [line.split() for line in lines[at + 1 : at + 10]]
    assert [row[0] for row in rows[:2]] == ["m39", "m38"]
    assert rows[7][:2] == ["33", "more"]
    assert rows[8][:2] == ["peak", "allocated"]


def test_layers_that_differ_alike_are_one_row():
    script = {name: Script(HOST) for name in "ab"}
    for i in range(12):
        script["a"].alloc(4 * MiB, module=f"net.{i}.fc")
        script["b"].alloc(1 * MiB, module=f"net.{i}.fc")
    for one in script.values():
        one.alloc(3 * MiB, module="net.head")
    a, b = (Run(name, one.trace(duration=10)) for name, one in script.items())
    found = compare(a, b)
    (row,) = (line for line in found.text.splitlines() if "layers" in line)
    assert row.split("  ")[1:] == ["net.0…11.fc (12 layers)", "48.00 MiB", "12.00 MiB", "−36.00 MiB"]
    assert len(found.by("module")) == 13  # every layer has its own figures


def test_lines_stand_with_their_code_where_both_runs_have_them():
    a, b = run("a", 5, line="cell:2"), run("b", 9, line="cell:3")
    assert "by line" in compare(a, b).text
    a.note("lines", {"cell": {"2": "h = block(x)"}})
    b.note("lines", {"cell": {"2": "# new", "3": "    h = block(x)"}})
    assert "cell:2 → 3  h = block(x)" in compare(a, b).text
    assert "by line" not in compare(a, run("b", 9)).text


def test_the_twin_in_words_has_both_curves():
    found = compare(run("one", 8), run("two", 4))
    words = described(found.picture, found.sentence)
    assert words.startswith("two: peak 14 B instead of 18 B")
    assert "█" in words.splitlines()[1]
    assert words.splitlines()[2].startswith("b ")


def test_a_device_on_which_nothing_happened_is_drawn():
    empty = Run("empty", Script(GPU).trace())
    bundle = compare(empty, empty).bundle()
    tree.fromstring(bundle[SVG])
    assert compare(empty, run("b", 5)).figure.data


@pytest.mark.parametrize(("ratio", "text"), [(1, "1.00 times"), (9.999, "10.0 times"), (0.002, "0.002 times")])
def test_ratios(ratio, text):
    assert times(ratio) == text
