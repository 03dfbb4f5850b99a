from __future__ import annotations

import numpy as np
import pytest
from handmade import Script

from memlab.analysis.breakdown import breakdown
from memlab.analysis.modules import ModuleTree, modules
from memlab.errors import MemlabError
from memlab.trace import Bounded, MarkKind, Trace
from memlab.trace.columns import Table
from memlab.trace.spans import BACKWARD

BEGIN, END = MarkKind.MODULE_BEGIN, MarkKind.MODULE_END


class Training(Script):
    """Calls of modules as text: `net(a(+5 +7 -0) b(+3)) !` allocates, frees the block of that number, goes backward."""

    def run(self, text: str) -> Training:
        for word in text.replace("(", " ( ").replace(")", " ) ").split():
            self._word(word)
        return self

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self._name = ""

    def _word(self, word: str) -> None:
        at = self.now + 5
        if word == "(":
            self._open.append(self._name)
            self.mark(BEGIN, self._name, at)
        elif word == ")":
            self.mark(END, self._open.pop(), at)
        elif word == "!":
            self.mark(MarkKind.PHASE_BEGIN, BACKWARD, at)
        elif word == ".":
            self.mark(MarkKind.PHASE_END, BACKWARD, at)
        elif word[0] == "+":
            self.alloc(int(word[1:]), **({"module": self._open[-1]} if self._open else {}))
        elif word[0] == "-":
            self.free(int(word[1:]))
        else:
            self._name = word


def tree(text: str) -> ModuleTree:
    return modules(Training().run(text).trace(), 0)


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
    script = Training().run("+1000 net(+1 a(+10 +20 -2) b(+300) ) +4 ! -1 . b(+7)")
    script.adopt(4096, requested=4000)
    found = modules(script.trace(), 0)
    total = sum(root.held_bytes for root in found.roots) + sum(found.outside.values())
    assert total == found.peak.low_bytes == breakdown(script.trace(), 0, "module").total_bytes


def test_calls_of_one_forward_are_summed_and_steps_are_not():
    step = "net(shared(+{}) shared(+{}) ) ! -{} -{} . "
    found = tree(step.format(10, 20, 0, 1) + step.format(1, 2, 2, 3) + step.format(7, 8, 4, 5))
    assert figures(found, "shared")[2:] == (30, 30, 20)
    assert figures(found, "net")[2:] == (30, 30, 30)
    assert found["shared"].calls == 6


def test_forwards_before_one_backward_are_kept_together():
    found = tree("net(+10) net(+20) ! -0 -1 . net(+25) ! -2 .")
    assert figures(found, "net")[2:] == (25, 30, 25)


def test_without_backward_nothing_is_kept():
    assert figures(tree("net(+10) net(+20)"), "net")[2:] == (20, 0, 20)


def test_a_module_inside_of_itself_counts_once():
    found = tree("net(+1 net(+10 +100 -2) ) ! -0 -1 .")
    assert figures(found, "net")[2:] == (11, 11, 111)
    assert found["net"].calls == 2


def test_an_inner_call_of_a_module_can_rise_further_than_the_outer_one():
    found = tree("+1000 net(-0 net(+500) )")
    assert found["net"].transient_bytes == 500


def test_a_module_above_that_was_not_called_has_the_figures_of_those_below():
    found = tree("net.encoder(+10) net.decoder(+20) ! -0 -1 .")
    assert figures(found, "net")[2:] == (20, 30, 20)  # two forwards, kept for one backward
    assert found["net"].calls == 0


def test_a_forward_in_backward_is_told_apart_and_leaves_nothing():
    found = tree("net(+10) ! net(+50 -1) -0 .")
    assert figures(found, "net")[2:] == (10, 10, 50)
    assert (found["net"].calls, found["net"].recomputed) == (1, 1)


def test_modules_that_only_hold_are_there_too():
    script = Script()
    script.alloc(10, module="net.a")
    script.alloc(5, module="net")
    found = modules(script.trace(), 0)
    assert {path: (one.held_bytes, one.own_bytes, one.calls) for path, one in found.items()} == {
        "net": (15, 5, 0),
        "net.a": (10, 10, 0),
    }


def test_a_run_without_modules_is_an_empty_tree():
    found = modules(Script().trace(), 0)
    assert (len(found), found.roots, dict(found.outside)) == (0, (), {})


def test_a_peak_whose_events_were_lost_leaves_the_calls():
    script = Training().run("net(+10)")
    found = modules(script.trace(bounded=(Bounded(0, 1, 2, 3),)), 0)
    assert not found.knows_holders
    assert not found.is_exact
    assert figures(found, "net") == (0, 0, 10, 0, 10)


