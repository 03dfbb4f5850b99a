"""`MemoryCallback` for Lightning's Trainer, of `lightning` or of `pytorch_lightning`.

    from memlab.integrations.lightning import MemoryCallback

    trainer = Trainer(callbacks=[MemoryCallback(out="runs")])
    trainer.fit(module, data)

Figures go to the Trainer's loggers as they are: `self.log` would make float32 tensors of them on the device, which have too few
digits for bytes and take memory themselves.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch

from memlab.errors import MemlabError
from memlab.integrations import training
from memlab.integrations.training import DEVICE, STEPS, MeasuredTraining, MeasuringCallback, needs


def _library() -> Any:
    """The library that the program has imported, or the one that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda one: one not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise needs(__name__, "lightning")


class MemoryCallback(MeasuringCallback, _library().Callback):  # type: ignore[misc]
    """Logs peaks of memory to the Trainer's loggers, every `log_every_n_steps`, and leaves a page if memory runs out."""

    _step = _logged = 0
    _is_asked = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A training begins: before the module is moved to its device."""
        if stage == "fit":
            self._step = self._logged = trainer.global_step
            self.training = MeasuredTraining(self.options, str(trainer.strategy.root_device), pl_module)
            self.training.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The first batch is there: predict."""
        if self.options.card is not None and not self._is_asked:
            self._is_asked = True
            steps = functools.partial(_steps, trainer, pl_module, batch)
            self.prediction = training.predict_first_step(steps, self.options.card)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch has ended, and often an optimizer step with it."""
        if self.training is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self.training.stepped(self._step)
        if 0 < trainer.log_every_n_steps <= self._step - self._logged:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last step was taken: log what there is since the last row."""
        if self._step > self._logged:
            self._log(trainer, is_last=True)

    def _log(self, trainer: Any, is_last: bool = False) -> None:
        self._logged = self._step
        figures = self.training.row(is_last=is_last) if self.training is not None else {}
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=self._step - 1)  # Lightning counts the steps of its rows from 0

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training ended with an error; what holds the memory is still there."""
        self._end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The training has ended."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self.training is not None:
            self.training.end(error)


def _steps(trainer: Any, module: Any, batch: Any) -> None:
    """The first training steps of a module, on the card, in the order of Lightning's automatic optimization; in the child only."""
    clip = trainer.gradient_clip_val
    is_other = str(trainer.precision) not in ("32-true", "bf16-mixed")
    training.refuse([
        (type(trainer.strategy).__name__ != "SingleDeviceStrategy", "it trains on several devices"),
        (not module.automatic_optimization or len(trainer.optimizers) != 1, "it takes its optimizer steps itself"),
        (trainer.global_step > 0, "it goes on from a checkpoint"),
        (is_other, f"precision {trainer.precision} is not predicted"),
        (bool(clip) and trainer.gradient_clip_algorithm == "value", "gradients clipped by value are not predicted"),
    ])  # fmt: skip
    optimizer = trainer.optimizers[0]
    if trainer.strategy.root_device.type == "cpu":
        training.move(module, optimizer)
        module._device = DEVICE  # which `self.device` gives
        batch = training.on_card(batch)
    module.log = module.log_dict = lambda *_, **__: None  # which wants to know the loop it is called in
    kind = torch.bfloat16 if trainer.precision == "bf16-mixed" else None
    accumulated = trainer.accumulate_grad_batches
    for number in range(STEPS * accumulated):
        with training.autocast(kind):
            output = module.training_step(batch, number)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor):
            raise MemlabError("its training_step returns no loss")
        if number % accumulated == 0:
            optimizer.zero_grad()  # Lightning's order: the gradients of the last step are there until here
        (loss / accumulated).backward()
        if (number + 1) % accumulated == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
