"""The memory of a training under a trainer: figures for rows of the trainer's log, and a page if memory runs out.

Before the first step one can be predicted on a card, from the trainer's model, first batch and optimizer. It runs in a child
process on tensors without data; what would be predicted wrongly is refused, in one line.

Two measurements run: one of the whole training, for the page, and one from each row of the log to the next, for the figures.
Both are bounded in memory, and the second in time: rows that come too fast share their figures.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memlab.errors import MemlabError
from memlab.scripts import measured_script
from memlab.scripts.recording import Recording, Wanted, folder, say
from memlab.scripts.script import frame_of_script
from memlab.units import number_of, one_line, parse_bytes
from memlab.workloads.nested import mapped

if TYPE_CHECKING:
    from memlab.api.prediction import Prediction
    from memlab.api.run import Run
    from memlab.api.track import Track


ROW = "memory"
"""What the names of figures begin with in rows about steps."""
MAX_MODULES = 40
"""At most so many modules get figures: new ones among the largest are added to those of earlier rows."""


@dataclass(frozen=True, slots=True)
class CallbackOptions:
    """The options of a callback, checked."""

    wanted: Wanted
    modules: int
    overhead: float | None
    card: str | None


class MeasuredTraining:
    """One training, measured in this process; under `memlab run`, which leaves a page itself, only for the log."""

    def __init__(self, options: CallbackOptions, device: str | None, model: Any = None) -> None:
        self.options = options
        self.device = options.wanted.device or device
        self.recording = Recording(options.wanted, "memlab", self.device)
        self.recording.model = None if model is None else (model, type(model).__name__)
        self._has_page = options.wanted.out is not None or measured_script.running is None
        self._window: Track | None = None
        self._step = self._taken = 0
        self._ends: list[tuple[int, int]] = []
        self._modules: dict[str, None] = {}
        self._categories: dict[str, None] = {}
        self._cost_s = self._since_s = 0.0
        self._rows = self._peak_bytes = 0
        self._highest: dict[str, int] = {}

    @property
    def run(self) -> Run | None:
        """The run of the whole training, once it has ended."""
        return self.recording.run

    def begin(self) -> None:
        """The training begins."""
        if self._has_page:
            self.recording.begin(frame_of_script())
        if self.options.wanted.skip == 0 and not self.recording.has_failed:
            with self.recording.harmless():
                self._open()

    def stepped(self, step: int) -> None:
        """An optimizer step ended, whose number the trainer gives."""
        self._step, self._taken = step, self._taken + 1
        if not self.recording.is_here:
            return
        self._ends.append((time.time_ns(), step))
        if self._has_page:
            self.recording.stepped(self._taken, frame_of_script())
        if self._taken == self.options.wanted.skip and self._window is None and not self.recording.has_failed:
            with self.recording.harmless():
                self._open()

    def row(self, prefix: str = ROW, is_last: bool = False, of_all: bool = False) -> dict[str, int]:
        """The figures since the last row that had some, by flat names that begin with the prefix; {} if it is too soon.

        Sizes are bytes; those by category and module are of the moment of the peak. It is never too soon for the last row.
        With `of_all` the figures are those of the highest peak of the training.
        """
        if self._window is None or not self.recording.is_here:
            return {f"{prefix}/{name}": count for name, count in self._highest.items()} if of_all else {}
        if prefix == ROW and not self._ends:  # no step was measured since
            return {}
        overhead, since_s = self.options.overhead, time.monotonic() - self._since_s
        if self._rows and not is_last and overhead is not None and since_s * overhead < self._cost_s:
            return {}
        found: dict[str, int] = {}
        with self.recording.harmless():
            begin_s = time.monotonic()
            run = self._close()
            if not self._rows and run.trace.remark:  # rows of a log have numbers only
                say(f"memlab: the figures in the log are of a {run.trace.remark}.")
            found, peak_bytes = self._figures(run)
            if peak_bytes > self._peak_bytes or not self._rows:
                self._highest, self._peak_bytes = found, peak_bytes
            found = self._highest if of_all else found
            self._rows += 1
            wanted = self.options.wanted
            if wanted.steps is None or self._taken < wanted.skip + wanted.steps:
                self._open()
            self._since_s = time.monotonic()
            self._cost_s = self._since_s - begin_s
        return {f"{prefix}/{name}": count for name, count in found.items()}

    def end(self, error: BaseException | None = None) -> None:
        """The training has ended; call it while the error, if there is one, exists."""
        if not self.recording.is_here:
            return
        with self.recording.harmless():
            if self._window is not None:
                self._close()
        if self._has_page:
            why = f"skip={self.options.wanted.skip}, and there was {number_of(self._taken, 'optimizer step')}."
            self.recording.end(error, why, is_quiet=True)

    def _open(self) -> None:
        from memlab.api.track import Options, Track

        window = Track(Options(f"{self.options.wanted.name} since step {self._step}", device=self.device, show=False))
        window.is_kept = False
        window.start(frame_of_script())
        self._window = window
        if self.recording.model is not None:
            window.know(*self.recording.model)
        del self._ends[:]

    def _close(self) -> Run:
        window, self._window = self._window, None
        assert window is not None
        window.stop()
        return window.run

    def _figures(self, run: Run) -> tuple[dict[str, int], int]:
        """The figures of a run, and its peak."""
        from memlab.analysis.breakdown import breakdown
        from memlab.analysis.peak import peak

        trace = run.trace
        peaks = {device.index: peak(trace, device.index) for device in trace.made_by.devices}
        if not peaks:
            return {}, 0
        device = max(peaks, key=lambda one: peaks[one].low_bytes)
        top = peaks[device]
        found = {f"peak_allocated_{'' if top.is_exact else 'at_least_'}bytes": top.low_bytes}
        if device >= 0:
            reserved = peak(trace, device, "reserved")
            found[f"peak_reserved_{'' if reserved.is_exact else 'at_least_'}bytes"] = reserved.low_bytes
        # In which step it was: the first one that ended after it, if it was not after all of them.
        ended = bisect_left(self._ends, (round(trace.made_by.started_at_s * 1e9) + top.time_ns, 0))
        if top.time_ns >= 0 and ended < len(self._ends):
            found["peak_step"] = self._ends[ended][1]
        try:
            shares = {by: breakdown(trace, device, by, at=top) for by in ("category", "module")}
        except MemlabError:
            return found, top.low_bytes  # what held the peak is unknown: its events were lost
        self._categories |= dict.fromkeys(shares["category"])
        found |= {f"category/{name}_bytes": shares["category"].get(name, 0) for name in self._categories}
        known = set(trace.texts["module"])
        largest = [name for name in shares["module"] if name in known][: self.options.modules]
        self._modules |= dict.fromkeys(name for name in largest if len(self._modules) < MAX_MODULES)
        found |= {f"module/{name}_bytes": shares["module"].get(name, 0) for name in self._modules}
        return found, top.low_bytes


def needs(module: str, package: str) -> ImportError:
    """The error of an integration whose library is not installed."""
    return ImportError(f"{module} needs {package}, which is not installed: pip install {package}.", name=package)


class MeasuringCallback:
    """What the callbacks of all trainers have: their options, and the training that they measure."""

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        name: str = "training",
        device: str | None = None,
        lines: bool = False,
        shapes: bool = False,
        budget: str | int | None = None,
        skip: int = 0,
        steps: int | None = None,
        modules: int = 5,
        overhead: float | None = 0.05,
        predict: str | None = None,
    ) -> None:
        """`out` is a folder for the run and its page; `name` their name; `device` what is measured (default: the Trainer's).

        `lines` and `shapes` record more; `budget` ("20GiB") says in one line if the peak was higher; `skip` and `steps` choose
        optimizer steps; `modules` is how many modules get figures; at most the share `overhead` of the time goes into figures, so
        that rows that come faster have none (None: every row has). `predict` ("RTX 4060") predicts the training step before the
        first. MemlabError in one line if one of them is wrong.
        """
        if not 0 <= modules <= MAX_MODULES:
            raise MemlabError(
                f"modules is the number of modules with figures, 0 to {MAX_MODULES}, got {modules!r:.80}."
            )
        if overhead is not None and not 0 < overhead <= 1:
            raise MemlabError(
                f"overhead is a share of the training's time such as 0.05, or None, got {overhead!r:.80}."
            )
        if budget is not None:
            parse_bytes(budget)
        if predict is not None:
            from memlab.prediction.cards import find

            find(predict)
        wanted = Wanted(name, device, lines, shapes, budget, skip, steps, folder(out))
        self.options = CallbackOptions(wanted, modules, overhead, predict)
        self.training: MeasuredTraining | None = None
        self.prediction: Prediction | None = None

    @property
    def run(self) -> Run | None:
        """The run of the last training that has ended; None before, and under `memlab run`, which has it."""
        return self.training.run if self.training is not None else None


STEPS = 2
"""The first step makes the optimizer's state, the second has it from its beginning."""
DEVICE = torch.device("cuda", 0)


def predict_first_step(steps: Callable[[], object], card: str) -> Prediction | None:
    """Predict some training steps on a card, and say the answer, or why there is none, in one line."""
    from memlab.api.predict import StepToPredict, configured, predict_step
    from memlab.api.prediction import asks_for_nothing, verdict
    from memlab.prediction.cards import find

    try:
        found = predict_step(StepToPredict(steps, find(card), "training step", configured(None)))
        if found.trace.notes.get("raised") is True:
            raise MemlabError(f"in the dry run {found.summary.notes[-1].rstrip('.')}")
        if asks_for_nothing(found.forecast):
            raise MemlabError("it allocated nothing on the card")
    except Exception as error:
        why = str(error) if isinstance(error, MemlabError) else f"{type(error).__name__}: {error}"
        say(f"memlab: the training step is not predicted: {one_line(why, 300).rstrip('.')}.")
        return None
    say(f"memlab: predicted from the first batch, training {verdict(found.forecast)}.")
    return found


def move(model: torch.nn.Module, optimizer: Any) -> None:
    """Move a model that was on the CPU to the card, and let the optimizer follow; in the child only.

    The optimizer has taken no step. A parameter that two modules share stays one.
    """
    before = {id(one): name for name, one in model.named_parameters()}
    model.to(DEVICE)
    after = dict(model.named_parameters())
    if after.keys() != set(before.values()):
        raise MemlabError("parameters that modules share would not be shared on the card")
    for group in optimizer.param_groups:
        if any(id(one) not in before and id(one) not in map(id, after.values()) for one in group["params"]):
            raise MemlabError("the optimizer has parameters that the model does not have")
        group["params"] = [after[before[id(one)]] if id(one) in before else one for one in group["params"]]


def first_batches(loader: Any, count: int) -> list[Any]:
    """The first batches of a loader, without its workers; in the child only."""
    if getattr(loader, "batch_sampler", None) is None:
        raise MemlabError("its data set has no indices, and a batch that is read for a prediction would be gone")
    chosen = itertools.islice(loader.batch_sampler, count)
    return [loader.collate_fn([loader.dataset[index] for index in indices]) for indices in chosen]


def on_card(batch: Any) -> Any:
    """The tensors of a batch, on the card."""
    return mapped(batch, lambda one: one.to(DEVICE))


def autocast(kind: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Mixed precision on the card; none for None."""
    return torch.autocast("cuda", kind) if kind is not None else contextlib.nullcontext()


def refuse(reasons: Iterable[tuple[bool, str]]) -> None:
    """Raise MemlabError for the first reason that holds."""
    for holds, why in reasons:
        if holds:
            raise MemlabError(why)
