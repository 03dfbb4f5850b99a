from __future__ import annotations

import dataclasses

import pytest
from handmade import GPU, HOST, Script, busy
from html_words import Words

from memlab.analysis.breakdown import Breakdown
from memlab.analysis.peak import UNKNOWN_BYTES, Peak
from memlab.analysis.summary import summary
from memlab.trace import Bounded, Category, Device, Gap, Phase
from memlab.views import theme
from memlab.views.table import peak_text, report

EVIL = "<script>alert(1)</script>\x1b[31m\nnext&\"'"


def step(module: str = "net", line: str = "/home/me/train.py:7") -> Script:
    script = Script()
    script.adopt(1 << 20)
    script.alloc(3 << 20, at=350_000_000, requested=3_000_000, phase=Phase.FORWARD, module=module, line=line)
    script.segment(8 << 20, at=360_000_000)
    return script


def shown(script: Script, name: str = "first", **made_by: object) -> tuple[str, str]:
    found = report(summary(script.trace(duration=2_000_000_000, **made_by), name))
    return found.text(), found.html()


def test_the_text_stands_alone():
    text, _ = shown(step())
    assert (
        text
        == """\
memlab · first · 2.0 s · hand

cuda:0 (Pretend 8, 8.00 GiB)
                 peak    when  at start    at end  left behind
  allocated  4.00 MiB  350 ms  1.00 MiB  4.00 MiB    +3.00 MiB
  reserved   8.00 MiB  360 ms       0 B  8.00 MiB    +8.00 MiB
  Peak allocated 4,194,304 bytes, exact; known from every event of the allocator.
  It was reached in phase forward, in net, at train.py:7.
  At the peak, by phase: forward 2.86 MiB (72 %), before the cell 1.00 MiB (25 %), rounding 142.3 KiB (3 %).
  At the peak, by module: net 2.86 MiB (72 %), before the cell 1.00 MiB (25 %), rounding 142.3 KiB (3 %).

Not seen:
- hand: written by hand"""
    )


def test_html_says_the_same_as_the_text():
    text, html = shown(step())
    words = "".join(Words(html).words)
    for cell in (cell for line in text.splitlines() for cell in line.split("  ") if cell):
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


def test_a_name_of_ten_thousand_characters_does_not_run_away():
    text, html = shown(step(module="m" * 10_000), name="n" * 10_000)
    assert len(text) < 4000
    assert len(html) < 8000


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1 << 20, 1 << 20, "1.00 MiB"),
        (1 << 20, 1 << 21, "1.00 MiB to 2.00 MiB"),
        (1 << 20, UNKNOWN_BYTES, "≥ 1.00 MiB"),
        (1 << 30, (1 << 30) + 5, "≥ 1.00 GiB"),
    ],
)
def test_a_peak_shows_how_well_it_is_known(low, high, expected):
    assert peak_text(Peak(low, high, 0, 0, "")) == expected


def test_a_bounded_peak_is_never_called_exact():
    text, _ = shown(step(), bounded=(Bounded(0, 1, 4, 5),))
    assert "exact" not in text
    assert "between 4,194,304 and 8,589,934,592 bytes" in text


def trained() -> Script:
    script = Script()
    script.alloc(5 << 20, at=1, category=Category.ACTIVATION, phase=Phase.FORWARD)
    script.alloc(3 << 20, at=2, requested=(3 << 20) - 100, category=Category.PARAMETER)
    for size in (1, 2, 3):
        script.alloc(size, at=3, category=(Category.INPUT, Category.TEMPORARY, Category.GRADIENT)[size - 1])
    return script


def test_the_categories_at_the_peak_are_a_table_of_those_that_matter():
    text, _ = shown(trained())
    assert (
        """
  at the peak  allocated  share
  activation    5.00 MiB   62 %
  parameter     3.00 MiB   37 %
  4 more           106 B    0 %"""
        in text
    )
    assert "by phase" not in text  # categories tell more


def test_each_category_has_the_colour_of_its_area():
    _, html = shown(trained())
    assert f"<span style='color:{theme.CATEGORIES['activation']}'>■</span> activation" in html
    assert html.count("■") == 2


def test_shares_that_are_all_tiny_are_shown_all_the_same():
    share = Breakdown("tensor", "allocated", {f"t[{i}]": 10 for i in range(1000)})
    found = summary(trained().trace(), "x")
    one = dataclasses.replace(found.devices[0], shares=(share,))
    (table,) = report(dataclasses.replace(found, devices=(one,))).devices[0].tables
    assert table.rows[0] == ("largest tensors", "allocated", "share")
    assert [row[0] for row in table.rows[1:]] == ["t[0]", "t[1]", "t[2]", "t[3]", "t[4]", "995 more"]
    assert table.rows[-1][1:] == ("9.72 KiB", "100 %")


def test_out_of_memory_and_retries_are_told():
    script = step()
    script.devices = (Device(0, "card", num_ooms=2, num_alloc_retries=3),)
    text, _ = shown(script)
    assert "Out of memory was raised 2 time(s)" in text
    assert "try again 3 time(s)" in text


def test_a_device_on_which_nothing_happened_is_left_out():
    script = Script(GPU, Device(1, "idle"))
    script.alloc(512, at=1)
    assert "idle" not in shown(script)[0]


def test_an_empty_run_and_one_without_devices_still_report():
    assert "Peak allocated 0 bytes, exact" in shown(Script(HOST))[0]
    nobody = Script()
    nobody.devices = ()
    text, html = shown(nobody)
    assert "No device of those that were measured was used." in text
    assert "No device" in html


def test_what_was_given_back_has_a_minus():
    script = Script()
    script.free(script.adopt(4096), at=5)
    assert "−4.00 KiB" in shown(script)[0]


def test_the_line_of_a_cell_is_called_that():
    assert "at line 12 of a cell" in shown(step(line="/tmp/ipykernel_312/998.py:12"))[0]
    assert "at train.py:3" in shown(step(line="C:\\me\\train.py:3"))[0]


def test_a_busy_report_stays_small():
    trace = busy(3000)
    found = report(summary(trace, "busy"))
    assert len(found.text()) < 3000
    assert len(found.html()) < 6000
