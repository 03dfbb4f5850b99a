from __future__ import annotations

import numpy as np
import pytest
from handmade import Script

from memlab.analysis.calls import Calls, calls, kept_by, left_by, prefixes, rise_of
from memlab.trace import MarkKind, Trace
from memlab.trace.spans import BACKWARD

BEGIN, END, NO_GRAD = MarkKind.MODULE_BEGIN, MarkKind.MODULE_END, MarkKind.MODULE_BEGIN_NO_GRAD


class Steps(Script):
    """A script in which things happen ten nanoseconds apart, marks between them."""

    def begin(self, name: str, kind: MarkKind = BEGIN) -> None:
        self.mark(kind, name, self.now + 5)

    def end(self, name: str) -> None:
        self.mark(END, name, self.now + 5)

    def backward(self, *freed: int) -> None:
        self.mark(MarkKind.PHASE_BEGIN, BACKWARD, self.now + 5)
        for block in freed:
            self.free(block)
        self.mark(MarkKind.PHASE_END, BACKWARD, self.now + 5)


def figures(trace: Trace) -> dict[str, list[tuple[int, int, int]]]:
    """Name -> (left, kept, rise) of each call."""
    made = calls(trace)
    columns = left_by(trace, 0, made, made.end), kept_by(trace, 0, made), rise_of(trace, 0, made)
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name, *numbers in zip(made.name.tolist(), *columns, strict=True):
        found.setdefault(trace.texts["mark"][name], []).append(tuple(int(n) for n in numbers))
    return found


def named(made: Calls, trace: Trace) -> list[str]:
    return [trace.texts["mark"][name] for name in made.name.tolist()]


def test_what_a_call_leaves_keeps_and_needs_by_hand():
    script = Steps()
    script.begin("net")
    saved = script.alloc(100)
    script.begin("net.a")
    scratch = script.alloc(50)
    output = script.alloc(7)
    script.free(scratch)
    script.end("net.a")
    inner = script.alloc(3)
    script.end("net")
    script.free(output)
    script.backward(saved, inner)
    assert figures(script.trace()) == {"net": [(110, 103, 157)], "net.a": [(7, 0, 57)]}


def test_what_was_there_before_and_goes_inside_is_not_left_less():
    script = Steps()
    old = script.alloc(1000)
    script.begin("net")
    script.free(old)
    script.alloc(10)
    script.end("net")
    assert figures(script.trace()) == {"net": [(10, 0, 0)]}


def test_what_goes_in_a_later_call_of_the_same_parent():
    script = Steps()
    script.begin("net")
    script.begin("a")
    first = script.alloc(100)
    script.end("a")
    script.begin("b")
    second = script.alloc(20)
    script.free(first)
    script.end("b")
    script.end("net")
    script.backward(second)
    assert figures(script.trace()) == {"net": [(20, 20, 120)], "a": [(100, 0, 100)], "b": [(20, 20, 20)]}


def test_calls_without_events_and_at_one_moment_keep_their_order():
    script = Steps()
    script.begin("net")
    script.begin("empty")
    script.end("empty")
    script.alloc(5)
    script.end("net")
    script.begin("empty")
    script.end("empty")
    trace = script.trace()
    made = calls(trace)
    assert named(made, trace) == ["net", "empty", "empty"]
    assert (made.parent.tolist(), made.root.tolist(), made.last.tolist()) == ([-1, 0, -1], [0, 0, 2], [1, 1, 2])
    assert figures(trace) == {"net": [(5, 0, 5)], "empty": [(0, 0, 0), (0, 0, 0)]}


def test_a_call_belongs_to_the_next_backward_and_one_inside_of_it_is_told_apart():
    script = Steps()
    script.begin("net")
    one = script.alloc(1)
    script.end("net")
    script.mark(MarkKind.PHASE_BEGIN, BACKWARD, script.now + 5)
    script.begin("net")  # a checkpoint computes again
    script.free(script.alloc(40))
    script.end("net")
    script.free(one)
    script.mark(MarkKind.PHASE_END, BACKWARD, script.now + 5)
    script.begin("net", NO_GRAD)
    two = script.alloc(2)
    script.end("net")
    trace = script.trace()
    made = calls(trace)
    assert made.in_backward.tolist() == [False, True, False]
    assert made.backward.tolist() == [0, 1, 1]
    assert [kept for _, kept, _ in figures(trace)["net"]] == [1, 0, 0]
    script.backward(two)
    assert [kept for _, kept, _ in figures(script.trace())["net"]] == [1, 0, 2]


def test_a_begin_without_an_end_is_counted_and_no_call():
    script = Steps()
    script.begin("net")
    script.begin("net.a")  # interrupted
    script.alloc(5)
    script.end("net")
    script.begin("late")
    script.alloc(7)
    trace = script.trace()
    made = calls(trace)
    assert named(made, trace) == ["net"]
    assert {trace.texts["mark"][name]: count for name, count in made.unended.items()} == {"net.a": 1, "late": 1}
    assert figures(trace) == {"net": [(5, 0, 5)]}


def test_after_an_interrupted_call_the_next_of_that_module_is_not_inside_of_it():
    script = Steps()
    script.begin("net")
    script.begin("net")
    script.alloc(5)
    script.end("net")
    trace = script.trace()
    made = calls(trace)
    assert (made.parent.tolist(), sum(made.unended.values())) == ([-1], 1)


def test_an_end_without_a_begin_is_nothing():
    script = Steps()
    script.end("net")
    script.alloc(1)
    assert len(calls(script.trace())) == 0
    assert figures(script.trace()) == {}
    assert len(calls(Script().trace())) == 0


def test_devices_do_not_mix():
    script = Steps()
    script.begin("net")
    script.alloc(5)
    script.alloc(700, device=1)
    script.end("net")
    assert figures(script.trace()) == {"net": [(5, 0, 5)]}


def test_a_workspace_is_no_module_s():
    script = Steps()
    script.begin("net")
    script.alloc(8)
    script.alloc(1)
    script.end("net")
    script.backward()
    trace = script.trace()
    blocks = trace.blocks.replace(name=np.array([0, -1]))
    assert figures(trace.with_blocks(blocks, {**trace.texts, "name": ("workspace of cuBLAS",)})) == {"net": [(1, 1, 1)]}
    assert figures(trace) == {"net": [(9, 9, 9)]}


def test_a_workspace_that_was_there_before_changes_nothing():
    script = Steps()
    script.adopt(8)
    script.here_it_starts()
    script.begin("net")
    script.free(script.alloc(5))
    script.end("net")
    trace = script.trace()
    blocks = trace.blocks.replace(name=np.array([0, -1]))
    assert figures(trace.with_blocks(blocks, {**trace.texts, "name": ("workspace of cuBLAS",)})) == figures(trace)
    assert figures(trace) == {"net": [(0, 0, 5)]}


@pytest.mark.parametrize(
    ("path", "above"),
    [
        ("net", ["net"]),
        ("net.layers.0", ["net", "net.layers", "net.layers.0"]),
        ("nets['a.b'].fc", ["nets['a.b']", "nets['a.b'].fc"]),
        ("Net#2.fc", ["Net#2", "Net#2.fc"]),
        ("a[0][1.5].b", ["a[0][1.5]", "a[0][1.5].b"]),
        ("odd[", ["odd["]),
        ("", [""]),
    ],
)
def test_the_paths_above_a_path(path, above):
    assert prefixes(path) == above
