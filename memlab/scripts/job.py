"""A script while it is recorded: from the import of torch, or after some optimizer steps, to its end or for some steps.

Everything is written to stderr and to files; the script's own output, arguments, signals and exit code stay its own.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from typing import Any

from memlab.scripts.after_torch import AfterTorch
from memlab.scripts.recording import Recording, Wanted
from memlab.scripts.script import Script, frame_of_script, show_as_python
from memlab.units import number_of

OVER_BUDGET = 1
"""The exit status of a script that ended well and used more than its budget."""


class MeasuredScript:
    """One script, measured in this process."""

    def __init__(self, script: Script, wanted: Wanted) -> None:
        self.script, self.wanted = script, wanted
        self.recording = Recording(wanted, "memlab run")
        self._steps: Counter[int] = Counter()
        self._hooks: list[Any] = []

    def execute(self) -> int:
        """Run the script to its end; its own errors and exits are raised again, with the report before them."""
        waiting = AfterTorch(self._has_torch)
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
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._report_now)  # which would otherwise end the script

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the steps of this optimizer by a hook of its own: those that are called for all optimizers cannot be changed
        by one of them, and a measurement that starts or stops changes them."""
        if id(optimizer) not in self._steps:
            self._steps[id(optimizer)] = 0
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps[id(optimizer)] += 1
        self.recording.stepped(self.count, frame_of_script())

    @property
    def count(self) -> int:
        """The steps of the optimizer that has taken most of them."""
        return max(self._steps.values(), default=0)

    def _report_now(self, number: int, frame: Any) -> None:
        """SIGUSR1: report what was measured so far, and go on with a new part."""
        self.recording.report_part(frame_of_script())

    def _ended(self, error: BaseException | None) -> None:
        if self.recording.is_here:
            for hook in self._hooks:
                hook.remove()
            self.recording.end(error, self._why_nothing())

    def _why_nothing(self) -> str:
        if "torch" not in sys.modules:
            return "the script did not import torch."
        if self.wanted.skip > self.count:
            return f"--skip {self.wanted.skip}, and it took {number_of(self.count, 'optimizer step')}."
        return "it ended before it could begin."
