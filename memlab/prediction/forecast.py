"""The forecast of a program on a card: from its requests to peaks as ranges, and whether it fits.

The requests (those of a dry run, or measured ones) go through the simulated allocator in the best case and in the worst.
If both fit the answer is "yes", if neither does "no", else "close". Limits: those of `fake_cuda`, `workspaces` and `cards`,
which are named as assumptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memlab.allocator.replay import NOTE as SIMULATED
from memlab.allocator.replay import Workspace, simulate
from memlab.prediction.cards import Card
from memlab.prediction.probe import DEVICE, NOTES
from memlab.prediction.workspaces import NCCL, WorkspaceOperator, WorkspacePart, Workspaces, workspaces
from memlab.trace.columns import Category
from memlab.trace.trace import PREDICTING, Gap, Trace
from memlab.units import ByteRange

Fits = Literal["yes", "no", "close"]
ANSWERS: dict[str, str] = {"yes": "fits", "no": "does not fit", "close": "too close to call"}
HELD = "NCCL may hold gradients for a while that DDP has released"
_UNLIMITED_BYTES = 1 << 62
"""A card on which everything fits: its peaks are what a program needs."""
_RESERVED_ERROR = 0.02
"""The 95th percentile of the error of *reserved* in `benchmarks/prediction.py`; it widens the range of "close"."""
_PEAKS = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "device used": "device_bytes"}
"""Names of the peaks in files, and of the fields."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A program on a card. `trace` is simulated for the card and ends if memory runs out.

    The ranges are the peaks of *allocated*, *reserved* and the device: on this card, or, if the program may not fit,
    on one that is large enough. A full card releases its cache, so *reserved* may be higher on the large one.
    `out_of_memory` is the error it would raise on this card, "" if it is certain to fit.
    """

    card: Card
    trace: Trace
    allocated_bytes: ByteRange
    reserved_bytes: ByteRange
    device_bytes: ByteRange
    fits: Fits
    out_of_memory: str
    parts: tuple[WorkspacePart, ...]
    assumptions: tuple[str, ...]

    @property
    def margin_bytes(self) -> ByteRange:
        """What is left on the card at the peak: lower and upper bound; negative: missing."""
        return self.card.usable_range - self.device_bytes


def forecast(
    asked: Trace,
    card: Card,
    conf: str = "",
    environment: Mapping[str, str] | None = None,
    others: Iterable[Trace] = (),
) -> Forecast:
    """Predict the peaks of the requests in `asked` on `card`.

    `conf` is the value of PYTORCH_CUDA_ALLOC_CONF there. `others` are the requests of the same program for other numbers of
    multiprocessors. A trace that was measured on CUDA includes its workspaces.
    """
    added = _added(asked, card, environment)
    fixed = card.context_bytes + ByteRange(0, sum(part.high_bytes for part in added.outside if part.name == NCCL))
    best, worst = [], []
    least = round(card.usable_bytes * (1 - _RESERVED_ERROR))
    most = round(card.usable_high_bytes * (1 + _RESERVED_ERROR))
    for one in (asked, *others):
        extra = added if one is asked else _added(one, card, environment)
        best.append(_case(one, conf, most, fixed.low, extra.low))
        worst.append(_case(one, conf, least, fixed.high, extra.high))
    allocated, reserved, failures = zip(*best, *worst, strict=True)
    fits: Fits = "no" if all(failures[: len(best)]) else "close" if any(failures) else "yes"
    trace = simulate(asked, card.usable_high_bytes, conf, fixed.low, added.low)
    reserved_range = ByteRange(
        round(min(reserved) * (1 - _RESERVED_ERROR)), round(max(reserved) * (1 + _RESERVED_ERROR))
    )
    predicted = Forecast(
        card=card,
        trace=trace,
        allocated_bytes=ByteRange(min(allocated), max(allocated)),
        reserved_bytes=reserved_range,
        device_bytes=reserved_range + fixed,
        fits=fits,
        out_of_memory=next(filter(None, (_failure(trace), worst[0][2], *failures)), ""),
        parts=tuple(_parts(added)),
        assumptions=_assumptions(asked, card),
    )
    return dataclasses.replace(predicted, trace=_with_notes(predicted))


def _added(asked: Trace, card: Card, environment: Mapping[str, str] | None) -> Workspaces:
    if asked.made_by.current_engine != PREDICTING:
        return workspaces(asked.events, (), card, environment=environment)
    operators = [
        WorkspaceOperator(row, name, tuple(map(tuple, shapes)), dtype, in_backward, stream)
        for row, name, stream, in_backward, shapes, dtype in asked.notes.get(NOTES, {}).get("operators", ())
    ]
    version = asked.made_by.versions.get("torch", "")
    groups = asked.notes.get(NOTES, {}).get("groups", {})
    communicators = sum(size != 1 for size in groups.values())
    found = workspaces(
        asked.events, operators, card, torch_version=version, environment=environment, communicators=communicators
    )
    held = [
        Workspace(row, size, stream, until, Category.OTHER, HELD)
        for row, size, stream, until in asked.notes.get(NOTES, {}).get("held", ())
    ]
    return dataclasses.replace(found, high=tuple(sorted((*found.high, *held), key=lambda extra: extra.row)))


def _case(asked: Trace, conf: str, room: int, context: int, extra: tuple[Workspace, ...]) -> tuple[int, int, str]:
    """The peaks of *allocated* and *reserved*, and the error, "" if it fits; else the peaks on an unlimited card."""
    there = simulate(asked, room, conf, context, extra)
    failure = _failure(there)  # a full card releases its cache before it fails
    if failure:
        there = simulate(asked, _UNLIMITED_BYTES, conf, 0, extra)
    facts = there.made_by.device(DEVICE)
    return facts.end_peak_allocated_bytes, facts.end_peak_reserved_bytes, failure


def _failure(simulated: Trace) -> str:
    return str(simulated.notes[SIMULATED]["out_of_memory"])


def _parts(added: Workspaces) -> Iterable[WorkspacePart]:
    """The maximum at one time: the sum of workspaces that are kept, and the largest of the others, by name."""
    yield from added.outside
    for name, source in added.sources.items():
        ends = []
        for some in (added.low, added.high):
            mine = [one for one in some if one.source_text == name]
            kept = [one.requested_bytes for one in mine if one.until_row is None]
            others = [one.requested_bytes for one in mine if one.until_row is not None]
            ends.append(sum(kept) + max(others, default=0))
        if ends[1]:
            yield WorkspacePart(name, ends[0], ends[1], source)


def _assumptions(asked: Trace, card: Card) -> tuple[str, ...]:
    found = list(card.assumptions)
    for text, count in asked.notes.get(NOTES, {}).get("assumptions", ()):
        found.append(text if count == 1 else f"{text} ({count} times)")
    if asked.notes.get(NOTES, {}).get("held"):
        found.append(f"{HELD}: only the upper bound includes it, for steps of 50 ms or more")
    if asked.made_by.current_engine != PREDICTING:
        there = "with the workspaces and kernels of the card they were measured on"
        found.append(f"the requests are those that were measured, {there}")
    return tuple(dict.fromkeys(found))


def _with_notes(predicted: Forecast) -> Trace:
    trace, card = predicted.trace, predicted.card
    facts: dict[str, Any] = {
        "card": {field.name: getattr(card, field.name) for field in dataclasses.fields(card)},
        "fits": predicted.fits,
        "peaks": {of: getattr(predicted, name) for of, name in _PEAKS.items()},
        "out_of_memory": predicted.out_of_memory,
        "parts": [dataclasses.asdict(part) for part in predicted.parts],
        "assumptions": predicted.assumptions,
    }
    devices = tuple(
        dataclasses.replace(device, name=card.name) if device.index == DEVICE else device
        for device in trace.made_by.devices
    )
    made_by = dataclasses.replace(trace.made_by, devices=devices)
    trace = dataclasses.replace(trace, made_by=made_by, notes={**trace.notes, "prediction": facts})
    return trace.with_gaps(*(Gap("assumed", text) for text in predicted.assumptions))


def forecast_of(trace: Trace) -> Forecast | None:
    """The forecast in the notes of a trace; None for a measured one."""
    facts = trace.notes.get("prediction")
    if not isinstance(facts, dict):
        return None
    card: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in facts["card"].items()}
    ranges = {_PEAKS[of]: ByteRange(*map(int, ends)) for of, ends in facts["peaks"].items()}
    return Forecast(
        card=Card(**card),
        trace=trace,
        **ranges,
        fits=facts["fits"],
        out_of_memory=facts["out_of_memory"],
        parts=tuple(WorkspacePart(**part) for part in facts["parts"]),
        assumptions=tuple(facts["assumptions"]),
    )
