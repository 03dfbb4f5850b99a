from __future__ import annotations

import io
import re
import sys
import xml.etree.ElementTree as tree

import pytest

from memlab.units import UNBOUNDED, ByteRange
from memlab.views.page import Beside, Folded, Page, PageLines, code_block
from memlab.views.shown import Shown, ShownWithFigure
from memlab.views.table import Column, Table

TAGS = "div b table caption thead tbody tr th td span details summary ul li pre code"
HOSTILE = ["<script>alert(1)</script>", "\x1b[2J\n", "a' onload='x", "x" * 10_000, "&amp;"]

HELD = Table(
    "at the peak",
    (Column("category"), Column("allocated", "bytes"), Column("share", "share"), Column("empty", "change")),
    (("activation", 3 << 20, 0.75, None), ("other", ByteRange(1 << 20, UNBOUNDED), 0.004, None)),
    notes=("Nothing else.",),
    bar=2,
    colours=("#123456", ""),
)


def test_a_table_as_text_has_units_bars_and_no_empty_column():
    assert HELD.text().splitlines() == [
        "at the peak",
        "  category     allocated  share",
        "  activation    3.00 MiB   75 %  ████████████",
        "  other       ≥ 1.00 MiB   <1 %",
        "Nothing else.",
    ]


def test_html_says_the_same_and_marks_rows_with_their_colour():
    html = tree.fromstring(f"<div>{HELD.html()}</div>")
    words = "".join(html.itertext())
    assert all(
        word in words for word in ("at the peak", "activation", "3.00 MiB", "75 %", "≥ 1.00 MiB", "Nothing else.")
    )
    assert "empty" not in words
    assert HELD.html().count("#123456") == 2  # the mark and the bar


def test_numbers_below_zero_have_one_sign():
    columns = (Column("bytes", "bytes"), Column("change", "change"), Column("share", "share"), Column("range", "bytes"))
    row = Table("", columns, ((-20 << 20, -20 << 20, -0.06, ByteRange(-20 << 20, -20 << 20)),)).text().splitlines()[1]
    assert row.split("  ")[1:] == ["−20.00 MiB", "−20.00 MiB", " −6 %", "−20.00 MiB"]


def test_an_early_column_is_the_second_in_html_and_wraps_and_stays_last_in_text():
    columns = (Column("size", "bytes"), Column("device"), Column("path", limit=400, wraps=True, is_early=True))
    table = Table("", columns, ((1 << 20, "cpu", "a." * 190 + "weight"),))
    html = tree.fromstring(table.html())
    assert [head.text for head in html.iter("th")][:3] == ["size", "path", "device"]
    (path,) = (cell for cell in html.iter("td") if cell.text.endswith("weight"))
    assert "nowrap" not in path.get("style", "") and "overflow-wrap:anywhere" in path.get("style", "")
    assert table.text().splitlines()[0].split() == ["size", "device", "path"]


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("bytes", 0, "0 B"),
        ("bytes", None, ""),
        ("bytes", "no figures", "no figures"),
        ("change", -2048, "−2.00 KiB"),
        ("change", ByteRange(-2048, 1024), "−2.00 KiB to +1.00 KiB"),
        ("change", ByteRange(-2048, UNBOUNDED), "≥ −2.00 KiB"),
        ("change", ByteRange(-UNBOUNDED, 1024), "≤ +1.00 KiB"),
        ("change", ByteRange(-UNBOUNDED, UNBOUNDED), "unknown"),
        ("seconds", 0.25, "250 ms"),
        ("times", 1.234, "1.23×"),
        ("count", 12345, "12,345"),
    ],
)
def test_values_are_written_in_the_unit_of_their_column(unit, value, text):
    assert Column("x", unit).text(value) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_cannot_steer_a_terminal_or_become_markup(text):
    table = Table(text, (Column(text), Column("n", "bytes")), ((text, 1),), (text,), colours=("#123456",), bar=1)
    page = Page(
        text,
        (
            text,
            table,
            PageLines((text,), text),
            Beside((table,)),
            Folded(text, PageLines((text,))),
            Folded("c", code_block("x")),
        ),
    )
    assert len(page.text().splitlines()) == 23
    assert not any(c in page.text() for c in "\x1b\r")
    assert len(page.html()) < 40_000
    names = {element.tag for element in tree.fromstring(page.html()).iter()}
    assert names <= {*TAGS.split()}
    assert "onload" not in {name for element in tree.fromstring(page.html()).iter() for name in element.attrib}


