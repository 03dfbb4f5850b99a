from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from scripted_traces import Script

from memlab.analysis.breakdown import breakdown
from memlab.analysis.modules import MOST_NESTED, ModuleTree, calls, left_by, modules, prefixes, rise_of
from memlab.errors import MemlabError
from memlab.trace import Bounded, MarkKind, Trace
from memlab.trace.columns import Columns
from memlab.trace.spans import BACKWARD

BEGIN, END = MarkKind.MODULE_BEGIN, MarkKind.MODULE_END


class Training(Script):
    """Calls of modules as text: `net(a(+5 +7 -0) b(+3)) !-1 .` allocates, frees the block of that number, goes backward.

    `net~(` is a call without grad, `net[` one whose end nobody sees, and `net]` an end; `<` is the end of what was there before.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._open: list[str] = []
        self._name = ""
        for word in re.findall(r"[+-]\d+|[()!.<]|[^\s()\[\]]+[\[\]]|[^\s()\[\]]+", text):
            self.word(word)

    def word(self, word: str) -> None:
        at = self.now + 5
        if word == "(":
            self._open.append(self._name.rstrip("~"))
            self.mark(MarkKind.MODULE_BEGIN_NO_GRAD if self._name.endswith("~") else BEGIN, self._open[-1], at)
        elif word == ")":
            self.mark(END, self._open.pop(), at)
        elif word[-1] in "[]":
            self.mark(BEGIN if word[-1] == "[" else END, word[:-1], at)
        elif word == "!":
            self.mark(MarkKind.PHASE_BEGIN, BACKWARD, at)
        elif word == ".":
            self.mark(MarkKind.PHASE_END, BACKWARD, at)
        elif word == "<":
            self.here_it_starts()
        elif word[0] == "+":
            self.alloc(int(word[1:]), **({"module": self._open[-1]} if self._open else {}))
        elif word[0] == "-":
            self.free(int(word[1:]))
        else:
            self._name = word


def tree(text: str) -> ModuleTree:
    return modules(Training(text).trace(), 0)


def figures(found: ModuleTree, path: str) -> tuple[int, int, int, int, int]:
    one = found[path]
    return one.held_bytes, one.own_bytes, one.left_bytes, one.kept_bytes, one.transient_bytes


def test_the_tree_by_hand():
    found = tree("+1000 net(+1 net.a(+10 +20 -3) net.layers.0(+300) ) +4 ! -2 .")
    assert list(found) == ["net", "net.a", "net.layers", "net.layers.0"]
    assert [root.path for root in found.roots] == ["net"]
    assert figures(found, "net") == (311, 1, 311, 311, 311)
    assert figures(found, "net.a") == (10, 10, 10, 10, 30)
    assert figures(found, "net.layers") == (300, 0, 300, 300, 300)
    assert figures(found, "net.layers.0") == (300, 300, 300, 300, 300)
    assert [found[path].calls for path in found] == [1, 1, 0, 1]
    assert dict(found.outside) == {"elsewhere": 1004}
    assert found.knows_holders
    assert found.is_exact


def test_what_the_modules_held_and_what_is_outside_is_the_peak():
    script = Training("+1000 net(+1 a(+10 +20 -2) b(+300) ) +4 ! -1 . b(+7)")
    script.preexisting(4096, requested=4000)
    found = modules(script.trace(), 0)
    total = sum(root.held_bytes for root in found.roots) + sum(found.outside.values())
    assert total == found.peak.low_bytes == breakdown(script.trace(), 0, "module").total_bytes


def test_modules_that_only_hold_are_there_too_and_without_any_the_tree_is_empty():
    empty = modules(Script().trace(), 0)
    assert (len(empty), empty.roots, dict(empty.outside)) == (0, (), {})
    script = Script()
    script.alloc(10, module="net.a")
    script.alloc(5, module="net")
    found = modules(script.trace(), 0)
    assert {path: (one.held_bytes, one.own_bytes, one.calls) for path, one in found.items()} == {
        "net": (15, 5, 0),
        "net.a": (10, 10, 0),
    }


def test_a_peak_whose_events_were_lost_leaves_the_calls():
    script = Training("net(+10)")
    found = modules(script.trace(bounded=(Bounded(0, 1, 2, 3),)), 0)
    assert not found.knows_holders
    assert not found.is_exact
    assert figures(found, "net") == (0, 0, 10, 0, 10)


def test_it_is_a_mapping_that_refuses_other_paths_with_those_that_are_there_and_a_frame():
    found = tree("net(+1 net.a(+2) )")
    with pytest.raises(MemlabError, match=r"no module 'other' in this run\. Known: 'net', 'net.a'"):
        found["other"]
    assert (found.get("other"), "other" in found, "net" in found) == (None, False, True)
    assert found.to_pandas().loc["net.a", "held_bytes"] == 2
    assert found.to_pandas().index.name == "module"


def random_training(seed: int) -> Trace:
    """Nested calls of a few modules, blocks that go anywhere, backward passes in between."""
    random, script = np.random.default_rng(seed), Training()
    alive: list[int] = []

    def body(depth: int) -> None:
        for _ in range(int(random.integers(1, 5))):
            what = random.random()
            if what < 0.35 and depth < 4:
                script.word(f"m{random.integers(3)}" + (f".x{random.integers(2)}" if random.random() < 0.5 else ""))
                script.word("(")
                body(depth + 1)
                script.word(")")
            elif what < 0.5 and alive:
                script.free(alive.pop(int(random.integers(len(alive)))))
            else:
                script.word(f"+{random.integers(1, 100)}")
                alive.append(len(script.blocks) - 1)

    for _ in range(12):
        body(0)
        if random.random() < 0.4:
            script.word("!")
            body(2)
            script.word(".")
    return script.trace()


@pytest.mark.parametrize("seed", range(6))
def test_every_figure_is_what_counting_block_by_block_gives(seed):
    trace = random_training(seed)
    found = {
        path: (one.left_bytes, one.kept_bytes, one.transient_bytes, one.calls, one.recomputed)
        for path, one in modules(trace, 0).items()
    }
    expected = counted(trace)
    assert expected.items() <= found.items()
    assert not any(any(figures) for path, figures in found.items() if path not in expected)


def columns(table: Columns, *names: str) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(table, name).tolist() for name in names), strict=True))


def counted(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Path -> (left, kept, transient, calls, recomputed), by looking at every block and every row for every call."""
    marks = columns(trace.marks, "row", "kind", "name")
    rows = columns(trace.events, "kind", "block", "allocated_bytes")
    gone = {block: row for row, (kind, block, _) in enumerate(rows) if kind == 2}
    level = [0]
    for kind, _, count in rows:
        level.append(level[-1] + (count if kind == 1 else -count))
    passes = [i for i, (_, kind, _) in enumerate(marks) if kind == 0]
    made, waiting, depth = [], [], 0  # (mark of its begin, of its end, name, whether in backward)
    for i, (_, kind, name) in enumerate(marks):
        depth += (kind == 0) - (kind == 1)
        if kind == BEGIN:
            waiting.append((i, depth > 0))
        elif kind == END:
            begin, in_backward = waiting.pop()
            made.append((begin, i, trace.texts["mark"][name], in_backward))

    def stays(begin: int, end: int, until: int) -> int:
        """The bytes that came between two marks and were there at a third."""
        inside = enumerate(rows[marks[begin][0] : marks[end][0]], marks[begin][0])
        return sum(
            count for _, (kind, block, count) in inside if kind == 1 and gone.get(block, 1 << 60) >= marks[until][0]
        )

    found = {}
    for path in {prefix for *_, name, _ in made for prefix in (name, name.split(".")[0])}:
        mine = [call for call in made if call[2] == path or call[2].startswith(path + ".")]
        own = [call for call in mine if call[2] == path]
        outer = [call for call in mine if not any(o[0] < call[0] and call[1] < o[1] for o in mine)]
        left, kept = Counter[int](), Counter[int]()
        for begin, end, _, in_backward in outer:
            after = next((i for i in passes if i > end), None)
            if not in_backward:
                left[min(c[0] for c in made if c[0] <= begin and end <= c[1])] += stays(begin, end, end)
                kept[after] += stays(begin, end, after) if after is not None else 0
        rises = [max(level[marks[b][0] : marks[e][0] + 1]) - level[marks[b][0]] for b, e, *_ in {*own, *outer}]
        recomputed = sum(call[3] for call in own)
        found[path] = (max(left.values(), default=0), max(kept.values(), default=0), max(rises, default=0),
                       len(own) - recomputed, recomputed)  # fmt: skip
    return found


