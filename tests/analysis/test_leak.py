"""Growth from iteration to iteration, told from plateaus of all kinds, on traces written by hand; what `run.leaks()` gives."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from scripted_traces import GPU, HOST, Script

from memlab.analysis.leak import Leak, Leaks, Place, leaks, short_line
from memlab.trace import Bounded, Category, MarkKind

KiB = 1 << 10
SIZE = 32 * KiB
TRAIN = "/home/me/train.py:7"


class Loop(Script):
    """Iterations that end with an optimizer step; each allocates and frees something besides what a test does."""

    def __init__(self, device=GPU, sign=MarkKind.PHASE_END, name="optimizer") -> None:
        super().__init__(device)
        self.sign, self.name = sign, name

    def __call__(self, count, body):
        for i in range(count):
            scratch = self.alloc(SIZE, line="/home/me/train.py:3")
            body(i)
            self.free(scratch)
            self.mark(self.sign, self.name, at=self.now)
        return leaks(self.trace(), self.devices[0].index)

    def kept(self, line=TRAIN, size=SIZE, **known) -> int:
        return self.alloc(size, line=line, **known)


@pytest.fixture
def loop() -> Loop:
    return Loop()


def only(found: tuple[Leak, ...]) -> Leak:
    assert len(found) == 1, found
    return found[0]


# --- leaks ---


def test_what_every_iteration_keeps_is_a_leak_with_its_line_bytes_and_beginning(loop):
    leak = only(loop(12, lambda i: loop.kept(module="net.fc1")))
    assert (leak.kind, leak.since, leak.iterations, leak.of) == ("kept", 1, 12, "optimizer step")
    assert (leak.bytes_per_iteration, leak.total_bytes) == (SIZE, 12 * SIZE)
    place = leak.places[0]
    assert (place.line, place.module, place.blocks) == (TRAIN, "net.fc1", 1.0)
    assert leak.text == (
        "Grows by 32.00 KiB with each optimizer step, since number 1 of 12, 384.0 KiB in all. "
        "What stays is allocated at train.py:7 in net.fc1."
    )


def test_four_iterations_are_enough_and_three_are_not(loop):
    assert only(loop(4, lambda i: loop.kept())).iterations == 4
    few = Loop()
    assert few(3, lambda i: few.kept()) == ()


@pytest.mark.parametrize(
    ("first", "since", "warm"),
    [(10, 11, ()), (8, 9, (0,))],  # warm-up: as when the first step makes the optimizer's states at the line that leaks
)
def test_it_is_said_since_when(loop, first, since, warm):
    leak = only(loop(30, lambda i: loop.kept() if i >= first or i in warm else None))
    assert leak.since == since
    assert leak.total_bytes == (30 - first) * SIZE


def test_several_places_that_begin_together_are_one_leak_with_the_largest_first(loop):
    def body(i):
        loop.kept(line="/n/model.py:30", size=4 * SIZE, module="net.a")
        loop.kept(line="/n/model.py:30", size=SIZE, module="net.b")
        loop.kept()

    leak = only(loop(10, body))
    assert [(p.line, p.module, p.bytes_per_iteration) for p in leak.places] == [
        ("/n/model.py:30", "net", 5 * SIZE),
        (TRAIN, "", SIZE),
    ]
    assert "at model.py:30 in net 160.0 KiB, at train.py:7 32.00 KiB" in leak.text


def test_what_differs_in_size_is_found_by_its_place(loop):
    sizes = np.random.default_rng(1).integers(1, 9, 40) * SIZE
    leak = only(loop(40, lambda i: loop.kept(size=int(sizes[i]))))
    assert leak.total_bytes == sizes.sum()
    assert leak.bytes_per_iteration == pytest.approx(sizes[:-1].mean(), rel=0.01)


def test_every_fifth_iteration_is_steady_too(loop):
    leak = only(loop(50, lambda i: loop.kept() if i % 5 == 0 else None))
    assert leak.bytes_per_iteration == pytest.approx(SIZE / 5, rel=0.1)


def test_a_leak_beside_transients_of_the_same_place_and_size(loop):
    def body(i):
        loop.kept()
        loop.free(loop.kept())

    assert only(loop(10, body)).total_bytes == 10 * SIZE


def test_a_large_block_that_goes_once_does_not_hide_it(loop):
    warm = loop.kept(size=1000 * SIZE)

    def body(i):
        loop.kept()
        if i == 6:
            loop.free(warm)

    assert only(loop(12, body)).bytes_per_iteration == SIZE


def test_what_replaces_itself_by_something_larger_is_growth(loop):
    """As `cache = torch.cat([cache, new])`: nothing stays, and more of it is there each time."""
    cache = [loop.kept()]

    def body(i):
        cache.append(loop.kept(size=(i + 2) * SIZE))
        loop.free(cache[-2])

    leak = only(loop(20, body))
    assert (leak.kind, leak.bytes_per_iteration) == ("growing", SIZE)
    assert "What is replaced by something larger each time is allocated at train.py:7." in leak.text


def test_two_leaks_that_begin_at_different_times_are_two(loop):
    def body(i):
        loop.kept()
        if i >= 10:
            loop.kept(line="/n/log.py:1", size=4 * SIZE)

    first, second = loop(30, body)
    assert [(one.places[0].line, one.since) for one in (first, second)] == [("/n/log.py:1", 11), (TRAIN, 1)]


# --- none ---


@pytest.mark.parametrize(
    "body",
    [
        lambda loop, i: None,
        lambda loop, i: [loop.kept() for _ in range(8)] if i < 2 else None,
        lambda loop, i: loop.kept(category=Category.OPTIMIZER),
        lambda loop, i: loop.kept(size=512),
    ],
    ids=["nothing", "a plateau", "the history of an optimizer", "scalars"],
)
def test_what_is_no_leak_beside_much_that_stays(loop, body):
    loop.kept(size=4000 * SIZE)
    assert loop(50, lambda i: body(loop, i)) == ()


def keeping(count, drop, sizes=None):
    """The leaks of a loop that keeps something each time, and then drops the `drop` oldest."""
    loop, held = Loop(), []

    def body(i):
        held.append(loop.kept(size=int(sizes[i]) if sizes is not None else SIZE))
        for _ in range(drop(len(held))):
            loop.free(held.pop(0))

    return loop(count, body)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
def test_a_window_over_the_last_few_is_none(window):
    assert keeping(30, lambda held: held > window) == ()


@pytest.mark.parametrize("period", [2, 5, 7, 16, 23])
@pytest.mark.parametrize("count", [20, 31, 47])
def test_a_list_that_is_emptied_now_and_then_is_none(period, count):
    found = keeping(count, lambda held: held if held == period else 0)
    assert found == () or period > count / 2  # one that was never emptied looks as a leak does


@pytest.mark.parametrize("seed", range(30))
def test_random_sizes_are_none(seed):
    assert keeping(25, lambda held: held > 1, np.random.default_rng(seed).integers(1, 50, 25) * SIZE) == ()


@pytest.mark.parametrize("seed", range(40))
def test_a_cache_that_fills_is_none(loop, seed):
    """One entry for each length met, as masks and plans are kept: new ones get rarer."""
    lengths = np.random.default_rng(seed).integers(12, size=60).tolist()
    assert loop(60, lambda i: loop.kept() if lengths.index(lengths[i]) == i else None) == ()


def test_what_moves_from_one_place_to_another_is_none(loop):
    queue = [loop.kept(line="/n/q.py:1") for _ in range(20)]

    def body(i):
        loop.free(queue.pop())
        loop.kept()

    assert loop(20, body) == ()


def test_of_few_iterations_each_has_to_add_about_the_same(loop):
    assert loop(6, lambda i: loop.kept(size=(5 if i == 2 else 1) * SIZE)) == ()


def test_other_devices_do_not_count(loop):
    found = loop(12, lambda i: loop.alloc(SIZE, line=TRAIN, device=-1))
    assert found == ()
    assert only(leaks(loop.trace(), -1)).device == -1


def test_nothing_of_an_empty_trace():
    assert leaks(Script().trace(), 0) == ()
    assert leaks(Script(HOST).trace(), -1) == ()


# --- what an iteration is ---


def test_backwards_serve_where_no_optimizer_steps():
    loop = Loop(sign=MarkKind.PHASE_BEGIN, name="backward")
    assert only(loop(10, lambda i: loop.kept())).of == "backward"


def calls(count, body, kind=MarkKind.MODULE_BEGIN):
    script = Script()
    script.mark(kind, "other", at=script.now)
    script.mark(MarkKind.MODULE_END, "other", at=script.now)
    for i in range(count):
        script.mark(kind, "net", at=script.now)
        for _ in range(2):
            script.mark(MarkKind.MODULE_BEGIN, "net.0", at=script.now)
            script.mark(MarkKind.MODULE_END, "net.0", at=script.now)
        scratch = script.alloc(SIZE, line="/n/a.py:1")
        script.mark(MarkKind.MODULE_END, "net", at=script.now)
        body(script, i)
        script.free(scratch)
    return script


@pytest.mark.parametrize("kind", [MarkKind.MODULE_BEGIN, MarkKind.MODULE_BEGIN_NO_GRAD])
def test_calls_of_the_outermost_module_serve_where_there_is_no_backward(kind):
    script = calls(10, lambda script, i: script.alloc(SIZE, line=TRAIN), kind)
    leak = only(leaks(script.trace(), 0))
    assert (leak.of, leak.iterations) == ("call of net", 10)


@pytest.mark.parametrize("has_backward", [True, False])
def test_what_calls_gather_for_their_only_backward_or_the_end_gives_back_is_none(has_backward):
    held = []
    script = calls(10, lambda script, i: held.append(script.alloc(SIZE, line=TRAIN)))
    if has_backward:
        script.mark(MarkKind.PHASE_BEGIN, "backward", at=script.now)
    else:
        for block in held:
            script.free(block)
    assert leaks(script.trace(), 0) == ()


def repeats(count, keep):
    script = Script()
    for i in range(count):
        scratch = script.alloc(2 * SIZE, line="/n/a.py:1")
        if keep(i):
            script.alloc(SIZE, line=TRAIN)
        script.free(scratch)
    return leaks(script.trace(), 0)


def test_without_marks_what_repeats_and_is_given_back_is_an_iteration():
    assert (only(repeats(12, lambda i: True)).of, repeats(12, lambda i: i < 3)) == ("repeat", ())


@pytest.mark.parametrize("category", [Category.PARAMETER, None])
def test_what_is_built_in_a_loop_is_none(category):
    script = Script()
    for _ in range(30):
        if category is None:
            script.alloc(SIZE, line=TRAIN)
        else:
            scratch = script.alloc(2 * SIZE, line="/n/a.py:1")
            script.alloc(SIZE, line=TRAIN, category=category)
            script.free(scratch)
    assert leaks(script.trace(), 0) == ()


def test_lines_come_from_marks_where_the_blocks_know_none():
    loop = Loop(HOST)

    def body(i):
        loop.mark(MarkKind.LINE, "cell:2", at=loop.now)
        loop.free(loop.alloc(SIZE))
        loop.mark(MarkKind.LINE, "cell:3", at=loop.now)
        loop.alloc(SIZE)

    loop.alloc = lambda size, line=None: Script.alloc(loop, size)  # as the CPU's: no lines
    leak = only(loop(10, body))
    assert leak.places[0].line == "cell:3"
    assert "at line 3 of a cell" in leak.text


def test_iterations_in_which_events_were_lost_do_not_count():
    loop = Loop()
    loop(12, lambda i: loop.kept())
    early = Bounded(0, 0, loop.now // 2, 10)
    assert only(leaks(loop.trace(bounded=(early,)), 0)).iterations < 8
    assert leaks(loop.trace(bounded=(Bounded(0, 0, loop.now, 10),)), 0) == ()
    assert only(leaks(loop.trace(bounded=(Bounded(1, 0, loop.now, 10),)), 0)).iterations == 12


def test_more_iterations_than_are_looked_at_one_by_one(loop):
    leak = only(loop(5000, lambda i: loop.kept(size=512)))
    assert (leak.iterations, leak.bytes_per_iteration) == (pytest.approx(5000, rel=0.01), 512)


def test_hostile_names_stay_in_one_line(loop):
    leak = only(loop(10, lambda i: loop.kept(line="/n/\x1b[2J\n<b>:7", module="a\n" * 500)))
    assert leak.text.isprintable()
    assert len(leak.text) < 500


# --- the value ---

FOUND = Leaks(
    [
        Leak("kept", 0, "backward", 1, 12, 24 * KiB, (Place("/a/<b>:7", "net.fc", "", "4x4", 2 * KiB, 1.0),
                                                     Place("", "net.head", "", "", KiB, 2.0))),
        Leak("growing", 0, "backward", 3, 12, 9 * KiB, (Place("", "", "aten::cat", "", KiB, 0.0),)),
    ],
    "backward: 12 of them",
)  # fmt: skip


def test_it_reads_as_one_sentence_for_each_leak():
    assert str(FOUND) == repr(FOUND) == f"{FOUND[0].text}\n{FOUND[1].text}"
    assert len(FOUND) == 2
    assert list(FOUND) == [FOUND[0], FOUND[1]]
    shown, _ = DisplayFormatter().format(FOUND)
    assert shown["text/plain"] == FOUND.text
    assert shown["text/html"].count("<div>") == 2
    assert "&lt;b&gt;" in shown["text/html"]
    assert "<b>" not in shown["text/html"]


def test_the_frame_has_a_row_for_each_place():
    frame = FOUND.to_pandas()
    assert list(frame["leak"]) == [1, 1, 2]
    assert list(frame["bytes_per_iteration"]) == [2 * KiB, KiB, KiB]
    assert list(frame["total_bytes"]) == [24 * KiB, 24 * KiB, 9 * KiB]
    assert list(Leaks().to_pandas().columns) == list(frame.columns)


def test_copies_are_the_same():
    for twin in (copy.copy(FOUND), copy.deepcopy(FOUND), pickle.loads(pickle.dumps(FOUND))):
        assert twin == FOUND
        assert (type(twin), twin.looked_at) == (Leaks, FOUND.looked_at)


def test_nothing_that_grows_is_told_from_nobody_knows():
    known, unknown = Loop(), Loop()
    found, none = (loop(count, lambda i: None) for loop, count in ((known, 9), (unknown, 2)))
    assert found == none == ()
    assert str(found) == "Nothing grows from one iteration to the next (optimizer step: 9 of them)."
    assert str(none).startswith("Unknown: this run has no row of at least four iterations")
    assert "Unknown" in Leaks()._repr_html_()


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("/home/me/train.py:7", "train.py:7"),
        ("C:\\me\\train.py:7", "train.py:7"),
        ("cell:3", "line 3 of a cell"),
        ("/tmp/ipykernel_12/34.py:3", "line 3 of a cell"),
        ("before the run", "before the run"),
        ("workspace of cuBLAS", "workspace of cuBLAS"),
        ("/n/\x1b[2J\n.py:1", "?"),
    ],
)
def test_lines_in_short(line, short):
    found = short_line(line)
    assert found == short or (short == "?" and found.isprintable())


@pytest.mark.parametrize(("passing", "kind"), [(25, "kept"), (26, "growing")])
def test_of_what_a_line_keeps_a_quarter_may_pass(loop, passing, kind):
    held = {}

    def body(i):
        if i in held:
            loop.free(held.pop(i))
        loop.kept()
        if i < passing:
            held[i + 3] = loop.kept()

    assert only(loop(100, body)).kind == kind


@pytest.mark.parametrize("ends", [True, False])
def test_the_call_in_which_a_run_was_stopped_is_an_iteration(ends):
    script = Script()
    for i in range(8):
        script.mark(MarkKind.MODULE_BEGIN, "net", at=script.now)
        batch = script.alloc(32768, line="a.py:3")
        script.alloc(32768, line="t.py:7")
        if i < 7 or ends:
            script.mark(MarkKind.MODULE_END, "net", at=script.now)
            script.free(batch)
    found = only(leaks(script.trace(), 0))
    assert (found.iterations, found.of) == (8, "call of net")
