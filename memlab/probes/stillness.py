"""Keeping the interpreter still for a moment: no other thread, no garbage collection."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep the other Python threads waiting for the few milliseconds that a look at all of something takes."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking hundreds of thousands of new entries again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
