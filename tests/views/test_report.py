from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from html_text import Words, weight
from scripted_traces import GPU, HOST, Script, busy

from memlab.analysis.breakdown import Breakdown
from memlab.analysis.summary import summary
from memlab.api.run import Run
from memlab.trace import Bounded, Category, Device, Gap, Phase
from memlab.views import theme
from memlab.views.report import report, share_table
from memlab.views.shown import PLOTLY, SVG

PEAKS = {"peaks": {of: [4 << 20, 4 << 20] for of in ("allocated", "reserved", "device used")}}
LIMIT = 40_000  # bytes
EVIL = "<script>alert(1)</script>\x1b[31m\nnext&\"'"


def step(module: str = "net", line: str = "/home/me/train.py:7") -> Script:
    script = Script()
    script.preexisting(1 << 20)
    script.alloc(3 << 20, at=350_000_000, requested=3_000_000, phase=Phase.FORWARD, module=module, line=line)
    script.segment(8 << 20, at=360_000_000)
    return script


def trained() -> Script:
    script = Script()
    script.alloc(5 << 20, at=1, category=Category.ACTIVATION, phase=Phase.FORWARD)
    script.alloc(3 << 20, at=2, requested=(3 << 20) - 100, category=Category.PARAMETER)
    for size in (1, 2, 3):
        script.alloc(size, at=3, category=(Category.INPUT, Category.TEMPORARY, Category.GRADIENT)[size - 1])
    return script


def shown(script: Script, name: str = "first", **made_by: object) -> tuple[str, str]:
    found = report(summary(script.trace(duration=2_000_000_000, **made_by), name))
    return found.text(), found.html()


def test_the_text_stands_alone():
    text, _ = shown(step())
    assert (
        f"{text}\n"
        == """\
Peak 4.00 MiB allocated in forward of net, train.py:7

memlab · first · measured · 2.0 s · hand

cuda:0 (Fake 8, 8.00 GiB)
                 peak    when  at start    at end  not freed
  allocated  4.00 MiB  350 ms  1.00 MiB  4.00 MiB  +3.00 MiB
  reserved   8.00 MiB  360 ms       0 B  8.00 MiB  +8.00 MiB
Peak allocated: 4,194,304 bytes exactly, from every event of the allocator.

  peak by phase   allocated  share
  forward          2.86 MiB   72 %  ████████████
  before the run   1.00 MiB   25 %  ████
  rounding        142.3 KiB    3 %  █

  peak by module  allocated  share
  net              2.86 MiB   72 %  ████████████
  before the run   1.00 MiB   25 %  ████
  rounding        142.3 KiB    3 %  █

Largest tensors at the peak:
                              allocated  share
  tensor in net, train.py:7    2.86 MiB   74 %  ████████████
  tensor from before the run   1.00 MiB   26 %  ████

Lines that hold the peak:
  peak by line    allocated  share
  train.py:7       2.86 MiB   72 %  ████████████
  before the run   1.00 MiB   25 %  ████
  rounding        142.3 KiB    3 %  █

Not seen:
- hand: written by hand
"""
    )


def test_html_says_the_same_as_the_text():
    text, html = shown(step())
    words = Words(html)
    for cell in (cell for line in text.splitlines() for cell in line.split("  ") if cell.strip(" █")):
        assert cell.strip().removeprefix("- ").removesuffix(":") in words


@pytest.mark.parametrize("where", ["name", "module", "line", "device", "gap", "note", "engine"])
def test_whatever_comes_from_outside_is_escaped(where):
    script = step(module=EVIL if where == "module" else "net", line=f"{EVIL}:3" if where == "line" else "t.py:3")
    script.devices = (Device(0, EVIL if where == "device" else "card"),)
    gaps = (Gap(EVIL, EVIL),) if where == "gap" else ()
    notes = {"notes": [EVIL]} if where == "note" else {}
    trace = script.trace(gaps=gaps, notes=notes)
    if where == "engine":
        trace = dataclasses.replace(trace, made_by=dataclasses.replace(trace.made_by, engine=EVIL))
    found = report(summary(trace, EVIL if where == "name" else "x"))
    text, html = found.text(), found.html()
    assert "script" not in Words(html).tags
    assert "script>" in text  # it is there, as text
    assert "\x1b" not in text + html
    assert not any(line.startswith("next&") for line in text.splitlines())


def test_a_name_of_ten_thousand_characters_does_not_run_away_and_a_busy_report_stays_small():
    text, html = shown(step(module="m" * 10_000), name="n" * 10_000)
    assert len(text) < 4000 and len(html) < 8000
    busy_one = report(summary(busy(3000), "busy"))
    assert len(busy_one.text()) < 3000 and len(busy_one.html()) < 9000


