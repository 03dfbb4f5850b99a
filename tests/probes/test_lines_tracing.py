"""Line events: what is told of code of all kinds, and that debuggers, coverage and other tracers keep what they had."""

from __future__ import annotations

import gc
import inspect
import io
import pdb
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import memlab
from memlab.torch_internals import tracing
from memlab.torch_internals.tracing import ENTER, LEAVE, LINE

SETTRACE = sys.version_info < (3, 12)
CODE = """
def plain(x):
    y = x
    return y

def numbers(n):
    for i in range(n):
        yield i

def fails():
    raise KeyError

def catches():
    try:
        fails()
    except KeyError:
        pass
    return plain(1)

def sums():
    return sum(numbers(2))

def lets_go():
    it = numbers(3)
    next(it)
    it.close()
    return 0

def recurses(n):
    return n and recurses(n - 1)
"""


class Watched:
    """Watches the code that is compiled under a name."""

    def number_of(self, code: CodeType) -> int:
        return 3 if code.co_filename == "watched" else -1

    def concerns(self, file: str) -> bool:
        return file == "watched"


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(CODE, "watched", "exec"), found)
    return found


def told_by(body: Callable[[], object]) -> list[tuple[int, int]]:
    """(what, line) of everything that was told while `body` ran."""
    told: list[int] = []
    tracer = tracing.tracer(Watched(), told.append)
    tracer.start(sys._getframe())
    try:
        body()
    finally:
        assert tracer.stop() == ""
    assert {tracing.file_and_line(one >> 2)[0] for one in told if one & 3 != LEAVE} <= {3}
    return [(one & 3, tracing.file_and_line(one >> 2)[1]) for one in told]


def shown(told: list[tuple[int, int]]) -> str:
    return " ".join({LINE: str(line), ENTER: f"({line}", LEAVE: ")"}[what] for what, line in told)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("plain(1)", "(2 3 4 )"),
        ("sums()", "(20 21 (6 7 8 ) (8 7 8 ) (8 7 ) )"),
        ("catches()", "(13 14 15 (10 11 ) 16 17 18 (2 3 4 ) )"),
        ("recurses(2)", "(29 30 (29 30 (29 30 ) ) )"),
        ("[plain(i) for i in (1, 2)]", "(2 3 4 ) (2 3 4 )"),
        ("list(map(plain, (1, 2)))", "(2 3 4 ) (2 3 4 )"),
    ],
)
def test_frames_begin_and_end_and_lines_between(space, call, expected):
    code = compile(call, "not watched", "eval")
    assert shown(told_by(lambda: eval(code, space))) == expected
    assert shown(told_by(lambda: eval(code, space))) == expected, "the second time as the first"


def test_every_frame_that_begins_ends(space):
    for call in ("lets_go()", "catches()", "sums()", "recurses(5)"):
        depth, lowest = 0, 0
        for what, _ in told_by(lambda call=call: eval(call, space)):
            depth += {LINE: 0, ENTER: 1, LEAVE: -1}[what]
            lowest = min(lowest, depth)
        assert (depth, lowest) == (0, 0), call


def test_other_threads_are_not_followed(space):
    def body() -> None:
        thread = threading.Thread(target=space["plain"], args=(1,))
        thread.start()
        thread.join()
        space["plain"](2)

    assert shown(told_by(body)) == "(2 3 4 )"


def test_a_generator_that_outlives_the_tracer_tells_nobody(space):
    kept: list[Any] = []

    def body() -> None:
        kept.append(space["numbers"](3))
        next(kept[0])

    told = told_by(body)
    before = list(told)
    sys.settrace(lambda *_: None)
    try:
        assert list(kept[0]) == [1, 2]
    finally:
        sys.settrace(None)
    assert told == before


