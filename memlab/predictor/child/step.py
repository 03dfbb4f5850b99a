"""Running a piece of work in a fenced child: `run(work)` brings back the bytes that it returned, and how it went."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from memlab.errors import PredictionError
from memlab.predictor.child.channel import Channel
from memlab.predictor.child.outcome import Outcome
from memlab.predictor.child.parent import Child, Heard, watch
from memlab.seams import shell as shells
from memlab.seams.traceback import running_shell

How = Literal["fork", "fresh"]
Around = Callable[[], AbstractContextManager[Any]]
OnFrame = Callable[[dict[str, Any]], None]
_HERE = str(Path(__file__).resolve().parents[2])


def run(
    work: Callable[[Channel], bytes],
    *,
    limit_s: float | None = None,
    on_frame: OnFrame | None = None,
    around: Around = contextlib.nullcontext,
    how: How | None = None,
    what: str = "the predicted step",
) -> Outcome:
    """Run `work(channel)` in a fenced child of this process; the parent stays as it is.

    What the work returns has to be bytes, and comes back as `result`; `channel.send({...})` hands plain values to
    `on_frame` meanwhile; what it prints and displays appears here as it comes. Where nothing can be forked (`how="fresh"`,
    and by itself outside of Linux) a new process gets what the work names, and anything that cannot be sent is refused
    with its name. `around()` is entered in the child before the work, and before a fresh process makes what it was sent.
    """
    if not callable(work):
        raise PredictionError(f"a child needs a function to run, and not {type(work).__name__}.")
    check_limit(limit_s)
    shell = running_shell()
    heard = Heard(on_frame, None if shell is None else lambda kind, content: shells.publish(shell, kind, content))
    if chosen(how) == "fork":
        make = forked(lambda channel: perform(work, around, channel))
    else:
        make = fresh([around, work, None, None], (), None)
    try:
        return watch(make, heard, limit_s, what)
    except KeyboardInterrupt as interrupt:
        if shell is not None:
            shells.show_without(interrupt, shell, is_ours)
        raise


def forked(work: Callable[[Channel], None]) -> Callable[[Path], Child]:
    """How to make a forked child that does this."""
    from memlab.predictor.child.fork import ForkedChild

    return lambda scratch: ForkedChild(work, scratch)


def fresh(first: list[Any], names: Iterable[str], shell: Any) -> Callable[[Path], Child]:
    """How to make a fresh child of what it gets; what cannot be sent is refused before there is one."""
    from memlab.predictor.child.fresh import FreshChild
    from memlab.predictor.child.sending import send

    payload = send(first, names, vars(sys.modules["__main__"]) if shell is None else shell.user_ns)
    display = None if shell is None else shells.look(shell)
    return lambda scratch: FreshChild(payload, scratch, display)


def chosen(how: str | None) -> How:
    """Fork on Linux: elsewhere libraries that a kernel has loaded do not survive it (macOS), or there is none (Windows)."""
    if how not in (None, "fork", "fresh"):
        raise PredictionError(f"a child is made by 'fork' or 'fresh', and not by {how!r}.")
    if how == "fork" and sys.platform != "linux":
        raise PredictionError(f"a child cannot be forked on {sys.platform!r}; use how='fresh'.")
    return "fresh" if how == "fresh" or sys.platform != "linux" else "fork"


def check_limit(limit_s: float | None) -> None:
    """A limit is a number of seconds above zero."""
    if limit_s is not None and not limit_s > 0:
        raise PredictionError(f"the limit of a child is a number of seconds above 0, and not {limit_s!r}.")


def perform(work: Callable[[Channel], bytes], around: Around, channel: Channel) -> None:
    """In the child: do the work, and send what came of it."""
    shell = running_shell()
    if shell is not None:
        shells.Funnel(shell, lambda kind, content: say(channel, kind, content), printer(channel), channel.log.started)
    try:
        with around():
            payload = work(channel)
        if not isinstance(payload, bytes):
            raise PredictionError(f"work in a child has to return bytes, and not {type(payload).__name__}.")
    except BaseException as error:
        send_error(channel, error, shell)
    else:
        channel.writer.send("result", None, payload)
    channel.writer.send("done", None)


def say(channel: Channel, kind: str, content: Any) -> None:
    """Hand an output to the parent."""
    channel.writer.send("shown", {"kind": kind, "content": content})


def printer(channel: Channel) -> Callable[[str, str], None]:
    """Hands text to the parent that came by another way than the standard streams."""
    return lambda name, text: channel.writer.send("text", [name, text])


def send_error(channel: Channel, error: BaseException, shell: Any) -> None:
    """Send an error as texts."""
    try:
        text = str(error)
    except Exception:
        text = ""
    lines = shells.formatted(shell, error, is_ours)
    channel.writer.send("raised", {"name": type(error).__name__, "text": text, "traceback": lines})


def is_ours(file: str) -> bool:
    """Whether code of this file belongs to memlab."""
    return file.startswith(_HERE)