def test_a_path_that_is_not_there_is_refused_with_those_that_are():
    found = tree("net(+1)")
    with pytest.raises(MemlabError, match="no module 'other' in this run"):
        found["other"]
    assert found.get("other") is None
    assert "other" not in found
    assert "net" in found


def test_as_a_frame():
    frame = tree("net(+1 net.a(+2) )").to_pandas()
    assert frame.loc["net.a", "held_bytes"] == 2
    assert frame.index.name == "module"


def random_training(seed: int) -> Trace:
    """Nested calls of a few modules, blocks that go anywhere, backward passes in between."""
    random, script = np.random.default_rng(seed), Training()
    alive: list[int] = []

    def body(depth: int) -> None:
        for _ in range(int(random.integers(1, 5))):
            what = random.random()
            if what < 0.35 and depth < 4:
                script._word(f"m{random.integers(3)}" + (f".x{random.integers(2)}" if random.random() < 0.5 else ""))
                script._word("(")
                body(depth + 1)
                script._word(")")
            elif what < 0.5 and alive:
                script.free(alive.pop(int(random.integers(len(alive)))))
            else:
                script._word(f"+{random.integers(1, 100)}")
                alive.append(len(script.blocks) - 1)

    for _ in range(12):
        body(0)
        if random.random() < 0.4:
            script._word("!")
            body(2)
            script._word(".")
    return script.trace()


@pytest.mark.parametrize("seed", range(25))
def test_every_figure_is_what_counting_block_by_block_gives(seed):
    trace = random_training(seed)
    found = modules(trace, 0)
    expected = counted(trace)
    assert {path for path in found if any(figures(found, path)[2:])} <= set(expected)
    for path, (left, kept, transient) in expected.items():
        assert figures(found, path)[2:] == (left, kept, transient), path


def columns(table: Table, *names: str) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(table, name).tolist() for name in names), strict=True))


def counted(trace: Trace) -> dict[str, tuple[int, int, int]]:
    """Path -> (left, kept, transient), by looking at every block and every row for every call."""
    texts, marks = trace.texts["mark"], columns(trace.marks, "row", "kind", "name")
    rows = columns(trace.events, "kind", "block", "allocated_bytes")
    born = {block: i for i, (kind, block, _) in enumerate(rows) if kind == 1}
    size = {block: count for kind, block, count in rows if kind == 1}
    gone = {block: i for i, (kind, block, _) in enumerate(rows) if kind == 2}
    level = [0]
    for kind, _, count in rows:
        level.append(level[-1] + (count if kind == 1 else -count))
    made, waiting, depth, passes = [], [], 0, [i for i, (_, kind, name) in enumerate(marks) if kind == 0]
    for i, (_, kind, name) in enumerate(marks):
        depth += (kind == 0) - (kind == 1)
        if kind == BEGIN:
            waiting.append((i, depth > 0))
        elif kind == END:
            made.append((*waiting.pop(), i, texts[name]))
    made.sort()
    paths = {prefix for *_, name in made for prefix in [name, name.split(".")[0]]}
    return {path: _counted_of(path, made, marks, passes, born, size, gone, level) for path in paths}


def _counted_of(path, made, marks, passes, born, size, gone, level):  # type: ignore[no-untyped-def]
    mine = [call for call in made if call[3] == path or call[3].startswith(path + ".")]
    outer = [c for c in mine if not any(o[0] < c[0] and c[2] < o[2] for o in mine)]
    left: dict[int, int] = {}
    kept: dict[int, int] = {}
    for begin, in_backward, end, _ in outer:
        if in_backward:
            continue
        root = min(c[0] for c in made if c[0] <= begin and end <= c[2])
        after = next((i for i in passes if i > end), None)
        inside = [b for b, row in born.items() if marks[begin][0] <= row < marks[end][0]]
        left[root] = left.get(root, 0) + sum(size[b] for b in inside if gone.get(b, 1 << 60) >= marks[end][0])
        if after is not None:
            kept[after] = kept.get(after, 0) + sum(size[b] for b in inside if gone.get(b, 1 << 60) >= marks[after][0])
    rise = [
        max(level[marks[b][0] : marks[e][0] + 1]) - level[marks[b][0]]
        for b, _, e, name in made
        if name == path or (b, _, e, name) in outer
    ]
    return max(left.values(), default=0), max(kept.values(), default=0), max(rise, default=0)