def test_one_that_another_thread_ends_leaves_with_the_next_call(space):
    tracer = tracing.tracer(Watched(), lambda told: None)
    tracer.start(sys._getframe())
    thread = threading.Thread(target=tracer.stop)
    thread.start()
    thread.join()
    space["plain"](1)
    assert sys.gettrace() is None


# --- with other trace functions ------------------------------------------------------------------------------------------


class Other:
    """A trace function that counts its events, as a debugger or a profiler written in Python."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.puts_itself_back = self.stops_after_one = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename == "watched":
            self.seen.append((frame.f_code.co_name, event))
        if self.puts_itself_back and event == "call":
            sys.settrace(self)  # as coverage's tracer in C does
        if self.stops_after_one and self.seen:
            sys.settrace(None)  # as a debugger does that goes on without breakpoints
            return None
        return self


def seen_by(other: Other, body: Callable[[], object]) -> list[tuple[str, str]]:
    sys.settrace(other)
    try:
        body()
    finally:
        sys.settrace(None)
    return other.seen


@pytest.mark.parametrize("puts_itself_back", [False, True])
def test_a_trace_function_goes_on_getting_its_events(space, puts_itself_back):
    alone, together = Other(), Other()
    alone.puts_itself_back = together.puts_itself_back = puts_itself_back
    expected = seen_by(alone, lambda: (space["catches"](), space["sums"]()))
    told: list[tuple[int, int]] = []
    kept: list[Any] = []

    def body() -> None:
        told.extend(told_by(lambda: (space["catches"](), space["sums"]())))
        kept.append(sys.gettrace())

    assert seen_by(together, body) == expected
    assert kept == [together]
    assert shown(told) == "(13 14 15 (10 11 ) 16 17 18 (2 3 4 ) ) (20 21 (6 7 8 ) (8 7 8 ) (8 7 ) )"


def test_a_trace_function_that_takes_itself_off_ends_alone(space):
    other = Other()
    other.stops_after_one = True
    left: list[Any] = []

    def body() -> None:
        assert shown(told_by(lambda: (space["plain"](1), space["plain"](2)))) == "(2 3 4 ) (2 3 4 )"
        left.append(sys.gettrace())

    seen_by(other, body)
    assert left == [None] if SETTRACE else True
    assert other.seen == [("plain", "call")]


@pytest.mark.skipif(not SETTRACE, reason="sys.monitoring has a tool for each")
@pytest.mark.parametrize("other", [Other(), None])
def test_one_that_comes_later_ends_ours_and_stays(other):
    tracer = tracing.tracer(Watched(), lambda told: None)
    tracer.start(sys._getframe())
    sys.settrace(other)
    try:
        assert tracer.stop() == tracing.TAKEN_OVER
        assert sys.gettrace() is other
    finally:
        sys.settrace(None)


# --- where tracing is off ------------------------------------------------------------------------------------------------


def closed(error: bool) -> None:
    if error:
        raise ValueError
    assert sys.gettrace() is None


@pytest.fixture
def is_closed(monkeypatch):
    others = frozenset(("body", "<lambda>", "told_by", "stop"))
    monkeypatch.setattr(tracing, "open_in", lambda file: others if file == closed.__code__.co_filename else None)


@pytest.mark.skipif(not SETTRACE, reason="sys.monitoring is never off")
def test_tracing_is_off_in_closed_functions_and_comes_back(space, is_closed):
    def body() -> None:
        space["plain"](closed(False))
        try:
            closed(True)
        except ValueError:
            space["plain"](1)  # the error still holds the frame: this is not seen
        space["plain"](2)

    assert shown(told_by(body)) == "(2 3 4 ) (2 3 4 )"


@pytest.mark.skipif(not SETTRACE, reason="sys.monitoring is never off")
def test_an_error_that_is_kept_keeps_it_off_and_that_is_said(is_closed):
    tracer = tracing.tracer(Watched(), lambda told: None)
    tracer.start(sys._getframe())
    with pytest.raises(ValueError) as kept:
        closed(True)
    assert tracer.stop() == tracing.KEPT_OFF
    del kept
    gc.collect()
    assert sys.gettrace() is None


def test_what_is_closed():
    from memlab.probes.backward import Backward, tensors_in
    from memlab.probes.storage_tracker import StorageTracker

    def is_closed(function: Any) -> bool:
        code = inspect.unwrap(function).__code__  # an imported compiler wraps some
        calls_on = tracing.open_in(code.co_filename)
        return calls_on is not None and tracing.is_closed(code, calls_on)

    assert is_closed(Backward.at_output)
    assert is_closed(torch.optim.Adam._init_group)
    for function in (
        StorageTracker.__torch_dispatch__,
        torch.optim.LBFGS._directional_evaluate,
        torch.nn.Module._call_impl,
    ):
        assert not is_closed(function), function
    assert not is_closed(tensors_in), "a generator's frame may wait for long"
    assert not is_closed(torch.optim.lr_scheduler.LambdaLR.get_lr)
    assert not is_closed(torch.optim.SGD.step)


# --- harmless ------------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_alive_by_watching():
    def watched(x: torch.Tensor) -> bool:
        seen = weakref.ref(x)
        x = x + 1
        return seen() is None

    with memlab.track(functions=[watched], show=False):
        gone = watched(torch.ones(3))  # an assert would keep the argument
    assert gone


def test_a_breakpoint_in_a_watched_function_works():
    commands, said = io.StringIO("p 6 * 7\nn\nn\nc\n"), io.StringIO()

    def watched() -> int:
        a = 1
        pdb.Pdb(stdin=commands, stdout=said, nosigint=True, readrc=False).set_trace()
        b = a + 1
        return b + 1

    with memlab.track(functions=[watched], show=False) as run:
        assert watched() == 3
    assert "42" in said.getvalue()
    assert "b = a + 1" in said.getvalue()
    named = [gap.text for gap in run.gaps if gap.name == "lines"]
    assert [tracing.TAKEN_OVER in text for text in named] == ([True] if SETTRACE else [])


def test_coverage_measures_what_it_would_without(tmp_path):
    coverage = pytest.importorskip("coverage")
    file = tmp_path / "measured.py"
    file.write_text("def f(n):\n    for i in range(n):\n        pass\n    return n\n\n\ndef g():\n    return f(2)\n")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    found = []
    for tracked in (False, True):
        cover = coverage.Coverage(data_file=None, include=[str(file)], messages=False)
        cover.start()
        if tracked:
            with memlab.track(functions=[space["f"]], show=False) as run:
                space["g"]()
            space["f"](0)
        else:
            space["g"]()
            space["f"](0)
        cover.stop()
        found.append(sorted(cover.get_data().lines(str(file)) or []))
    assert found[0] == found[1] == [2, 3, 4, 8]
    assert run.lines()["measured.py:3"].executions == 2


def test_two_tracks_at_once():
    def watched() -> list[torch.Tensor]:
        return [torch.ones(100)]

    with memlab.track(functions=[watched], show=False) as outer:
        one = watched()
        with memlab.track(functions=[watched], show=False) as inner:
            two = watched()
        three = watched()
    names = [row.text for row in inner.lines() if "100" in inner.lines().table.sources[row.source].get(row.line, "")]
    assert [inner.lines()[name].held_bytes for name in names] == [400]
    assert [outer.lines()[name].held_bytes for name in names] == [1200]
    began = {line: row for row in outer.lines() for line in [outer.lines().table.sources[row.source][row.line].strip()]}
    assert [began[f"{name} = watched()"].executions for name in ("one", "two", "three")] == [1, 1, 1]
    assert len(one + two + three) == 3


def test_errors_in_watched_code_go_out_as_they_are():
    def watched() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as raised, memlab.track(functions=[watched], show=False):
        watched()
    assert raised.traceback[-1].name == "watched"
    del raised