def test_tables_side_by_side_keep_their_own_height():
    assert "align-items:flex-start" in Beside((HELD, HELD)).html()


def test_sentences_that_follow_each_other_are_one_part_and_empty_parts_are_left_out():
    page = Page("Title", ("One.", "Two.", PageLines(()), Folded("More", PageLines(("a", "b")))))
    assert page.text() == "Title\n\nOne.\nTwo.\n\nMore:\n- a\n- b"


def test_a_sentence_after_a_warning_is_not_coloured_and_the_warning_stays_so():
    html = Page("Title", (PageLines(("Careful.",), colour="#bd600f"), "Go on.")).html()
    assert "<div style='color:#bd600f'>Careful.</div>" in html
    assert "<div>Go on.</div>" in html


class Report(ShownWithFigure):
    page = Page("Title", (HELD,))

    def figure_bundle(self):
        return {"image/svg+xml": "<svg/>", "text/plain": "a picture"}


def test_what_is_shown_prints_its_text_and_offers_html():
    class Small(Shown):
        page = Page("Title", (HELD,))

    assert str(Small()) == repr(Small()) == Small().text
    assert Small()._repr_mimebundle_() == {"text/html": Small().html, "text/plain": Small().text}


def test_a_figure_stands_above_its_words(capsys):
    assert set(Report().bundle()) == {"image/svg+xml", "text/html", "text/plain"}
    assert Report().bundle()["text/plain"] == Report().text
    Report()._ipython_display_()  # no notebook here
    assert capsys.readouterr().out == Report().text + "\n"


def test_a_terminal_of_few_characters_gets_what_it_can_show(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    Report()._ipython_display_()
    sys.stdout.flush()
    assert b"activation    3.00 MiB   75 %  ???" in written.getvalue()


def test_what_gives_words_alone_has_html():
    class Words(Shown):
        text = "a < b\nsecond"

    assert "a &lt; b" in Words().html
    assert str(Words()) == "a < b\nsecond"


def test_what_stands_in_backticks_is_code_in_html_and_stays_in_text():
    page = Page("`a < b`", ("call `x.item()`, not `y`", Table("", (Column("what"),), (("`z`",),), ("a ` alone",))))
    for code in (
        "<code>a &lt; b</code>",
        "call <code>x.item()</code>, not <code>y</code>",
        "<code>z</code>",
        "a ` alone",
    ):
        assert code in page.html()
    assert "call `x.item()`, not `y`" in page.text()


def test_only_columns_of_long_text_wrap():
    table = Table("", (Column("name"), Column("size", "bytes"), Column("why", wraps=True)), (("a", 768 << 20, "so"),))
    cells = re.findall(r"<t[hd] style='([^']*)'>(?:a|768.0 MiB|so)<", table.html())
    assert ["nowrap" in style for style in cells] == [True, True, False]


def test_code_has_the_font_of_code_wherever_it_is_shown():
    (style,) = re.findall("<pre style='([^']*)'>", code_block("x = 1").html())
    assert "monospace" in style, "the HTML of nbconvert gives <pre> the font of the text"


def test_text_that_wraps_keeps_a_width_but_none_that_it_does_not_need():
    for text, width in (("one more forward of all of them", "20ch"), ("none", "5ch")):
        table = Table("", (Column("name"), Column("price", wraps=True, least=20)), (("a", text),))
        (head,) = re.findall("<th style='([^']*)'>price", table.html())
        assert head.endswith(f";min-width:{width}")


def test_what_wraps_in_html_is_cut_in_text_alone():
    table = Table(
        "", (Column("name"), Column("price", limit=20, wraps=True)), (("a", "one more forward of all of them"),)
    )
    assert table.text().splitlines()[1] == "  a     one more forward of…"
    assert "one more forward of all of them" in table.html()
