"""A script while it is recorded: from the import of torch, or after some optimizer steps, to its end or for some steps.

Everything is written to stderr and to files; the script's own output, arguments, signals and exit code stay its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memlab.scripts.live_line import LiveLine
from memlab.scripts.recording import OVER_BUDGET, Recording, Wanted, say
from memlab.scripts.script import Script, frame_of_script, show_as_python
from memlab.units import format_bytes, format_seconds, number_of

if TYPE_CHECKING:
    from memlab.api.display import LevelNow


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


class AfterTorch(MetaPathFinder):
    """A finder that finds only torch, once, and calls `then` when it has been imported.

    Scripts set environment variables before they import torch, which reads some of them while it is imported; and some never
    import it. So `memlab run` does not import it for them.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def start(self) -> None:
        """Wait for torch; if it was imported before, call at once."""
        if "torch" in sys.modules:
            self._then()
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of torch, whose loader calls us; None for everything else."""
        if fullname != "torch":
            return None
        self.stop()
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                del loader.exec_module  # the loader stays on the module, as it was
                execute(module)
                self._then()

            loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


running: MeasuredScript | None = None
"""The script that this process runs."""


class MeasuredScript:
    """One script, measured in this process."""

    def __init__(self, script: Script, wanted: Wanted) -> None:
        self.script, self.wanted = script, wanted
        self.recording = Recording(wanted, "memlab run")
        self._line: LiveLine | None = None
        self._signals = Signals(lambda: self.recording.report_part(frame_of_script()), self._terminated)
        self._steps: Counter[int] = Counter()
        self._hooks: list[Any] = []

    def execute(self) -> int:
        """Run the script to its end; its own errors and exits are raised again, with the report before them."""
        global running
        running = self
        waiting = AfterTorch(self._has_torch)
        self._line = None if self.wanted.quiet else LiveLine.if_possible()
        self.recording.on_level = self.show_level if self._line is not None else None
        waiting.start()
        try:
            self.script.run()
        except BaseException as error:
            self._ended(error)
            show_as_python(error)
            raise
        finally:
            waiting.stop()
        self._ended(None)
        return OVER_BUDGET if self.recording.is_over_budget else 0

    def _has_torch(self) -> None:
        """Torch was imported: measure from here, or count the steps that come before."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self.recording.begin(frame_of_script())
        self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        self._signals.start()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the steps of this optimizer by a hook of its own: those that are called for all optimizers cannot be changed
        by one of them, and a measurement that starts or stops changes them."""
        if id(optimizer) not in self._steps:
            self._steps[id(optimizer)] = 0
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self.count
        self._steps[id(optimizer)] += 1
        if self.count == before:
            return
        self.recording.stepped(self.count, frame_of_script())
        has_measured = self.wanted.steps is not None and self.count >= self.wanted.skip + self.wanted.steps
        if self._line is not None and self.recording.is_here and has_measured:
            self._line.close()

    @property
    def count(self) -> int:
        """The steps of the optimizer that has taken most of them."""
        return max(self._steps.values(), default=0)

    def show_level(self, now: LevelNow) -> None:
        """The live line, from another thread."""
        if self._line is None:
            return
        from memlab.api.provenance import remark_here  # late: nothing is imported before the script

        peak = f"peak {'' if now.peak_is_exact else '≥ '}{format_bytes(now.peak_bytes)}"
        peak += f" of {format_bytes(now.capacity_bytes)}" if now.capacity_bytes else ""
        parts = [f"memlab {now.label} {format_bytes(max(now.allocated_bytes, 0))} now", peak]
        parts += [f"step {self.count}"] if self.count else []
        step_s, remark = self.recording.times.recent_s, remark_here([now.label])
        parts += [f"{format_seconds(step_s)}/step"] if step_s is not None and not remark else []
        parts += [remark] if remark else []
        self._line.show(" · ".join(parts))

    def _terminated(self) -> None:
        """SIGTERM: report what was measured; then the script ends."""
        if not self.wanted.quiet:
            say("memlab run: ended by SIGTERM; measured until then:")
        self.recording.ended_by = "SIGTERM"
        self._ended(None)

    def _ended(self, error: BaseException | None) -> None:
        if not self.recording.is_here:
            return
        for hook in self._hooks:
            hook.remove()
        self._signals.stop()
        if self._line is not None:
            self._line.close()
        self.recording.end(error, self._why_nothing())

    def _why_nothing(self) -> str:
        if "torch" not in sys.modules:
            return "the script did not import torch."
        if self.wanted.skip > self.count:
            return f"--skip {self.wanted.skip}, and it took {number_of(self.count, 'optimizer step')}."
        return "it ended before it could begin."
