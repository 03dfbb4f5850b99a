from __future__ import annotations

import json

import pytest
from html_text import Words
from scripted_traces import Script

from memlab.analysis.modules import ModuleTree, modules
from memlab.trace import Bounded, MarkKind
from memlab.trace.spans import BACKWARD
from memlab.units import format_bytes
from memlab.views.modules import figure, html, rows, text

EVIL = "<script>alert(1)</script>\x1b[31m\nnext&\"'"
MiB = 1 << 20


def called(script: Script, path: str, size: int) -> int:
    """A call of a module that leaves one block."""
    script.mark(MarkKind.MODULE_BEGIN, path, script.now + 5)
    block = script.alloc(size, module=path)
    script.mark(MarkKind.MODULE_END, path, script.now + 5)
    return block


def two_layers(a: str = "net.a", b: str = "net.b", **made_by: object) -> ModuleTree:
    script = Script()
    script.preexisting(MiB)
    script.mark(MarkKind.MODULE_BEGIN, "net", 5)
    called(script, a, 6 * MiB)
    called(script, b, 2 * MiB)
    script.mark(MarkKind.MODULE_END, "net", script.now + 5)
    script.mark(MarkKind.PHASE_BEGIN, BACKWARD, script.now + 5)
    return modules(script.trace(**made_by), 0)


def many(siblings: int, below: int = 0) -> ModuleTree:
    script = Script()
    for i in range(siblings):
        for path in [f"net.{i}", *(f"net.{i}.{j}" for j in range(below))]:
            called(script, path, (i + 1) * 1000)
    return modules(script.trace(), 0)


def test_the_text_stands_alone():
    shown = text(two_layers())
    assert (
        f"{shown}\n"
        == """\
Modules on cuda:0, peak allocated 9.00 MiB

  module          at the peak  for backward  transient  calls
  net                8.00 MiB      8.00 MiB   8.00 MiB      1
    a                6.00 MiB      6.00 MiB   6.00 MiB      1
    b                2.00 MiB      2.00 MiB   2.00 MiB      1
  before the run     1.00 MiB

At the peak: parameters, gradients, optimizer state and what forwards made, each with all below it.
For backward: what the forwards left until the next backward began. Transient: the highest rise inside one call.
"""
    )


def test_html_says_the_same_as_the_text():
    tree = two_layers()
    page = Words(html(tree))
    for cell in (cell.strip() for line in text(tree).splitlines() for cell in line.split("  ") if cell.strip()):
        assert cell in page
    assert page.tags.count("details") == 1
    assert "http" not in html(tree) + figure(tree).to_json()  # nothing is fetched


@pytest.mark.parametrize("where", ["a", "b"])
def test_whatever_a_module_is_called_it_stays_text(where):
    tree = two_layers(**{where: f"net.{EVIL}"})
    page = Words(html(tree))
    assert "script" not in page.tags and "script>" in page
    shown = text(tree) + html(tree) + json.dumps(json.loads(figure(tree).to_json())["data"])
    assert "\x1b" not in shown and "\\u001b" not in shown
    assert not any(line.startswith("next&") for line in text(tree).splitlines())
    assert "<script>" not in figure(tree).to_json()


def test_a_name_of_ten_thousand_characters_does_not_run_away():
    tree = two_layers(a="net." + "x" * 10_000)
    assert max(map(len, text(tree).splitlines())) < 150
    assert len(html(tree)) < 5000


def test_of_many_modules_the_largest_are_shown_and_the_others_summed_up():
    tree = many(500)
    found = [row for top in rows(tree, 30) for row in top.walk()]
    assert len(found) == 14
    assert [row.name for row in found[1:]] == [*(str(i) for i in range(488, 500)), "488 more"]
    held = sum((i + 1) * 1000 for i in range(488))
    assert found[-1].cells[0] == format_bytes(held)


def test_the_rows_and_bytes_of_a_large_model_stay_few():
    tree = many(100, below=20)
    assert len(tree) == 2101
    assert len(text(tree).splitlines()) <= 45
    assert len(html(tree)) < 35_000
    assert len(figure(tree).to_json()) < 120_000


def test_what_is_largest_is_unfolded_first():
    script = Script()
    for path, size in (("net.small.x", 1), ("net.large.x", 1000), ("net.large.y", 1000)):
        called(script, path, size)
    names = [row.name for top in rows(modules(script.trace(), 0), 5) for row in top.walk()]
    assert names == ["net", "small", "large", "x", "y"]


def test_calls_that_backward_made_and_calls_that_never_ended_are_told():
    script = Script()
    called(script, "net", 10)
    script.mark(MarkKind.PHASE_BEGIN, BACKWARD, script.now + 5)
    called(script, "net", 10)
    script.mark(MarkKind.MODULE_BEGIN, "net", script.now + 5)
    assert "1 + 1 recomputed + 1 not ended" in text(modules(script.trace(), 0))


def test_lost_events_are_told():
    shown = text(two_layers(bounded=(Bounded(0, 1, 2, 3),)))
    assert "Who held the peak is not known" in shown
    assert "figures of calls may be too small" in shown
    assert "9.00 MiB to 8.00 GiB" in shown.splitlines()[0]


def test_the_figure_has_a_tile_for_each_module_as_large_as_what_it_held():
    (tiles,) = json.loads(figure(two_layers()).to_json())["data"]
    assert tiles["ids"] == ["net", "net.a", "net.b"]
    assert tiles["parents"] == ["", "net", "net"]
    assert tiles["values"] == [8 * MiB, 6 * MiB, 2 * MiB]
    assert tiles["branchvalues"] == "total"


def test_without_a_known_peak_the_figure_shows_what_was_kept():
    drawn = figure(two_layers(bounded=(Bounded(0, 1, 2, 3),)))
    (tiles,) = json.loads(drawn.to_json())["data"]
    assert tiles["values"] == [8 * MiB, 6 * MiB, 2 * MiB]
    assert "for backward" in drawn.layout.title.text
