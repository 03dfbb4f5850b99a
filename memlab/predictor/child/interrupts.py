"""Ctrl-C, held back for the moments in which half of a thing is done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within it no Ctrl-C raises anything; one that came is delivered at the end, to whoever handled it before.

    Only the main thread handles signals, so in another thread there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[FrameType | None] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        # None: a handler that was not set by Python cannot be put back by Python; leave ours out of the way.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came and callable(before):
            before(signal.SIGINT, came[0])
        elif came and before is signal.SIG_DFL:
            signal.raise_signal(signal.SIGINT)
