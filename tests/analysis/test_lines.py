"""Lines of traces written by hand, and of random ones against a slow and simple count."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from scripted_traces import HOST, Script

from memlab.analysis.breakdown import breakdown
from memlab.analysis.lines import BACKWARD, LineGroup, LineTable, lines
from memlab.errors import MemlabError
from memlab.trace import Gap, MarkKind, Trace


def noted(script: Script, executions: dict[str, dict[str, int]] | None = None, **made_by: Any) -> Trace:
    sources = {"cell": {"1": "a = 1", "2": "b = 2", "x": "no number"}}
    return script.trace(notes={"executions": executions or {}, "lines": sources}, **made_by)


def table(script: Script, executions: dict[str, dict[str, int]] | None = None, **made_by: Any) -> LineTable:
    return lines(noted(script, executions, **made_by), script.devices[0].index)


def charged(found: LineTable) -> int:
    return sum(row.held_bytes + row.backward_bytes for row in found) + found.outside_bytes


def test_what_a_line_holds_frees_and_rises_to():
    script = Script()
    old = script.preexisting(1000)
    script.here_it_starts()
    outside = script.alloc(5)
    script.mark(MarkKind.LINE, "cell:1", at=100)
    kept = script.alloc(300, at=101)
    script.free(script.alloc(200, at=102), at=103)
    script.mark(MarkKind.LINE, "cell:2", at=200)
    script.free(old, at=201)
    script.mark(MarkKind.LINE, "", at=300)
    script.free(outside, at=301)
    found = table(script, {"cell": {"1": 1, "2": 1}})
    one, two = found
    assert (one.held_bytes, one.peak_bytes, one.allocated_bytes, one.freed_bytes) == (300, 500, 500, 0)
    assert (two.held_bytes, two.peak_bytes, two.allocated_bytes, two.freed_bytes) == (-1000, 0, 0, 1000)
    assert (one.level_bytes, two.level_bytes) == (1305, 305)
    assert one.came == (LineGroup(1, "", "", 300),)
    assert two.went == (LineGroup(1, "", "", 1000),)
    assert (found.start_bytes, found.end_bytes, found.outside_bytes) == (1000, 300, 0)
    assert charged(found) == found.change_bytes == -700
    assert found["cell:1"] is one
    assert kept


def test_loops_are_aggregated_and_peaks_are_of_one_execution():
    script = Script()
    for i in range(3):
        script.mark(MarkKind.LINE, "cell:2", at=100 * i + 10)
        script.alloc(50, at=100 * i + 11)
        script.free(script.alloc(7 * (i + 1), at=100 * i + 12), at=100 * i + 13)
    row = table(script, {"cell": {"2": 3}})["cell:2"]
    assert (row.executions, row.held_bytes, row.peak_bytes) == (3, 150, 71)
    assert row.came == (LineGroup(3, "", "", 150),)


def test_backward_is_charged_to_forward_lines_and_shown_on_the_line_that_waits():
    script = Script()
    script.mark(MarkKind.LINE, "cell:1", at=0)
    saved = script.alloc(400, at=1)
    script.mark(MarkKind.LINE, "cell:2", at=10)
    script.mark(MarkKind.LINE, "(backward)\ncell:2", at=11)
    script.alloc(30, at=12)
    script.mark(MarkKind.LINE, "cell:1\n(backward)\ncell:2", at=13)
    script.alloc(100, at=14)
    script.free(saved, at=15)
    script.mark(MarkKind.LINE, "cell:2\n...", at=20)
    script.alloc(1, at=21)
    found = table(script, {"cell": {"1": 1, "2": 1}})
    forward, waits, unknown = found["cell:1"], found["cell:2"], found[BACKWARD]
    assert (forward.held_bytes, forward.backward_bytes, forward.total_bytes) == (400, -300, 400)
    assert (waits.held_bytes, waits.total_bytes, waits.peak_bytes, waits.freed_bytes) == (1, -269, 130, 400)
    assert unknown.backward_bytes == 30
    assert charged(found) == found.change_bytes
    assert found.rows[-1] is unknown


def test_several_devices_are_kept_apart():
    script = Script(Script().devices[0], HOST)
    script.mark(MarkKind.LINE, "cell:1", at=0)
    script.alloc(10, at=1)
    script.alloc(77, at=2, device=-1)
    trace = noted(script, {"cell": {"1": 1}})
    assert [lines(trace, device)["cell:1"].held_bytes for device in (0, -1)] == [10, 77]
    assert lines(trace, -1).device == "cpu"


def test_executed_lines_without_memory_are_there_and_outer_lines_are_not():
    script = Script()
    script.mark(MarkKind.LINE, "cell:1\nouter.py:5", at=0)
    script.alloc(10, at=1)
    found = table(script, {"cell": {"1": 1, "2": 4}})
    assert [(row.text, row.executions) for row in found] == [("cell:1", 1), ("cell:2", 4)]
    assert found["cell:2"].is_quiet
    assert not found["cell:1"].is_quiet
    assert found.sources == {"cell": {1: "a = 1", 2: "b = 2"}}


def test_what_could_not_be_seen_is_named_and_wrong_questions_are_answered():
    found = table(Script(), gaps=(Gap("lines", "another one took over"), Gap("other", "x")))
    assert found.gaps == ("another one took over",)
    assert (len(found), found.change_bytes) == (0, 0)
    with pytest.raises(MemlabError, match="no line 'cell:9'"):
        found["cell:9"]
    with pytest.raises(MemlabError, match="measure with memlab run --lines, %%memtrack --lines"):
        lines(Script().trace(), 0)


@pytest.mark.parametrize(
    "wrong", [3, "x", {"cell": 5}, {"cell": {"1": "often", "z" * 5000: 1, 7: 1}}, {3: {"9" * 5000: 2}}]
)
def test_notes_of_a_file_that_make_no_sense_do_no_harm(wrong):
    script = Script()
    script.mark(MarkKind.LINE, "cell:1", at=0)
    script.alloc(10, at=1)
    found = lines(script.trace(notes={"executions": wrong, "lines": wrong}), 0)
    assert found["cell:1"].held_bytes == 10
    frame = table(script, {"cell": {"1": 1}}).to_pandas()
    assert frame.loc[0, ["text", "line", "executions", "held_bytes"]].tolist() == ["cell:1", 1, 1, 10]
    assert "came" not in frame


# --- against a slow count ----------------------------------------------------------------------------------------------


def random_script(seed: int) -> tuple[Script, list[tuple[Any, ...]]]:
    """A script, and what happened in it in order: ("mark", text) or ("event", change of the level, block)."""
    chance = random.Random(seed)
    script, story, alive = Script(), [], []
    texts = ["", "a:1", "a:2", "a:1\n...", "b:1\na:2", "b:2\na:2", "a:2\n..."]
    texts += ["b:1\n(backward)\na:2", "(backward)\na:2"]
    for at in range(0, chance.randrange(400), 10):
        kind = chance.random()
        if kind < 0.5:
            story.append(("mark", chance.choice(texts)))
            script.mark(MarkKind.LINE, story[-1][1], at=at)
        elif alive and kind < 0.75:
            block, size = alive.pop(chance.randrange(len(alive)))
            script.free(block, at=at)
            story.append(("event", -size, block))
        else:
            size = chance.randrange(1, 100)
            alive.append((script.alloc(size, at=at), size))
            story.append(("event", size, alive[-1][0]))
    return script, story


def slow(story: list[tuple[Any, ...]]) -> dict[str, Counter[str]]:
    """Name of the figure -> line -> bytes, one step at a time."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    level, on, charged = 0, list[str](), ""
    begun: dict[str, tuple[int, int]] = {}  # line that is on -> moment and level at its begin
    born: dict[int, int] = {}
    for now, (what, value, *block) in enumerate([*story, ("mark", "")]):
        if what == "event":
            level += value
            found["charged"][charged] += value
            for line in on:
                found["peak"][line] = max(found["peak"][line], level - begun[line][1])
            if value > 0:
                born[block[0]] = now
            if on and value > 0:
                found["allocated"][on[0]] += value
            elif on and born[block[0]] < begun[on[0]][0]:
                found["freed"][on[0]] -= value
            continue
        parts = value.split("\n") if value else []
        begins = bool(parts) and parts[-1] != "..." and "(backward)" not in parts
        parts = [part for part in parts if part != "..."]
        charged = parts[0] if parts else ""
        lines_on = parts[parts.index("(backward)") + 1 :] if "(backward)" in parts else parts
        for line in on:
            found["level"][line] = level
            if line not in lines_on or (begins and lines_on[0] == line):
                found["total"][line] += level - begun.pop(line)[1]
        begun |= {line: (now, level) for line in lines_on if line not in begun}
        on = lines_on
    return found


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_traces_against_a_slow_count(first):
    for seed in range(first, first + 100):
        script, story = random_script(seed)
        found, expected = table(script, {"a": {"1": 1, "2": 1}, "b": {"1": 1, "2": 1}}), slow(story)
        assert charged(found) == found.change_bytes
        assert found.outside_bytes == expected["charged"][""], seed
        for row in found:
            name = row.text if row.text != BACKWARD else "(backward)"
            assert row.held_bytes + row.backward_bytes == expected["charged"][name], (seed, name)
            for figure in ("total", "peak", "level", "allocated", "freed"):
                assert getattr(row, f"{figure}_bytes") == expected[figure][name], (seed, name, figure)


