"""Work and cells in a child process, with the options of the child and of the run in one call."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memlab.prediction.child import Child, ChildOutcome


def run(work: Any, around: Any = contextlib.nullcontext, **options: Any) -> ChildOutcome:
    """The outcome of `work(channel)`."""
    return Child(**options).run(work, around)


def fine(work: Any, **options: Any) -> ChildOutcome:
    """The outcome of `work()`, which asserts: its error is the test's."""
    outcome = run(lambda channel: work() or b"fine", limit_s=300, **options)
    assert outcome.error is None, "".join(outcome.error.traceback)
    assert (outcome.result, outcome.ended) == (b"fine", "")
    return outcome


def run_cell(
    shell: Any, text: str, around: Any = contextlib.nullcontext, above: str = "%%memtrack", **options: Any
) -> ChildOutcome:
    """The outcome of a cell."""
    return Child(**options).run_cell(shell, text, around, above)


@contextlib.contextmanager
def busy_threads(work: Callable[[], Any]) -> Iterator[None]:
    """Three threads of this process that work all the time."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            work()

    threads = [threading.Thread(target=busy) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def is_gone(pid: int) -> bool:
    """Whether a process ends within ten seconds; one that is dead and not waited for has no folder any more."""
    place, deadline = Path(f"/proc/{pid}/cwd"), time.monotonic() + 10
    while place.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not place.exists()