# --- calls one by one ---


def of_calls(trace: Trace) -> dict[str, list[tuple[int, int, int]]]:
    """Name -> (left, kept, rise) of each call."""
    made = calls(trace)
    columns = left_by(trace, 0, made, made.end), left_by(trace, 0, made, made.backward_row), rise_of(trace, 0, made)
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name, *numbers in zip(made.name.tolist(), *columns, strict=True):
        found.setdefault(trace.texts["mark"][name], []).append(tuple(int(n) for n in numbers))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("net(+100 net.a(+50 +7 -1) +3) -2 !-0 -3 .", {"net": [(110, 103, 157)], "net.a": [(7, 0, 57)]}),
        ("+1000 net(-0 +10)", {"net": [(10, 0, 0)]}),  # what was there before and goes inside is not left less
        ("net(a(+100) b(+20 -0)) !-1 .", {"net": [(20, 20, 120)], "a": [(100, 0, 100)], "b": [(20, 20, 20)]}),
        ("net(empty() +5) empty()", {"net": [(5, 0, 5)], "empty": [(0, 0, 0), (0, 0, 0)]}),
        (
            "net(+1) !net(+40 -1) -0 . net~(+2)",
            {"net": [(1, 1, 1), (0, 0, 40), (2, 0, 2)]},
        ),  # a checkpoint computes again
        ("net(+1) !net(+40 -1) -0 . net~(+2) !-2 .", {"net": [(1, 1, 1), (0, 0, 40), (2, 2, 2)]}),
        ("net(net.a[ +5) late[ +7", {"net": [(5, 0, 5)]}),  # interrupted
        ("net[ net(+5)", {"net": [(5, 0, 5)]}),
        ("net] +1", {}),
        ("", {}),
    ],
)
def test_what_a_call_leaves_keeps_and_needs(text, expected):
    assert of_calls(Training(text).trace()) == expected