def test_several_statements_of_a_cell_in_one_line_are_one_execution():
    """IPython compiles and runs each statement of a cell by itself; functions, and other files, are compiled whole."""
    texts = [
        "%%memtrack",
        "a = 1; b = 2; c = 3",
        "def f():",
        "    x = 1; y = 2",
        "for i in f(): a; b",
        "d = (",
        "1); e = 2",
    ]
    source = {str(number): text for number, text in enumerate(texts, 1)}
    counts = {"2": 3, "4": 2, "5": 4, "6": 1, "7": 1}
    script = Script()
    labels = ("cell", "In[3]", "f.py")
    notes = {"executions": dict.fromkeys(labels, counts), "lines": dict.fromkeys(labels, source)}
    found = {row.text: row.executions for row in lines(script.trace(notes=notes), 0)}
    for cell in ("cell", "In[3]"):
        assert [found[f"{cell}:{line}"] for line in counts] == [1, 2, 4, 1, 1]
    assert [found[f"f.py:{line}"] for line in counts] == [3, 2, 4, 1, 1]


def test_lines_that_ran_whole_or_cannot_be_parsed_count_as_they_were_counted():
    for text, count, wanted in (("a = 1; b = 2", 1, 1), ("a = 1; b = 2", 5, 5), ("a = ; b", 2, 2)):
        notes = {"executions": {"cell": {"1": count}}, "lines": {"cell": {"1": text}}}
        assert [row.executions for row in lines(Script().trace(notes=notes), 0)] == [wanted]


