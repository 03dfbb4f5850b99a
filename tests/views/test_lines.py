"""Line listings in words and in HTML, the classic form, and that nothing in a trace can break out of them."""

from __future__ import annotations

import re

import pytest
from html_text import Words

from memlab.analysis.lines import BACKWARD, LineGroup, LineRow, LineTable
from memlab.views.lines import LEGEND, SECTION_HTML, SECTION_TEXT, listing_html, listing_text, plain_text

MiB = 1 << 20


def table(*rows: LineRow, sources: dict[str, dict[int, str]] | None = None, gaps: tuple[str, ...] = ()) -> LineTable:
    return LineTable("cuda:0", rows, 0, 5 * MiB, 0, sources or {}, gaps)


def cell(line: int, **figures: int) -> LineRow:
    return LineRow(f"cell:{line}", "cell", line, executions=1, **figures)


SOURCE = {"cell": {1: "x = ones(4)", 2: "", 3: "y = x * 2  # <b>&"}}
USUAL = table(
    cell(1, held_bytes=4 * MiB, total_bytes=4 * MiB, peak_bytes=4 * MiB),
    cell(3, held_bytes=MiB, total_bytes=MiB, peak_bytes=2 * MiB),
    sources=SOURCE,
)


def test_the_listing_in_words():
    assert listing_text(USUAL, "first").splitlines() == [
        "Lines of first · cuda:0",
        "",
        "           held      peak   ×  cell",
        "   1  +4.00 MiB  4.00 MiB  ×1  x = ones(4)",
        "   2",
        "   3  +1.00 MiB  2.00 MiB  ×1  y = x * 2  # <b>&",
        "",
        "Over the run: +5.00 MiB.",
        LEGEND,
    ]


def test_columns_come_when_there_is_something_to_say():
    rich = table(
        cell(1, held_bytes=MiB, backward_bytes=-MiB, total_bytes=3 * MiB, peak_bytes=MiB, freed_bytes=2 * MiB),
        LineRow(BACKWARD, "", 0, backward_bytes=5 * MiB),
        gaps=("from 1 s on no line is known",),
        sources=SOURCE,
    )
    text = listing_text(rich)
    assert "held  in backward  with calls      peak     freed   ×  cell" in text
    assert "+1.00 MiB    −1.00 MiB   +3.00 MiB  1.00 MiB  2.00 MiB  ×1  x = ones(4)" in text
    assert "Over the run: +5.00 MiB, backward, of unknown lines: +5.00 MiB." in text
    assert "Lines: from 1 s on no line is known." in text
    assert "\n   0" not in text, "backward is no line of a source"


def test_the_listing_as_html_says_the_same():
    found = Words(listing_html(USUAL, "first"))
    words = ("Lines of first · cuda:0", "+4.00 MiB", "2.00 MiB", "×1", "y = x * 2  # <b>&", "Over the run: +5.00 MiB.")
    for word in words:
        assert word in found
    assert set(found.tags) <= {"details", "summary", "table", "tr", "th", "td", "div"}
    assert "linear-gradient(90deg,rgba(46, 117, 232, 0.35) 50%,transparent 50%)" in listing_html(USUAL)


HOSTILE = "</td><script>alert(1)</script>'\"\x1b[2J\r\n\u202e\x00"


@pytest.mark.parametrize("render", [listing_text, listing_html, lambda table, name: plain_text(table)])
def test_nothing_in_a_trace_can_break_out(render):
    came, went = (LineGroup(1, HOSTILE, HOSTILE, 5),), (LineGroup(1, "", "", 1),)
    row = LineRow(f"{HOSTILE}:1", HOSTILE, 1, 1, 5, peak_bytes=5, came=came, went=went)
    text = render(table(row, sources={HOSTILE: {1: HOSTILE, 2: "\tx"}}, gaps=(HOSTILE,)), HOSTILE)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    if render is listing_html:
        assert "script" not in Words(text).tags and "<script" not in text


def long(lines: int) -> LineTable:
    rows = [cell(n, held_bytes=n, total_bytes=n, peak_bytes=n) for n in range(1, lines, 7)]
    texts = {n: f"value_{n} = compute_something({n}, 'and more of it')" for n in range(1, lines)}
    return table(*rows, sources={"cell": texts})


@pytest.mark.parametrize("lines", [10, 100, 1000, 20_000])
def test_a_long_listing_is_cut_to_its_limit_and_keeps_the_largest(lines):
    found = long(lines)
    largest = max(row.line for row in found)
    for render, limit in ((listing_html, SECTION_HTML), (listing_text, SECTION_TEXT)):
        text = render(found, limit=limit)
        assert len(text) <= limit
        assert f"value_{largest} =" in text
        assert ("more line" in text) == (lines > 100 or (lines == 100 and len(render(found)) > limit))
    assert listing_text(found).count("value_") == lines - 1, "without a limit all of it is there"


def test_four_quiet_lines_in_a_row_are_folded_and_three_are_not():
    found = table(
        cell(1, peak_bytes=5),
        cell(5, freed_bytes=3),
        cell(10, peak_bytes=5),
        sources={"cell": dict.fromkeys(range(1, 11), "x")},
    )
    rows = [line.split() for line in listing_text(found, limit=1).splitlines()[3:-3]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "⋮", "10"]
    assert rows[5][1:] == ["4", "more", "lines"]


def test_the_classic_form():
    rows = (
        LineRow(
            "cell:15", "cell", 15, 1, level_bytes=1142 * MiB,
            came=(LineGroup(7, "(512, 512, 3, 3)", "float32", 7 * 512 * 512 * 9 * 4), LineGroup(1, "", "", 377_487_360)),
        ),
        LineRow("cell:16", "cell", 16, 3, level_bytes=MiB, went=(LineGroup(1, "(120, 3, 512, 512)", "float32", 377_487_360),)),
        LineRow("cell:17", "cell", 17, 1, held_bytes=1),
    )  # fmt: skip
    assert plain_text(table(*rows)).splitlines() == [
        "At cell: line 15   Total: 1142.0 MiB",
        "+ | 7 * Size:(512, 512, 3, 3) | Memory: 66.060 MB | float32",
        "+ | 1 * Size:(?) | Memory: 377.49 MB | ?",
        "At cell: line 16   Total: 1.0 MiB   ×3",
        "- | 1 * Size:(120, 3, 512, 512) | Memory: 377.49 MB | float32",
    ]
    assert plain_text(table()) == "No tensor was allocated or freed in a watched line."
