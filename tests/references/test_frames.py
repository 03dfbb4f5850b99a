"""The local variables of frames are read without leaving anything behind."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from memlab.torch_internals import frames


def read(frame: types.FrameType) -> dict[str, Any]:
    """Name -> value; a cell stands for what is in it."""
    return {
        name: value.cell_contents if type(value) is types.CellType else value for name, value in frames.locals_of(frame)
    }


def test_variables_arguments_cells_and_free_ones():
    def outer(free):
        def inner(first, *rest, key=1, **more):
            if not first:
                unbound = 1
            shared = [first]
            gone = 2
            del gone
            keeper = lambda: shared  # noqa: E731
            found = read(sys._getframe())
            found.pop("keeper")
            return found, free, unbound if not first else keeper

        return inner(1, 2, key=3, x=4)[0]

    assert outer("f") == {
        "first": 1, "rest": (2,), "key": 3, "more": {"x": 4}, "shared": [1], "free": "f",
    }  # fmt: skip


def test_a_generator_a_finished_frame_and_another_thread():
    def generator():
        mine = "g"
        yield
        print(mine)

    waiting = generator()
    next(waiting)
    assert read(waiting.gi_frame) == {"mine": "g"}

    def fails():
        mine = "f"
        raise ValueError(mine)

    try:
        fails()
    except ValueError as error:
        found = read(error.__traceback__.tb_next.tb_frame)
    assert found == {"mine": "f"}

    ready, done = threading.Event(), threading.Event()

    def works(mine):
        ready.set()
        done.wait()

    thread = threading.Thread(target=works, args=("t",))
    thread.start()
    try:
        assert ready.wait(120)
        frame = sys._current_frames()[thread.ident]
        while frame.f_code.co_name != "works":
            frame = frame.f_back
        assert read(frame) == {"mine": "t", "ready": ready, "done": done}
        del frame
    finally:
        done.set()
        thread.join()


def test_modules_and_classes_have_no_variables_of_their_own():
    seen = []

    class Body:
        inside = 1
        seen.append(list(frames.locals_of(sys._getframe())))

    space = {"look": lambda: seen.append(list(frames.locals_of(sys._getframe(1))))}
    exec("x = 1\nlook()", space)
    assert seen == [[], []]


def test_nothing_stays_with_the_frame():
    counts = []

    def function():
        mine = object()
        counts.append(sys.getrefcount(mine))
        list(frames.locals_of(sys._getframe()))
        counts.append(sys.getrefcount(mine))

    function()
    assert counts[0] == counts[1]


def test_a_function_that_is_ending_is_left_alone():
    """Its variables are cleared one by one, and the memory of those that are gone must not be read."""
    seen = []

    class Last:
        def __del__(self):
            frame = sys._getframe(1)
            seen.append((frame.f_code.co_name, [name for name, _ in frames.locals_of(frame)]))

    def function():
        before, last, after = [1], Last(), [2]
        return len(before) + len(after) + (last is None)

    function()
    assert seen
    assert all(name != "function" or not names or sys.version_info >= (3, 13) for name, names in seen)


def test_the_shells_own_code_is_known():
    from IPython.core.interactiveshell import InteractiveShell

    assert frames.is_shells(InteractiveShell.run_code.__code__)
    assert frames.is_shells(InteractiveShell.run_line_magic.__code__)
    assert not frames.is_shells(read.__code__)
