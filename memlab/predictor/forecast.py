"""What a program would take on a card: from its requests to peaks as intervals and an answer to "does it fit".

The requests (a pretend run's trace, or a measured one) are settled by the simulated allocator with all that speaks for
fitting, and with all that speaks against. Where both agree the answer is yes or no, else "close". Where one does not fit, it
is settled again on a card without end, which tells what it would have needed.

Limits: those of `pretend`, `extras` and `cards`, which are named as assumptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memlab.allocator.replay import NOTE as SETTLED
from memlab.allocator.replay import Extra, settle
from memlab.predictor.cards import Card
from memlab.predictor.extras import Extras, Operator, extras
from memlab.predictor.probe import ENGINE, NOTES
from memlab.trace.trace import Gap, Trace

Fits = Literal["yes", "no", "close"]
Interval = tuple[int, int]
DEVICE = 0
UNLIMITED_BYTES = 1 << 62
"""A card on which everything fits: what a program wants there is what it needs."""
RESERVED_ERROR = 0.02
"""By how much *reserved* was wrong in 95 of 100 programs that `benchmarks/prediction.py` compares; it widens what is close."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is no tensor of the program: what it is, between how many bytes, and how that is known."""

    name: str
    low_bytes: int
    high_bytes: int
    source_text: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """A program on a card. `trace` is settled for the card and ends where its memory runs out.

    The intervals are the peaks of *allocated*, *reserved* and the device: on this card, or, where the program may not fit,
    on one that is large enough. A full card gives back its cache, so that there *reserved* may be more.
    `out_of_memory` is the error it would raise on this card, "" where nothing speaks for one.
    """

    card: Card
    trace: Trace
    allocated_bytes: Interval
    reserved_bytes: Interval
    device_bytes: Interval
    fits: Fits
    out_of_memory: str
    parts: tuple[Part, ...]
    assumptions: tuple[str, ...]

    @property
    def margin_bytes(self) -> Interval:
        """What is left on the card at the peak, at least and at most; below zero: what is missing."""
        return self.card.usable_bytes - self.device_bytes[1], self.card.usable_high_bytes - self.device_bytes[0]


def forecast(asked: Trace, card: Card, conf: str = "", environment: Mapping[str, str] | None = None) -> Forecast:
    """Foretell what the requests of `asked` come to on `card`.

    `conf` is what PYTORCH_CUDA_ALLOC_CONF would say there. A trace that was measured on CUDA has its workspaces already.
    """
    added = _added(asked, card, environment)
    best = settle(asked, _off(card.usable_high_bytes, +RESERVED_ERROR), conf, card.context_bytes[0], added.low)
    worst = settle(asked, _off(card.usable_bytes, -RESERVED_ERROR), conf, card.context_bytes[1], added.high)
    fits: Fits = "no" if _failure(best) else ("close" if _failure(worst) else "yes")
    trace = settle(asked, card.usable_high_bytes, conf, card.context_bytes[0], added.low)
    context = card.context_bytes
    ends = (
        _peaks_there(best) or _peaks(asked, conf, added.low),
        _peaks_there(worst) or _peaks(asked, conf, added.high),
    )
    allocated, (least, most) = ((min(some), max(some)) for some in zip(*ends, strict=True))
    reserved = _off(least, -RESERVED_ERROR), _off(most, +RESERVED_ERROR)
    found = Forecast(
        card=card,
        trace=trace,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=(reserved[0] + context[0], reserved[1] + context[1]),
        fits=fits,
        out_of_memory=_failure(trace) or _failure(worst),
        parts=tuple(_parts(added)),
        assumptions=tuple(dict.fromkeys(_assumptions(asked, card))),
    )
    return dataclasses.replace(found, trace=_noted(found))


def _added(asked: Trace, card: Card, environment: Mapping[str, str] | None) -> Extras:
    noted = asked.notes.get(NOTES, {}) if asked.made_by.engine == ENGINE else None
    if noted is None:
        return extras(asked.events, (), card, environment=environment)
    operators = [
        Operator(row, name, tuple(map(tuple, shapes)), dtype, in_backward, stream)
        for row, name, stream, in_backward, shapes, dtype in noted["operators"]
    ]
    version = asked.made_by.versions.get("torch", "")
    return extras(asked.events, operators, card, torch_version=version, environment=environment)


