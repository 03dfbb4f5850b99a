"""Language models by name, predicted: whether they fit, the smallest card, and where the bytes of the peak are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.analysis.model_shares import Generated, generated, shares
from memlab.api.predict import StepToPredict, TimeLimit, configured, predict_step
from memlab.api.prediction import Prediction, smallest_card
from memlab.errors import PredictionError
from memlab.language_models import Generation, TrainingStep
from memlab.prediction.cards import Card, find
from memlab.prediction.forecast import ANSWERS, DEVICE
from memlab.prediction.torch_versions import checked_version
from memlab.units import format_bytes
from memlab.views.page import Folded, Page, PageLines, Part
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

Step = TrainingStep | Generation
_UNLIMITED = "1024GiB"
"""A card on which all is allocated, whatever the one that was asked for has."""
_SHARES = (Column("at the peak of allocated"), Column("", "bytes"), Column("", "share"))
_SETTINGS = (Column(""), Column("", limit=200))
_COLUMNS = (Column("batch", "count"), Column("tokens", "count"), Column(""), Column("KV cache", "bytes"),
            Column("prefill", "bytes"), Column("decode", "bytes"), Column("allocated", "bytes"),
            Column("needs of the device", "bytes"))  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class ModelPrediction(Shown):
    """A step of a language model on a card: `shares` has the bytes of its peak by purpose, `generated` those of an inference."""

    step: Step
    prediction: Prediction
    shares: Mapping[str, int]
    generated: Generated | None
    smallest: str | None = None
    """The smallest known card that it fits for certain, "" if there is none, None if it was not asked for."""

    @property
    def page(self) -> Page:
        """The answer, the bytes by purpose, the settings and what was assumed."""
        found, total = self.prediction, sum(self.shares.values())
        lines = [
            f"Predicted, nothing ran on a card: needs {found.peak_device_bytes} of {found.card.usable_range}, "
            f"with a peak of {found.allocated_bytes} allocated."
        ]
        if self.generated is not None and isinstance(self.step, Generation):
            one = self.generated
            each = one.cache_bytes // (self.step.batch * self.step.context)
            lines.append(
                f"Peak allocated: {format_bytes(one.prefill_bytes)} in prefill, {format_bytes(one.decode_bytes)} in "
                f"decode. KV cache: {format_bytes(one.cache_bytes)}, {format_bytes(each)} a token."
            )
        if self.smallest is not None:
            lines.append(f"Smallest GPU that it fits: {self.smallest or 'none that memlab knows'}.")
        rows = tuple((name, count, count / total) for name, count in self.shares.items())
        parts: list[Part] = [
            PageLines(tuple(lines)),
            Table("", _SHARES, rows, bar=1),
            Folded("Settings", Table("", _SETTINGS, tuple(self.step.settings.items()))),
            Folded("Assumed", PageLines(found.assumptions)),
        ]
        return Page(f"{self.step.name}: {found.verdict}", tuple(parts))

    @property
    def facts(self) -> dict[str, Any]:
        """The same as plain JSON; sizes in bytes."""
        found = self.prediction
        names = ("allocated_bytes", "reserved_bytes", "peak_device_bytes", "margin_bytes")
        facts: dict[str, Any] = {"model": self.step.name, "card": found.card.name, "fits": found.fits}
        facts |= {"batch": self.step.batch, "tokens": tokens_of(self.step)}
        facts |= {name: list(getattr(found, name)) for name in names} | {"shares_bytes": dict(self.shares)}
        if self.generated is not None:
            facts |= {f"{of}_bytes": getattr(self.generated, f"{of}_bytes") for of in ("prefill", "decode", "cache")}
        if self.smallest is not None:
            facts["smallest_card"] = self.smallest or None
        facts |= {"settings": self.step.settings, "out_of_memory": found.out_of_memory}
        return {**facts, "assumptions": list(found.assumptions)}


@dataclass(frozen=True, slots=True, repr=False)
class ModelTable(Shown):
    """A language model with several batches or lengths on a card, the smallest first."""

    rows: tuple[ModelPrediction, ...]

    @property
    def page(self) -> Page:
        """What each needs."""
        first, rows = self.rows[0], []
        for row in self.rows:
            found, one = row.prediction, row.generated
            parts = (None,) * 3 if one is None else (one.cache_bytes, one.prefill_bytes, one.decode_bytes)
            answer = ANSWERS[found.fits]
            size = row.step.batch, tokens_of(row.step)
            rows.append((*size, answer, *parts, found.allocated_bytes, found.peak_device_bytes))
        settings = {name: text for name, text in first.step.settings.items() if name != "batch"}
        title = f"{first.step.name} on {first.prediction.card.name}, predicted"
        folded = Folded("Settings", Table("", _SETTINGS, tuple(settings.items())))
        return Page(title, (Table("", _COLUMNS, tuple(rows)), folded))


def tokens_of(step: Step) -> int:
    """The length of its sequences."""
    return step.tokens if isinstance(step, TrainingStep) else step.context


def predict_model(
    step: Step,
    card: str | Card,
    *,
    limit_s: float | None = None,
    smallest: bool = True,
    torch_version: str | None = None,
) -> ModelPrediction:
    """Predict a step of a language model on `card`, as `memlab.predict` does, and where its bytes are.

    With `smallest` the smallest known card that fits is looked for, too.
    """
    version = checked_version(torch_version)
    conf = configured(None, version)
    limit = TimeLimit(limit_s)

    def predicted(card: Card) -> Prediction:
        what = StepToPredict(step, card, step.name, conf, is_quiet=True, torch_version=version)
        return predict_step(what, limit.left_for(f"a {card.name}"))

    found = predicted(find(card))
    trace = found.trace if found.fits == "yes" else found.for_card(_UNLIMITED).trace
    parts = generated(trace, DEVICE, step.scores) if isinstance(step, Generation) else None

    def elsewhere(card: Card) -> Prediction | None:
        try:
            return predicted(card)
        except PredictionError:
            limit.left_for(f"a {card.name}")  # raises if that is why
            return None

    named = None
    if smallest:
        best = smallest_card(found, elsewhere)
        named = best.card.name if best is not None else ""
    return ModelPrediction(step, found, shares(trace, DEVICE, step.scores), parts, named)


def predict_models(
    steps: Iterable[Step], card: str | Card, limit_s: float | None = None, torch_version: str | None = None
) -> ModelTable:
    """Predict several steps; all of them take at most `limit_s`."""
    limit, rows = TimeLimit(limit_s), []
    for step in steps:
        left_s = limit.left_for(f"{step.batch} x {tokens_of(step):,} tokens")
        rows.append(predict_model(step, card, limit_s=left_s, smallest=False, torch_version=torch_version))
    return ModelTable(tuple(rows))
