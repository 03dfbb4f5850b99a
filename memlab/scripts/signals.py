"""SIGUSR1 and SIGTERM of a measured script, as long as it has no handlers of its own for them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

HANGS_S = 5.0
"""A script that stays so long in one call of C after a SIGTERM ends without a report."""


class Signals:
    """Calls `report` at SIGUSR1; at SIGTERM `ended`, after which the process ends by the signal, as without a handler.

    Python calls handlers between its own operations, so a script that hangs in C would survive a SIGTERM: a thread ends it.
    """

    def __init__(self, report: Callable[[], None], ended: Callable[[], None]) -> None:
        self._ended = ended
        # Bound once: `getsignal` gives back this very object.
        self._handlers: dict[int, Callable[[int, Any], None]] = {signal.SIGTERM: self._end}
        if hasattr(signal, "SIGUSR1"):
            self._handlers[signal.SIGUSR1] = lambda number, frame: report()
        self._is_ending = threading.Event()
        self._woken = -1

    def start(self) -> None:
        """Set the handlers; only where the signal would end the script, and if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handler)
        if hasattr(os, "register_at_fork") and self._is_ours(signal.SIGTERM):
            os.register_at_fork(after_in_child=self.stop)
            self._watch()

    def stop(self) -> None:
        """Restore what is still as `start` left it."""
        for number in self._handlers:
            if self._is_ours(number):
                signal.signal(number, signal.SIG_DFL)
        woken, self._woken = self._woken, -1
        if woken >= 0:
            with contextlib.suppress(ValueError):  # its descriptor was closed by the script
                current = signal.set_wakeup_fd(-1)
                if current != woken:
                    signal.set_wakeup_fd(current)
            with contextlib.suppress(OSError):
                os.close(woken)  # which ends the thread

    def _is_ours(self, number: int) -> bool:
        return signal.getsignal(number) is self._handlers[number]

    def _end(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_ending.set()
        try:
            self._ended()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        """A thread that hears of signals at once, unless the script already has something that does."""
        reading, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        before = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        if before >= 0:
            signal.set_wakeup_fd(before)
            os.close(self._woken)
            os.close(reading)
            self._woken = -1
            return
        threading.Thread(target=self._wait, args=(reading,), name="memlab-signals", daemon=True).start()

    def _wait(self, reading: int) -> None:
        while heard := os.read(reading, 64):
            if signal.SIGTERM in heard and self._is_ours(signal.SIGTERM) and not self._is_ending.wait(HANGS_S):
                with contextlib.suppress(OSError):
                    os.write(2, b"memlab run: ended by SIGTERM in a call that did not return; there is no report\n")
                import ctypes

                ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, None)  # signal.signal is for the main thread
                os.kill(os.getpid(), signal.SIGTERM)
        os.close(reading)