def test_a_bounded_peak_is_never_called_exact():
    text, _ = shown(step(), bounded=(Bounded(0, 1, 4, 5),))
    assert text.splitlines()[0].startswith("Peak 4.00 MiB to 8.00 GiB allocated")
    assert "exact" not in text
    assert "between 4,194,304 and 8,589,934,592 bytes" in text


@pytest.mark.parametrize(
    ("device", "notes", "first", "second"),
    [
        (GPU, {}, "Peak 4.00 MiB", "measured"),
        (Device(0, "FakeGPU-1"), {}, "Peak 4.00 MiB", "simulated GPU: bytes are real, values and times are not"),
        (
            Device(0, "RTX 4060 (simulated)"),
            {},
            "Peak 4.00 MiB",
            "simulated GPU: bytes are real, values and times are not",
        ),
        (GPU, {"prediction": PEAKS}, "Predicted peak 4.00 MiB", "predicted"),
    ],
)
def test_where_the_figures_come_from(device, notes, first, second):
    script = step()
    script.devices = (device,)
    lines = shown(script, notes=notes)[0].splitlines()
    assert lines[0].startswith(first)
    assert f" · {second} · " in lines[2]


def test_the_categories_at_the_peak_are_a_table_of_those_that_matter_in_their_colours():
    text, html = shown(trained())
    assert (
        """
  peak by category  allocated  share
  activation         5.00 MiB   62 %  ████████████
  parameter          3.00 MiB   37 %  ███████
  4 more                106 B   <1 %"""
        in text
    )
    assert "by phase" not in text  # categories tell more
    assert f"<span style='color:{theme.CATEGORIES['activation']}'>■</span> activation" in html
    assert html.count("■") == 4  # also before its largest tensors


def test_shares_that_are_all_tiny_are_shown_all_the_same():
    table = share_table(Breakdown("phase", "allocated", {"x" * (i + 1): 10 for i in range(1000)}))
    assert len(table.rows) == 6
    assert table.rows[-1][0] == "995 more"
    assert table.rows[-1][-1] == 0.995


def module_rows(share: dict[str, int]) -> list[tuple[object, ...]]:
    return [row[:3] for row in share_table(Breakdown("module", "allocated", share)).rows]


def test_a_thousand_equal_layers_are_one_row():
    assert module_rows({f"net.{i}": 260 << 10 for i in range(1000)}) == [
        ("net.0…999", "1,000 × 260.0 KiB", 1000 * (260 << 10))
    ]
    of_block = {"attention": 30, "feed.0": 40, "feed.2": 20}
    layers = {f"m.blocks.{i}.{name}": count for i in range(12) for name, count in of_block.items()}
    assert module_rows({**layers, "m.token": 500, "elsewhere": 100}) == [
        ("m.token", "", 500),
        ("m.blocks.0…11.feed.0", "12 × 40 B", 480),
        ("m.blocks.0…11.attention", "12 × 30 B", 360),
        ("m.blocks.0…11.feed.2", "12 × 20 B", 240),
        ("outside any module", "", 100),
    ]  # fmt: skip


def test_layers_that_differ_are_not_folded():
    assert [row[0] for row in module_rows({"net.0": 10, "net.1": 10, "net.2": 9})] == ["net.0", "net.1", "net.2"]
    assert [row[0] for row in module_rows({f"net.{i}": 10 + (i == 3) for i in range(5)})] == ["net.0…4", "net.3"]


def test_each_of_the_largest_tensors_has_a_name_or_what_made_it_and_none_is_a_sum_of_different_ones():
    script = Script()
    cell = "/tmp/ipykernel_312/998.py:12"
    script.alloc(500, at=1, line=cell, op="aten.mul.Tensor")
    script.alloc(400, at=2, line=cell, op="aten.mul.Tensor")
    script.alloc(300, at=3, category=Category.TEMPORARY, phase=Phase.BACKWARD)
    for i in (9, 10, 0, 11):
        script.alloc(50, at=4, category=Category.ACTIVATION, module=f"net.{i}", line=cell)
    for i in range(3):
        script.alloc(40, at=5, category=Category.PARAMETER, name=f"net.{i}.weight")
    found = Run("x", script.trace(notes={"cells": {cell[:-3]: 7}, "code": {cell: "kept = x * 2"}}))
    _, _, below = found.report().text.partition("Largest tensors at the peak:\n")
    table = [re.split(r"   +|  (?=\d+ × )", line.strip())[:2] for line in below.splitlines()[1:6]]
    names, counts = zip(*((name, rest[0]) for name, *rest in table), strict=True)
    made = "made by mul, cell [7] line 12  kept = x * 2"
    activation = "activation in net.0…11, cell [7] line 12  kept = x * 2"
    assert names == (f"tensor {made}", f"tensor {made}", "temporary in backward", activation, "net.0…2.weight")
    assert counts == ("500 B", "400 B", "300 B", "4 × 50 B", "3 × 40 B")


