"""`MemoryCallback` for the Trainer of transformers, and for those made from it (trl's among them).

    from memlab.integrations.transformers import MemoryCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[MemoryCallback(out="runs")])
    trainer.train()

A callback of transformers cannot add to a row of the log (`on_log` comes after `state.log_history` was written, and after
the reporters' callbacks), and no event tells of an error. So while a Trainer trains, its `log` and, from its construction on,
its `train` go through this callback: as attributes of that one object, which its own methods are behind.
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memlab.integrations import training
from memlab.integrations.training import DEVICE, STEPS, MeasuredTraining, MeasuringCallback, autocast, needs
from memlab.scripts.recording import say
from memlab.torch_internals.frames import locals_of

try:
    import transformers
except ImportError:
    raise needs(__name__, "transformers") from None


class MemoryCallback(MeasuringCallback, transformers.TrainerCallback):
    """Logs peaks of memory with every row of the Trainer's log, and leaves a page if memory runs out.

    Pass it to the Trainer's constructor. If that is not possible, add it and train within it: `with callback: trainer.train()`.
    """

    _depth = 0
    _undo: Callable[[], None] | None = None

    # --- around a training ---

    def __enter__(self) -> MemoryCallback:
        self._enter(None)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._exit(error)

    def _enter(self, trainer: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            device = str(trainer.args.device) if trainer is not None else None
            self.training = MeasuredTraining(self.options, device)
            self.training.begin()
        if trainer is not None and self._undo is None:
            self._undo = self._log_with(trainer)

    def _exit(self, error: BaseException | None) -> None:
        self._depth -= 1
        if self._depth == 0 and self.training is not None:
            if self._undo is not None:
                self._undo()
                self._undo = None
            self.training.end(error)

    def _log_with(self, trainer: Any) -> Callable[[], None]:
        """Let `trainer.log` add our figures to its row: the row in `state.log_history` and what every callback gets."""
        own = vars(trainer).get("log")
        inner, training = trainer.log, self.training

        @functools.wraps(inner)
        def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            # speed_metrics names the rows of an evaluation and of the end: "eval_runtime", "train_runtime".
            of = next((key.removesuffix("_runtime") + "_" for key in logs if str(key).endswith("_runtime")), "")
            is_end = of == "train_"
            figures = {} if training is None else training.row(f"{of}memory", is_last=is_end, of_all=is_end)
            row = {**logs, **figures}
            try:
                return inner(row, *args, **kwargs)
            finally:  # `log` adds to the caller's dict, and evaluate() returns that: it stays without our figures
                logs.update((key, value) for key, value in row.items() if key not in figures)

        def undo() -> None:
            if vars(trainer).get("log") is log:
                if own is None:
                    del trainer.log
                else:
                    trainer.log = own

        trainer.log = log
        return undo

    # --- events ---

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer is constructed: from now on its `train` goes through us."""
        trainer = self._trainer()
        if trainer is None:
            return
        own, ref = vars(trainer).get("train"), weakref.ref(trainer)

        @functools.wraps(trainer.train)
        def train(*args: Any, **kwargs: Any) -> Any:
            trainer = ref()
            inner: Any = own or functools.partial(type(trainer).train, trainer)  # type: ignore[union-attr]
            if trainer is None or self not in trainer.callback_handler.callbacks:  # it was removed
                return inner(*args, **kwargs)
            self._enter(trainer)
            try:
                result = inner(*args, **kwargs)
            except BaseException as error:
                self._exit(error)
                raise
            self._exit(None)
            return result

        trainer.train = train

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training begins."""
        if not self._depth:
            how = "pass MemoryCallback to the Trainer's constructor, or train within it: with callback: trainer.train()"
            say(f"memlab: nothing is measured: {how}.")
            return
        trainer = self._trainer()
        if self._undo is None and trainer is not None:
            self._undo = self._log_with(trainer)
        if self.options.card is not None and trainer is not None:
            self.prediction = training.predict_first_step(functools.partial(_steps, trainer), self.options.card)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer step has ended."""
        if self._depth and self.training is not None:
            self.training.stepped(state.global_step)

    def _trainer(self) -> Any:
        """The Trainer that calls this event; events get everything of it but itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = dict(locals_of(frame)).get("self")
            if isinstance(owner, transformers.Trainer) and self in owner.callback_handler.callbacks:
                return owner
            frame = frame.f_back
        return None


def _steps(trainer: Any) -> None:
    """The first training steps of a Trainer, on the card: its own `training_step` and optimizer; in the child only."""
    args, accelerator, optimizer, model = trainer.args, trainer.accelerator, trainer.optimizer, trainer.model
    mixed = accelerator.mixed_precision
    are_several = trainer.model_wrapped is not model or args.world_size > 1 or args.n_gpu > 1
    training.refuse([
        (are_several, "it trains on several devices"),
        (trainer.state.global_step > 0, "it goes on from a checkpoint"),
        (args.torch_compile, "it is compiled, and would be predicted as if it were not"),
        (mixed not in ("no", "bf16"), f"mixed precision {mixed} needs a scaler that is not predicted"),
    ])  # fmt: skip
    loop: dict[str, Any] = {}  # the variables that the Trainer's loop holds on to from one step to the next
    if args.device.type == "cpu":
        training.move(model, optimizer)
        loop["tr_loss"] = torch.tensor(0.0, device=DEVICE)
        # What a Trainer and its Accelerator have found out about this machine, for that with the card.
        vars(args)["_setup_devices"] = vars(accelerator.state)["device"] = DEVICE
        if mixed == "bf16":
            forward = model.forward

            @functools.wraps(forward)
            def in_bf16(*args: Any, **kwargs: Any) -> Any:
                with autocast(torch.bfloat16):
                    return forward(*args, **kwargs)

            model.forward = in_bf16
    count = STEPS * args.gradient_accumulation_steps
    # As accelerate's loader does it, all batches of an optimizer step go to the card before its first one, and stay for it.
    loader = trainer.callback_handler.train_dataloader
    batches = map(training.on_card, training.first_batches(loader, count))
    for _ in range(STEPS):
        samples, items = trainer.get_batch_samples(batches, args.gradient_accumulation_steps, DEVICE)
        if not samples:
            break
        trainer.current_gradient_accumulation_steps = len(samples)
        for number, inputs in enumerate(samples, 1):
            accelerator.gradient_state._set_sync_gradients(number == len(samples))
            loop["tr_loss_step"] = trainer.training_step(model, inputs, items)
        # The norm is logged also where nothing is clipped.
        loop["grad_norm"] = None
        loop["grad_norm"] = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        model.zero_grad()