def test_the_order_of_calls_and_what_is_around_them():
    trace = Training("net(empty() +5) empty()").trace()
    made = calls(trace)
    assert [trace.texts["mark"][name] for name in made.name.tolist()] == ["net", "empty", "empty"]
    assert (made.depth.tolist(), made.root.tolist(), made.last.tolist()) == ([0, 1, 0], [0, 0, 2], [1, 1, 2])
    again = calls(Training("net(+1) !net(+40 -1) -0 . net~(+2)").trace())
    assert again.in_backward.tolist() == [False, True, False]
    assert again.backward.tolist() == [0, 1, 1]
    # One inside of the call is none to wait for.
    assert calls(Training("net(+1 !-0 .) !.").trace()).backward.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "unended"),
    [("net(net.a[ +5) late[ +7", {"net.a": 1, "late": 1}), ("net[ net(+5)", {"net": 1}), ("net] +1", {})],
)
def test_a_begin_without_an_end_is_counted_and_the_next_call_is_not_inside_of_it(text, unended):
    trace = Training(text).trace()
    made = calls(trace)
    assert {trace.texts["mark"][name]: count for name, count in made.unended.items()} == unended
    assert set(made.depth.tolist()) <= {0}


def test_calls_nested_deeper_than_python_can_are_not_followed():
    deepest = MOST_NESTED + 5
    made = calls(
        Training(" ".join([f"m{i}[" for i in range(deepest)] + [f"m{i}]" for i in reversed(range(deepest))])).trace()
    )
    assert (len(made), made.depth.max(), sum(made.unended.values())) == (MOST_NESTED, MOST_NESTED - 1, 5)
    made = calls(Training("net[ " * deepest + "+1 " + "net] " * deepest).trace())  # one module that calls itself
    assert (len(made), made.last[0], sum(made.unended.values())) == (MOST_NESTED, MOST_NESTED - 1, 5)


def test_devices_do_not_mix():
    script = Training("net[ +5")
    script.alloc(700, device=1)
    script.word("net]")
    assert of_calls(script.trace()) == {"net": [(5, 0, 5)]}


@pytest.mark.parametrize(
    ("text", "without", "with_it"),
    [("net(+8 +1) !.", [(9, 9, 9)], [(1, 1, 1)]), ("+8 < net(+5 -1)", [(0, 0, 5)], [(0, 0, 5)])],  # it was there before
)
def test_a_workspace_is_no_module_s(text, without, with_it):
    trace = Training(text).trace()
    blocks = trace.blocks.replace(name=np.array([0, -1]))
    known = trace.with_blocks(blocks, {**trace.texts, "name": ("workspace of cuBLAS",)})
    assert (of_calls(trace), of_calls(known)) == ({"net": without}, {"net": with_it})


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