def test_out_of_memory_and_retries_are_reported():
    script = step()
    script.devices = (Device(0, "card", num_ooms=2, num_alloc_retries=1),)
    text, _ = shown(script)
    assert "The allocator ran out of memory 2 times." in text and "released its cache and retried once." in text


def test_a_device_on_which_nothing_happened_is_left_out_and_two_have_a_headline_each():
    script = Script(GPU, Device(1, "idle"))
    script.alloc(512, at=1)
    assert "idle" not in shown(script)[0]
    script.alloc(1 << 20, at=2, device=1)
    lines = shown(script)[0].splitlines()
    assert [line for line in lines if line.startswith("Peak ") and line.endswith("allocated")] == [
        "Peak 1.00 MiB allocated", "Peak 512 B allocated"
    ]  # fmt: skip


def test_an_empty_run_one_without_devices_and_one_that_only_frees_still_report():
    assert "Peak allocated: 0 bytes exactly" in shown(Script(HOST))[0]
    nobody = Script()
    nobody.devices = ()
    assert all("No measured device was used." in form for form in shown(nobody))
    script = Script()
    script.free(script.preexisting(4096), at=5)
    assert "−4.00 KiB" in shown(script)[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/tmp/ipykernel_312/998.py:12", "cell line 12"),
        ("cell [3]:4", "cell [3] line 4"),
        ("C:\\me\\train.py:3", "train.py:3"),
    ],
)
def test_the_line_of_a_cell_is_called_that(line, words):
    assert shown(step(line=line))[0].splitlines()[0] == f"Peak 4.00 MiB allocated in forward of net, {words}"


# --- what a report leaves in a notebook ---


@pytest.mark.parametrize(("events", "layers"), [(40_000, 0), (3_000, 0), (40_000, 9), (3_000, 9), (150, 9)])
def test_all_that_a_busy_cell_leaves_in_the_notebook_is_small(events, layers):
    trace = busy(events)
    if layers:  # areas of every category
        category = np.random.default_rng(0).integers(0, 8, len(trace.blocks))
        trace = dataclasses.replace(trace, blocks=trace.blocks.replace(category=category))
    shown = Run("n" * 200, trace).report()
    figure, table = shown.figure_bundle(), shown.table_bundle()
    assert set(figure) == {PLOTLY, SVG, "text/plain"}
    assert set(table) == {"text/html", "text/plain"}
    assert len([one for one in figure[PLOTLY]["data"] if "stackgroup" in one]) == layers
    assert weight(figure) + weight(table) <= LIMIT


def test_the_report_of_a_run_prints_and_shows_itself_in_what_a_notebook_file_can_hold():
    run = Run("x", busy(500))
    bundle = run.report().bundle()
    assert json.loads(json.dumps(bundle)) == bundle
    tree.fromstring(bundle[SVG])
    assert bundle[PLOTLY]["data"]
    assert str(run) == str(run.report()) == repr(run.report()) == run.report().text
    assert set(run._repr_mimebundle_()) == {PLOTLY, SVG, "text/html", "text/plain"}
    assert run.report().figure.data
    assert run.report().to_pandas().shape[0] == 4


@pytest.mark.parametrize("name", ["<script>", "\x1b[2J", "a\nb", "x" * 10_000])
def test_a_name_is_text_everywhere(name):
    script = Script(HOST)
    script.alloc(10, at=1)
    bundle = Run(name, script.trace()).report().bundle()
    assert "<script>" not in bundle["text/html"] + bundle[SVG] + bundle[PLOTLY]["layout"]["title"]["text"]
    assert not any("\x1b" in json.loads(json.dumps(content)) for content in bundle.values() if isinstance(content, str))


def test_a_run_without_a_device_says_so_instead_of_drawing():
    script = Script()
    script.devices = ()
    shown = Run("none", script.trace()).report()
    assert shown.figure_bundle() == {"text/plain": "Nothing to draw: no device was used."}
    assert "No measured device" in shown.text and "no device was used" in shown.title


def test_a_name_that_is_used_in_two_modules_is_no_trouble():
    script = Script()
    for number, module in enumerate(("net", "net.fc", "")):
        script.alloc(512, at=number, name=f"weight.{number}", module=module)
    assert "weight.0…2  3 × 512 B" in shown(script)[0]
