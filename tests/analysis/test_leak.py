"""Growth from iteration to iteration, told from plateaus of all kinds, on traces written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from handmade import GPU, HOST, Script

from memlab.analysis.leak import Leak, leaks
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


def test_it_is_said_since_when(loop):
    leak = only(loop(30, lambda i: loop.kept() if i >= 10 else None))
    assert (leak.since, leak.total_bytes) == (11, 20 * SIZE)


def test_warm_up_of_the_same_place_does_not_hide_it(loop):
    """As when the first step makes the optimizer's states at the line that leaks later."""

    def body(i):
        if i == 0 or i >= 8:
            loop.kept()

    assert only(loop(30, body)).since == 9


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


def test_a_plateau_is_none(loop):
    loop.kept(size=100 * SIZE)
    assert loop(20, lambda i: None) == ()


def test_states_that_the_first_steps_make_are_none(loop):
    assert loop(20, lambda i: [loop.kept() for _ in range(8)] if i < 2 else None) == ()


def test_what_the_last_iteration_still_holds_is_none(loop):
    held = []

    def body(i):
        held.append(loop.kept())
        if len(held) > 1:
            loop.free(held[-2])

    assert loop(20, body) == ()


@pytest.mark.parametrize("window", [2, 3, 5, 9])
def test_a_window_over_the_last_few_is_none(loop, window):
    held = []

    def body(i):
        held.append(loop.kept())
        if len(held) > window:
            loop.free(held.pop(0))

    assert loop(30, body) == ()


@pytest.mark.parametrize("period", [2, 5, 7, 16, 23])
@pytest.mark.parametrize("count", [20, 31, 47])
def test_a_list_that_is_emptied_now_and_then_is_none(period, count):
    loop, held = Loop(), []

    def body(i):
        held.append(loop.kept())
        if len(held) == period:
            while held:
                loop.free(held.pop())

    found = loop(count, body)
    assert found == () or period > count / 2  # one that was never emptied looks as a leak does


def test_random_sizes_are_none(loop):
    for seed in range(30):
        random, each, held = np.random.default_rng(seed), Loop(), []

        def body(i, each=each, random=random, held=held):
            held.append(each.kept(size=int(random.integers(1, 50)) * SIZE))
            if len(held) > 1:
                each.free(held.pop(0))

        assert each(25, body) == (), seed


def test_a_cache_that_fills_is_none():
    """One entry for each length met, as masks and plans are kept: new ones get rarer."""
    flagged = 0
    for seed in range(40):
        random, loop, known = np.random.default_rng(seed), Loop(), set()

        def body(i, random=random, loop=loop, known=known):
            length = int(random.integers(12))
            if length not in known:
                known.add(length)
                loop.kept()

        flagged += bool(loop(60, body))
    assert flagged == 0


def test_what_moves_from_one_place_to_another_is_none(loop):
    queue = [loop.kept(line="/n/q.py:1") for _ in range(20)]

    def body(i):
        loop.free(queue.pop())
        loop.kept()

    assert loop(20, body) == ()


def test_scalars_are_bookkeeping(loop):
    loop.kept(size=4000 * SIZE)
    assert loop(50, lambda i: loop.kept(size=512)) == ()


def test_the_history_of_an_optimizer_is_none(loop):
    assert loop(20, lambda i: loop.kept(category=Category.OPTIMIZER)) == ()


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
    for i in range(count):
        script.mark(kind, "net", at=script.now)
        script.mark(MarkKind.MODULE_BEGIN, "net.0", at=script.now)
        scratch = script.alloc(SIZE, line="/n/a.py:1")
        script.mark(MarkKind.MODULE_END, "net.0", at=script.now)
        script.mark(MarkKind.MODULE_END, "net", at=script.now)
        body(script, i)
        script.free(scratch)
    return script


@pytest.mark.parametrize("kind", [MarkKind.MODULE_BEGIN, MarkKind.MODULE_BEGIN_NO_GRAD])
def test_calls_of_the_outermost_module_serve_where_there_is_no_backward(kind):
    script = calls(10, lambda script, i: script.alloc(SIZE, line=TRAIN), kind)
    leak = only(leaks(script.trace(), 0))
    assert (leak.of, leak.iterations) == ("call of net", 10)


def test_what_calls_gather_and_the_end_gives_back_is_none():
    held = []
    script = calls(10, lambda script, i: held.append(script.alloc(SIZE, line=TRAIN)))
    for block in held:
        script.free(block)
    assert leaks(script.trace(), 0) == ()


def test_what_calls_gather_for_their_only_backward_is_none():
    script = calls(10, lambda script, i: script.alloc(SIZE, line=TRAIN))
    script.mark(MarkKind.PHASE_BEGIN, "backward", at=script.now)
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


def test_building_something_in_a_loop_is_none():
    script = Script()
    for _ in range(30):
        script.alloc(SIZE, line="/n/model.py:4")
    assert leaks(script.trace(), 0) == ()


def test_parameters_made_in_a_loop_with_scratch_are_none():
    script = Script()
    for _ in range(30):
        scratch = script.alloc(2 * SIZE, line="/n/a.py:1")
        script.alloc(SIZE, line=TRAIN, category=Category.PARAMETER)
        script.free(scratch)
    assert leaks(script.trace(), 0) == ()


def test_lines_come_from_marks_where_the_blocks_know_none():
    loop = Loop(HOST)

    def body(i):
        loop.mark(MarkKind.LINE, "cell:2", at=loop.now)
        loop.free(loop.alloc(SIZE))
        loop.mark(MarkKind.LINE, "cell:3", at=loop.now)
        loop.alloc(SIZE)

    loop.alloc = lambda size, at=None, line=None, **known: Script.alloc(
        loop, size, at, **known
    )  # as the CPU's: no lines
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
