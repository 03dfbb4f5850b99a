"""A trainer's training step, predicted on a card before the first one is taken: its model, its first batch, its optimizer.

The step runs in a child process on tensors without data. What would be predicted wrongly is refused, in one line.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from memlab.errors import MemlabError
from memlab.scripts.recording import say
from memlab.units import one_line
from memlab.workloads.nested import mapped

if TYPE_CHECKING:
    from memlab.api.prediction import Prediction

STEPS = 2
"""The first step makes the optimizer's state, the second has it from its beginning."""
DEVICE = torch.device("cuda", 0)


def predict_first_step(steps: Callable[[], object], card: str) -> Prediction | None:
    """Predict some training steps on a card, and say the answer, or why there is none, in one line."""
    from memlab.api.predict_step import StepToPredict, configured, predict_step
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
