"""Running the body of a notebook's cell in a child: prints, displays, last value and errors as the shell shows them.

Names that the cell binds stay in the child. There is no `input()`, and no widget; what a thread of the cell does after the
cell has ended is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import threading
from collections.abc import Callable
from typing import Any

from memlab.predictor.child.channel import Channel
from memlab.predictor.child.needed import of_cell
from memlab.predictor.child.outcome import Outcome
from memlab.predictor.child.parent import Heard, watch
from memlab.predictor.child.step import (
    Around,
    How,
    OnFrame,
    check_limit,
    chosen,
    forked,
    fresh,
    is_ours,
    printer,
    say,
    send_error,
)
from memlab.seams import shell as shells


def run_cell(
    shell: Any,
    text: str,
    around: Around = contextlib.nullcontext,
    limit_s: float | None = None,
    *,
    on_frame: OnFrame | None = None,
    how: How | None = None,
    above: str = "%%memtrack",
) -> Outcome:
    """Run a cell's body (the text below the line of the magic, which is `above`) in a child, within `around()`.

    `around` is called in the child, where `memlab.predictor.child.current()` is its channel; an error of the cell passes
    through its `__exit__`. Where its `with` value is a function, that is called after it, and the bytes it returns are the
    outcome's `result`, also when the cell raised.
    """
    check_limit(limit_s)
    heard = Heard(on_frame, lambda kind, content: shells.publish(shell, kind, content))

    if chosen(how) == "fork":
        make = forked(lambda channel: perform_cell(shell, text, above, around, channel))
    else:
        code, _ = shells.transform(shell, above, _dedented(text))
        make = fresh([around, None, text, above], _needed(code, shell), shell)
    try:
        return watch(make, heard, limit_s, "the predicted cell")
    except KeyboardInterrupt as interrupt:
        shells.show_without(interrupt, shell, is_ours)
        raise


def _needed(code: str, shell: Any) -> list[str]:
    """The names of the notebook that the cell reads; of text that is no Python none, the child says what is wrong."""
    try:
        return of_cell(code, shell.user_ns)
    except (SyntaxError, ValueError):
        return []


def perform_cell(shell: Any, text: str, above: str, around: Around, channel: Channel) -> None:
    """In the child: run the cell, and send what came of it."""
    funnel = shells.Funnel(
        shell, lambda kind, content: say(channel, kind, content), printer(channel), channel.log.started
    )
    try:
        finish, raised = _within(around, lambda: _execute(funnel, text, above, channel))
        if callable(finish):
            channel.writer.send("result", None, finish())
    except BaseException as error:  # of `around`, not of the cell
        send_error(channel, error, shell)
    else:
        _send_cell_error(channel, funnel, raised)
    others = [thread.name for thread in threading.enumerate() if _goes_on(thread)]
    if others:
        channel.note(
            f"When the cell ended, threads of it still ran: {', '.join(others)[:200]}. They were not waited for."
        )
    channel.writer.send("done", None)


def _goes_on(thread: threading.Thread) -> bool:
    return thread is not threading.current_thread() and not thread.name.startswith(("memlab", "asyncio_"))


def _within(around: Around, execute: Callable[[], BaseException | None]) -> tuple[Any, BaseException | None]:
    """Run the cell within the context, which gets the cell's error; the value of the `with`, and the error."""
    manager = around()
    finish = manager.__enter__()
    error = execute()
    try:
        if error is None:
            manager.__exit__(None, None, None)
        else:
            manager.__exit__(type(error), error, error.__traceback__)
    except BaseException as raised:
        if raised is not error:
            raise
    return finish, error


def _execute(funnel: shells.Funnel, text: str, above: str, channel: Channel) -> BaseException | None:
    shell = funnel.shell
    transformed, failed = shells.transform(shell, above, _dedented(text))
    funnel.number_the_cell(transformed)
    raw = f"# {above}\n{text}"
    channel.writer.send("file", shells.code_name(shell, transformed, raw))
    return asyncio.get_event_loop().run_until_complete(shells.execute(shell, raw, transformed, failed))


def _dedented(text: str) -> str:
    """The body without an indent that all of it has: IPython takes it away, but the line above hides the body from it."""
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text


def _send_cell_error(channel: Channel, funnel: shells.Funnel, error: BaseException | None) -> None:
    """The error with which the cell ended, as the shell has shown it; a usage error has no traceback.

    What was shown of a cell that ended well is an output (`%tb`, a magic that shows an error and goes on).
    """
    if error is not None:
        name, text, lines = funnel.error or (type(error).__name__, str(error), [])
        channel.writer.send("raised", {"name": name, "text": text, "traceback": lines})
    elif funnel.error is not None:
        name, text, lines = funnel.error
        say(channel, "error", {"ename": name, "evalue": text, "traceback": lines})
