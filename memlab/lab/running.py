"""Who runs a Lab's work: the caller of `lab.run()`, or a thread of its own after a press of Run, so that Stop is heard.

A cell and a run never go at once: cells wait until a run has ended, and a run that was asked for waits for the cell.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from memlab.seams import threads
from memlab.session.live import interrupt_main
from memlab.session.show import ipython

GRACE_S = 1.0
"""How long a stop waits for a step to end before it breaks into it."""


class Stopped(KeyboardInterrupt):
    """The end that somebody asked for, between two steps."""


class Turn:
    """Whose turn it is: cells of the notebook, or the run of a Lab."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cells = 0
        self._run: Worker | None = None
        self._labs = 0

    def cell_begins(self, *_: Any) -> None:
        """pre_run_cell: wait for the run that goes on; the notebook's interrupt button stops it."""
        try:
            self._wait_for_run()
        except KeyboardInterrupt:
            if (run := self._run) is not None:
                run.stop()
            with contextlib.suppress(KeyboardInterrupt):
                self._wait_for_run()
        with self._changed:
            self._cells += 1

    def _wait_for_run(self) -> None:
        with self._changed:
            while self._run is not None:
                self._changed.wait(0.2)  # in pieces: a signal is only heard in between

    def cell_ends(self, *_: Any) -> None:
        """post_run_cell."""
        with self._changed:
            self._cells = max(0, self._cells - 1)  # the cell that opened the Lab was not seen to begin
            self._changed.notify_all()

    @contextlib.contextmanager
    def taken(self, worker: Worker) -> Iterator[None]:
        """A run's turn; it waits until no cell and no other run is at work."""
        with self._changed:
            while self._cells or self._run is not None:
                worker.check()
                self._changed.wait(0.1)
            self._run = worker
        try:
            yield
        finally:
            with self._changed:
                self._run = None
                self._changed.notify_all()

    @property
    def is_free(self) -> bool:
        """Whether a run could start at once."""
        return not self._cells and self._run is None

    def enter(self) -> None:
        """A Lab with controls opens; with the first of them the cells are watched."""
        self._labs += 1
        if self._labs == 1 and (shell := ipython()) is not None:
            shell.events.register("pre_run_cell", self.cell_begins)
            shell.events.register("post_run_cell", self.cell_ends)

    def leave(self) -> None:
        """A Lab has closed; with the last of them nothing is watched any more."""
        self._labs -= 1
        if self._labs == 0 and (shell := ipython()) is not None:
            for event, callback in (("pre_run_cell", self.cell_begins), ("post_run_cell", self.cell_ends)):
                with contextlib.suppress(ValueError):
                    shell.events.unregister(event, callback)
            self._cells = 0


the_turn = Turn()


class Worker:
    """One run of a Lab: `start` it in a thread, or `call` it here; `stop` it from anywhere.

    `work` gets this worker; `ended` is called once, whatever came of it.
    """

    def __init__(self, work: Callable[[Worker], None], ended: Callable[[Worker], None]) -> None:
        self._work, self._ended = work, ended
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._inside = 0
        """The thread that works now; 0 before and after."""
        self._thread: threading.Thread | None = None
        self._breaker: threading.Timer | None = None
        self._has_broken = False
        """Whether the thread was broken into: it may not have noticed yet."""

    @property
    def is_stopped(self) -> bool:
        """Whether somebody asked for the end."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Called between steps: where the end was asked for, it ends here."""
        if self._stopped.is_set():
            raise Stopped

    def start(self) -> None:
        """Work in a thread; what it says goes to the cell that it was started from, and it ends with the kernel."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._threaded,), name="memlab lab", daemon=True)
        self._thread.start()

    def _threaded(self) -> None:
        try:
            with contextlib.suppress(KeyboardInterrupt), the_turn.taken(self):
                self._called()
        finally:
            self._ended(self)

    def call(self) -> None:
        """Work here, and come back when it has ended."""
        try:
            self._called()
        finally:
            self._ended(self)

    def _called(self) -> None:
        with self._lock:
            self._inside = threading.get_ident()
        try:
            self._work(self)
        finally:
            with self._lock:
                self._inside = 0
            self._end_break()

    def _end_break(self) -> None:
        """No break may come after the work: one that was not noticed yet is withdrawn."""
        if self._breaker is not None:
            self._breaker.cancel()
            self._breaker.join()
        if self._has_broken:
            threads.take_back()

    def stop(self) -> None:
        """Ask for the end: after the step that goes on, or inside of it where it lasts."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            if self._inside and self._inside != threading.get_ident():
                self._breaker = threading.Timer(GRACE_S, self._break)
                self._breaker.name, self._breaker.daemon = "memlab lab's stop", True
                self._breaker.start()

    def _break(self) -> None:
        with self._lock:
            if not self._inside:
                return
            if self._inside == threading.main_thread().ident:
                interrupt_main()
            else:
                self._has_broken = True
                threads.break_into(self._inside, KeyboardInterrupt)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while thread.is_alive() and (until is None or time.monotonic() < until):
            thread.join(0.2)
        return not thread.is_alive()
