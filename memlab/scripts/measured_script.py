"""A script while it is recorded: from the import of torch, or after some optimizer steps, to its end or for some steps.

Everything is written to stderr and to files; the script's own output, arguments, signals and exit code stay its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from memlab.scripts.after_torch import AfterTorch
from memlab.scripts.live_line import LiveLine
from memlab.scripts.recording import OVER_BUDGET, Recording, Wanted, say
from memlab.scripts.script import Script, frame_of_script, show_as_python
from memlab.scripts.signals import Signals
from memlab.units import format_bytes, format_seconds, number_of

if TYPE_CHECKING:
    from memlab.api.display import LevelNow


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