def _peaks(asked: Trace, conf: str, added: tuple[Extra, ...]) -> Interval:
    """The peaks of *allocated* and *reserved* where nothing ends the program."""
    return _peaks_of(settle(asked, UNLIMITED_BYTES, conf, 0, added))


def _peaks_there(settled: Trace) -> Interval | None:
    """The same on the card, where the program goes through: a full one gives back its cache before it fails."""
    return None if _failure(settled) else _peaks_of(settled)


def _peaks_of(settled: Trace) -> Interval:
    facts = settled.made_by.device(DEVICE)
    return facts.end_peak_allocated_bytes, facts.end_peak_reserved_bytes


def _off(nbytes: int, error: float) -> int:
    """A size that is wrong by this share."""
    return round(nbytes * (1 + error))


def _failure(settled: Trace) -> str:
    return str(settled.notes[SETTLED]["out_of_memory"])


def _parts(added: Extras) -> Iterator[Part]:
    for outside in added.outside:
        yield Part(outside.name, outside.low_bytes, outside.high_bytes, outside.source_text)
    for name, source in added.sources.items():
        low, high = (_most(some, name) for some in (added.low, added.high))
        if high:
            yield Part(name, low, high, source)


def _most(some: tuple[Extra, ...], name: str) -> int:
    """What the extras of a name take at once, at most: those that are kept together, of the others the largest."""
    sizes = [(one.requested_bytes, one.until_row is None) for one in some if one.source_text == name]
    kept = sum(size for size, is_kept in sizes if is_kept)
    return kept + max((size for size, is_kept in sizes if not is_kept), default=0)


def _assumptions(asked: Trace, card: Card) -> Iterator[str]:
    yield from card.assumptions
    for text, count in asked.notes.get(NOTES, {}).get("assumptions", ()):
        yield text if count == 1 else f"{text} ({count} times)"
    if asked.made_by.engine != ENGINE:
        yield "the requests are those that were measured, with the workspaces and kernels of the card they were measured on"


def _noted(found: Forecast) -> Trace:
    """The trace with the forecast in its notes, so that it goes with it into files, and its assumptions as gaps."""
    trace = found.trace
    facts: dict[str, Any] = {
        "card": {field.name: getattr(found.card, field.name) for field in dataclasses.fields(found.card)},
        "fits": found.fits,
        "peaks": {
            "allocated": found.allocated_bytes,
            "reserved": found.reserved_bytes,
            "device used": found.device_bytes,
        },
        "out_of_memory": found.out_of_memory,
        "parts": [dataclasses.asdict(part) for part in found.parts],
        "assumptions": found.assumptions,
    }
    devices = [
        dataclasses.replace(device, name=found.card.name) if device.index == DEVICE else device
        for device in trace.made_by.devices
    ]
    made_by = dataclasses.replace(trace.made_by, devices=tuple(devices))
    trace = dataclasses.replace(trace, made_by=made_by, notes={**trace.notes, "prediction": facts})
    return trace.with_gaps(*(Gap("assumed", text) for text in found.assumptions))


def forecast_of(trace: Trace) -> Forecast | None:
    """The forecast in the notes of a trace, None where it is no prediction."""
    facts = trace.notes.get("prediction")
    if not isinstance(facts, dict):
        return None
    card: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts["card"].items()
    }
    allocated, reserved, device = (_interval(facts["peaks"][of]) for of in ("allocated", "reserved", "device used"))
    return Forecast(
        card=Card(**card),
        trace=trace,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=device,
        fits=facts["fits"],
        out_of_memory=facts["out_of_memory"],
        parts=tuple(Part(**part) for part in facts["parts"]),
        assumptions=tuple(facts["assumptions"]),
    )


def _interval(value: Any) -> Interval:
    low, high = value
    return int(low), int(high)
