"""Execute a Lab's run: by the caller of `lab.run()`, or in a thread after a press of Run.

A cell and a run never execute at the same time, or each would be in the other's figures.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from memlab.api.display import interrupt_main
from memlab.torch_internals import threads
from memlab.torch_internals.shell import cell_executes
from memlab.torch_internals.traceback import running_shell

GRACE_S = 1.0
"""How long a stop waits for the step to end before interrupting it."""
OnProgress = Callable[[str, int, int], None]
"""Called with what is being run, the steps done and their total."""


class Stopped(KeyboardInterrupt):
    """A requested stop, between two steps."""


class ExecutionLock:
    """Held by the cell that executes, or by the run of a Lab."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._cells = self._labs = 0
        self._run: Worker | None = None
        self._waiting: list[Worker] = []

    def cell_begins(self, *_: Any) -> None:
        """pre_run_cell: wait for the active run, or one that waited first; the notebook's interrupt button stops it."""
        try:
            self._wait_for_run()
        except KeyboardInterrupt:
            for run in (self._run, *self._waiting):
                if run is not None:
                    run.stop()
            with contextlib.suppress(KeyboardInterrupt):
                self._wait_for_run()
        with self._changed:
            self._cells += 1

    def _wait_for_run(self) -> None:
        with self._changed:
            # In a nested cell the run waits for the outer.
            while self._run is not None or (self._waiting and not self._cells):
                self._changed.wait(0.2)  # with short timeouts: signals are only handled in between

    def cell_ends(self, *_: Any) -> None:
        """post_run_cell."""
        with self._changed:
            self._cells = max(0, self._cells - 1)  # a Lab may have been opened, or closed, without notice of its cell
            self._changed.notify_all()

    @contextlib.contextmanager
    def cell_waits(self) -> Iterator[None]:
        """A context in which the cell that executes, if this is its thread, is out of the way of a run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with self._changed:
            cells, self._cells = self._cells, 0
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._cells = cells if self._labs else 0  # nobody would tell the end of the cell

    @contextlib.contextmanager
    def held_by(self, worker: Worker) -> Iterator[None]:
        """Wait until no cell and no other run executes, then hold the lock for this run.

        It goes before cells that have not begun, or it would wait for all that are queued.
        """
        with self._changed:
            self._waiting.append(worker)
            worker.is_queued.set()
            try:
                while self._cells or self._run is not None:
                    worker.check()
                    self._changed.wait(0.1)
                self._run = worker
            finally:
                self._waiting.remove(worker)
                self._changed.notify_all()
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

    @contextlib.contextmanager
    def free(self) -> Iterator[bool]:
        """Whether a run could start at once. No cell and no run begins within the context."""
        with self._changed:
            yield self.is_free

    def lab_opens(self) -> None:
        """A Lab with controls opens; the first one registers the cell events, and the cell that opens it counts already."""
        self._labs += 1
        if self._labs == 1 and (shell := running_shell()) is not None:
            shell.events.register("pre_run_cell", self.cell_begins)
            shell.events.register("post_run_cell", self.cell_ends)
            with self._changed:
                self._cells = int(cell_executes(shell))

    def lab_closes(self) -> None:
        """A Lab has closed; the last one unregisters the cell events."""
        self._labs -= 1
        if self._labs == 0 and (shell := running_shell()) is not None:
            for event, callback in (("pre_run_cell", self.cell_begins), ("post_run_cell", self.cell_ends)):
                with contextlib.suppress(ValueError):
                    shell.events.unregister(event, callback)
            self._cells = 0


execution_lock = ExecutionLock()


class Worker:
    """One run of a Lab: `start` it in a thread, or `call` it here; `stop` it from anywhere.

    `work` gets this worker; `ended` is called once in any case.
    """

    def __init__(self, work: Callable[[Worker], None], ended: Callable[[Worker], None]) -> None:
        self._work, self._ended = work, ended
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.is_queued = threading.Event()
        self._working_thread = 0  # its ident; 0 before and after the work
        self._thread: threading.Thread | None = None
        self._interrupter: threading.Timer | None = None
        self._is_interrupted = False  # the thread may not have noticed yet

    @property
    def is_working(self) -> bool:
        """Whether the work has started and not ended."""
        return self._working_thread != 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop was requested."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Raise Stopped if a stop was requested; called between steps."""
        if self._stopped.is_set():
            raise Stopped

    def start(self) -> None:
        """Work in a thread, whose output goes to the cell that started it."""
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._in_thread,), name="memlab lab", daemon=True)
        self._thread.start()
        self.is_queued.wait()

    def _in_thread(self) -> None:
        try:
            with contextlib.suppress(KeyboardInterrupt), execution_lock.held_by(self):
                self._call_work()
        finally:
            self._ended(self)

    def call(self) -> None:
        """Work here, and return when it has ended."""
        try:
            self._call_work()
        finally:
            self._ended(self)

    def _call_work(self) -> None:
        with self._lock:
            self._working_thread = threading.get_ident()
        try:
            self._work(self)
        finally:
            with self._lock:
                self._working_thread = 0
            # No interrupt may arrive after the work: a pending one is withdrawn.
            if self._interrupter is not None:
                self._interrupter.cancel()
                self._interrupter.join()
            if self._is_interrupted:
                threads.take_back()

    def stop(self) -> None:
        """Request a stop: after the current step, or inside it if it takes long."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            if self._working_thread and self._working_thread != threading.get_ident():
                self._interrupter = threading.Timer(GRACE_S, self._interrupt)
                self._interrupter.name, self._interrupter.daemon = "memlab lab's stop", True
                self._interrupter.start()

    def _interrupt(self) -> None:
        with self._lock:
            if self._working_thread == threading.main_thread().ident:
                interrupt_main()
            elif self._working_thread:
                self._is_interrupted = True
                threads.break_into(self._working_thread, KeyboardInterrupt)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while thread.is_alive() and (until is None or time.monotonic() < until):
            thread.join(0.2)
        return not thread.is_alive()