def test_a_workspace_is_no_line_s_wherever_it_was_taken():
    script = Script()
    script.mark(MarkKind.LINE, "cell:1", at=0)
    script.alloc(100, at=1)
    workspace = script.alloc(8000, at=2)
    script.mark(MarkKind.LINE, "(backward)\ncell:2", at=10)
    other = script.alloc(500, at=11)
    trace = noted(script, {"cell": {"1": 1, "2": 1}})
    names = np.full(len(trace.blocks), -1)
    names[[workspace, other]] = 0
    trace = trace.with_blocks(trace.blocks.replace(name=names), {**trace.texts, "name": ("workspace of cuBLAS",)})
    found = lines(trace, 0)
    one, two = found["cell:1"], found["cell:2"]
    assert (one.held_bytes, one.total_bytes, one.peak_bytes, one.allocated_bytes) == (100, 100, 100, 100)
    assert [group.bytes for group in one.came] == [100]
    assert (two.total_bytes, two.peak_bytes) == (0, 0)
    assert BACKWARD not in [row.text for row in found]
    assert (found.outside_bytes, found.end_bytes, one.level_bytes) == (8500, 8600, 8100)  # levels are the device's
    assert charged(found) == found.change_bytes
    assert found.gaps[-1].startswith("8.30 KiB of math library workspaces")
    for by in ("line", "module"):
        assert breakdown(trace, 0, by)["workspace of cuBLAS"] == 8500
    assert not any("workspace" in gap for gap in lines(noted(script), 0).gaps)
