"""Tracebacks that wait: the shell shows them when it is told, and is as it was afterwards."""

from __future__ import annotations

import pytest
from kernel import kernel

from memlab.torch_internals.shell import ShownTracebacks, show_again


def test_only_those_that_are_meant_wait(tmp_path):
    hold = """
from memlab.torch_internals.shell import ShownTracebacks, show_again
shell = get_ipython()
held = ShownTracebacks(shell, lambda error: type(error) is MemoryError, lambda error: None)
shell.events.register("post_run_cell", lambda result: (print("first"), held.show()))
"""
    with kernel(tmp_path, hold) as notebook:
        for error in ("MemoryError", "KeyError"):
            reply = notebook.run(f"raise {error}('mine')")
            assert reply.status == "error" and reply.error == error
            order = [kind for kind in reply.order if kind in ("stream", "error")]
            assert order == (["stream", "error"] if error == "MemoryError" else ["error", "stream"])
            assert f"{error}: 'mine'" in reply.traceback or f"{error}: mine" in reply.traceback
        notebook.ok("held.remove()")
        assert notebook.ok("print({'_showtraceback', 'showtraceback'} & {*vars(shell)})").stdout == "set()\nfirst\n"


class Shell:
    def __init__(self) -> None:
        self.shown: list[BaseException] = []

    def showtraceback(self, exc_tuple: tuple[type, BaseException, None]) -> None:
        self._showtraceback(*exc_tuple)

    def _showtraceback(self, kind: object, value: BaseException, lines: object) -> None:
        self.shown.append(value)


@pytest.mark.parametrize("replaced", [False, True])
def test_one_that_waits_is_shown_at_the_latest_when_it_is_removed(replaced: bool):
    shell, error = Shell(), ValueError("x")
    held = ShownTracebacks(shell, lambda _: True, lambda _: None)
    ours = shell._showtraceback
    if replaced:
        shell._showtraceback = lambda *lines: ours(*lines)  # type: ignore[method-assign]
    shell._showtraceback(ValueError, error, [])
    assert not shell.shown
    held.remove()
    assert shell.shown == [error]
    shell._showtraceback(ValueError, error, [])
    assert shell.shown == [error] * 2 and ("_showtraceback" in vars(shell)) is replaced


def test_an_error_is_trimmed_before_the_shell_formats_it():
    shell, trimmed = Shell(), list[BaseException]()
    held = ShownTracebacks(shell, lambda _: False, lambda error: trimmed.append(error) or error.args[1])
    first, second = ValueError("x"), KeyError("y")
    shell.showtraceback((ValueError, first, None))
    try:
        raise second
    except KeyError:
        shell.showtraceback((KeyError, second, None))
    assert shell.shown == trimmed == [first, second]
    held.remove()
    shell.showtraceback((ValueError, first, None))
    assert len(trimmed) == 2 and len(shell.shown) == 3 and "showtraceback" not in vars(shell)


def test_a_question_that_fails_shows_it_at_once():
    shell = Shell()
    held = ShownTracebacks(shell, lambda error: error.args[5], lambda _: None)
    shell._showtraceback(ValueError, ValueError(), [])
    held.show()
    assert len(shell.shown) == 1


def test_an_error_is_shown_again_with_its_new_text():
    from IPython.core.interactiveshell import InteractiveShell

    shown: list[str] = []
    shell = InteractiveShell()
    shell._showtraceback = lambda kind, value, lines: shown.append("\n".join(lines))  # type: ignore[method-assign]
    try:
        raise ValueError("old")
    except ValueError as error:
        error.args = ("new",)
        show_again(shell, error)
    assert len(shown) == 1 and "new" in shown[0] and "ValueError" in shown[0]


def test_a_cell_is_told_from_a_silent_request_and_a_widget(tmp_path):
    with kernel(tmp_path, "from memlab.torch_internals.shell import cell_executes\nseen = []") as notebook:
        asked = "seen.append(cell_executes(get_ipython()))"
        notebook.ok(asked)
        notebook.run(asked, silent=True)
        notebook.ok(f"get_ipython().kernel.comm_manager.register_target('asks', lambda comm, message: {asked})")
        content = {"comm_id": "1", "target_name": "asks", "data": {}}
        notebook.client.shell_channel.send(notebook.client.session.msg("comm_open", content))
        assert notebook.value("seen") == [True, False, False]
