"""The work of a child: a function, or the body of a cell with prints, displays, last value and errors as in the shell.

Names that a cell binds stay in the child. There is no `input()`, and there are no widgets; threads that
outlive the cell are not waited for.
"""

from __future__ import annotations

import asyncio
import functools
import textwrap
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memlab.errors import PredictionError
from memlab.prediction.child.channel import STARTED, Channel
from memlab.torch_internals import shell as shells
from memlab.torch_internals.frames import OWN_FILES
from memlab.torch_internals.traceback import running_shell

Around = Callable[[], AbstractContextManager[Any]]


def is_ours(file: str) -> bool:
    """Whether code of this file belongs to memlab."""
    return file.startswith(OWN_FILES)


def dedented(text: str) -> str:
    """The body without common indentation: IPython removes it, but the line above hides the body from it."""
    return textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text


def perform(work: Callable[[Channel], bytes], around: Around, channel: Channel) -> None:
    """Do the work, and send its result or error."""
    shell = running_shell()
    if shell is not None:
        _funnel(shell, channel)
    try:
        with around():
            payload = work(channel)
        if not isinstance(payload, bytes):
            raise PredictionError(f"work in a child has to return bytes, got {type(payload).__name__}.")
    except BaseException as error:
        _send_error(channel, error, shell)
    else:
        channel.writer.send("result", None, payload)
    channel.writer.send("done", None)


def _funnel(shell: Any, channel: Channel) -> shells.Funnel:
    return shells.Funnel(
        shell,
        lambda kind, content: channel.writer.send("shown", {"kind": kind, "content": content}),
        lambda name, text: channel.writer.send("text", [name, text]),
        functools.partial(channel.log.write, STARTED),
    )


def _send_error(channel: Channel, error: BaseException, shell: Any) -> None:
    try:
        text = str(error)
    except Exception:
        text = ""
    lines = shells.formatted(shell, error, is_ours)
    channel.writer.send("raised", {"name": type(error).__name__, "text": text, "traceback": lines})


def perform_cell(shell: Any, text: str, above: str, around: Around, channel: Channel) -> None:
    """Run the cell within the context, which gets its error, and send its output and how it ended."""
    funnel = _funnel(shell, channel)
    try:
        manager = around()
        finish = manager.__enter__()
        error = _execute(funnel, text, above, channel)
        said = _said(error)
        raised_or_not = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        try:
            manager.__exit__(*raised_or_not)
        except BaseException as raised:
            if raised is not error:
                raise
        if error is not None and _said(error) != said:  # what is around has added to it, after the shell had shown it
            shells.show_again(shell, error)
        if callable(finish):
            channel.writer.send("result", None, finish())
    except BaseException as failed:  # of `around`, not of the cell
        _send_error(channel, failed, shell)
    else:
        # As shown by the shell; a usage error has no traceback.
        name, shown, lines = funnel.error or (type(error).__name__, str(error), [])
        if error is not None:
            channel.writer.send("raised", {"name": name, "text": shown, "traceback": lines})
        elif funnel.error is not None:  # an output (`%tb`, a magic that shows an error and goes on)
            content = {"ename": name, "evalue": shown, "traceback": lines}
            channel.writer.send("shown", {"kind": "error", "content": content})
    threads = [one for one in threading.enumerate() if one is not threading.current_thread()]
    if others := [one.name for one in threads if not one.name.startswith(("memlab", "asyncio_"))]:
        listed = ", ".join(others)[:200]
        channel.note(f"When the cell ended, threads of it still ran: {listed}. They were not waited for.")
    channel.writer.send("done", None)


def _said(error: BaseException | None) -> tuple[Any, ...]:
    """The text of an error, as far as it can be added to."""
    return () if error is None else (error.args, tuple(getattr(error, "__notes__", ())))


def _execute(funnel: shells.Funnel, text: str, above: str, channel: Channel) -> BaseException | None:
    shell = funnel.shell
    transformed, failed = shells.transform(shell, above, dedented(text))
    funnel.number_the_cell(transformed)
    raw = f"# {above}\n{text}"
    channel.writer.send("file", shells.code_name(shell, transformed, raw))
    return asyncio.get_event_loop().run_until_complete(shells.execute(shell, raw, transformed, failed))
