"""The forecast of a program on a card: from its requests to peaks as ranges, and whether it fits.

The requests (those of a dry run, or measured ones) go through the simulated allocator in the best case and in the worst.
If both fit the answer is "yes", if neither does "no", else "close". Of several GPUs each is forecast by itself.
Limits: those of `fake_cuda`, `workspaces` and `cards`, which are named as assumptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memlab.allocator.conf import parse_conf
from memlab.allocator.replay import DEVICE, Workspace, simulate
from memlab.allocator.replay import NOTE as SIMULATED
from memlab.allocator.rules import ROUND_LARGE, Ties
from memlab.allocator.segments import Place
from memlab.prediction.assumptions import assumed_in, how_to_set
from memlab.prediction.cards import Card
from memlab.prediction.probe import NOTES
from memlab.prediction.torch_versions import other_version, what_follows
from memlab.prediction.workspaces import NCCL, WorkspaceOperator, WorkspacePart, Workspaces, workspaces
from memlab.trace.columns import Category, Kind, Phase
from memlab.trace.trace import CPU, PREDICTING, Gap, Trace
from memlab.units import ByteRange

Fits = Literal["yes", "no", "close"]
ANSWERS: dict[str, str] = {"yes": "fits", "no": "does not fit", "close": "too close to call"}
HELD = "NCCL may hold gradients for a while that DDP has released"
_ORDER = {"no": 0, "close": 1, "yes": 2}
_UNLIMITED_BYTES = 1 << 62
"""A card on which everything fits: its peaks are what a program needs."""
_HIGHEST_ADDRESS = 1 << 61
_PLACES = (
    "which of equal free blocks PyTorch uses before 2.12 hangs on where the driver puts segments: the peaks cover each above the "
    "one before and each below, and allocated half a percent more"
)
_PLACED_ERROR = 0.005
"""How far *allocated* was from both with PyTorch 2.11 on an H200 (by up to 0.47 %): a block that is not split counts whole."""
_RESERVED_ERROR = 0.02
"""The 95th percentile of the error of *reserved* in `benchmarks/prediction.py`; it widens the range of "close"."""
BRANCHES = "branches of backward on different GPUs run at the same time, and are predicted one after the other, the last one first"
_PEAKS = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "device used": "device_bytes"}
"""Names of the peaks in files, and of the fields."""


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """One of several GPUs: the peaks that it needs, and whether they fit, as in `Forecast`."""

    index: int
    allocated_bytes: ByteRange
    reserved_bytes: ByteRange
    device_bytes: ByteRange
    fits: Fits
    out_of_memory: str

    @property
    def label(self) -> str:
        """How users name it: "cuda:1"."""
        return f"cuda:{self.index}"


Known = dict[tuple[Any, ...], tuple[int, int, int]]
"""What was simulated -> the least memory with which nothing had to be released, and the peaks of allocated and reserved."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A program on a card, or on several of it. `trace` is simulated for the card and ends if memory runs out.

    The ranges are the peaks of *allocated*, *reserved* and the device: on this card, or, if the program may not fit,
    on one that is large enough. A full card releases its cache, so *reserved* may be higher on the large one.
    `out_of_memory` is the error it would raise on this card, "" if it is certain to fit. With several GPUs all of it is said of
    the one that needs most, `device`; `devices` has every one that was used, that first. It fits only if all do.
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
    devices: tuple[DeviceForecast, ...]

    @property
    def device(self) -> DeviceForecast:
        """The GPU that needs most."""
        return self.devices[0]

    @property
    def margin_bytes(self) -> ByteRange:
        """What is left on the card at the peak: lower and upper bound; negative: missing."""
        return self.card.usable_range - self.device_bytes


def forecast(
    asked: Trace,
    card: Card,
    conf: str = "",
    others: Iterable[Trace] = (),
) -> Forecast:
    """Predict the peaks of the requests in `asked` on `card`.

    `conf` is the value of PYTORCH_CUDA_ALLOC_CONF there. `others` are the requests of the same program for other numbers of
    multiprocessors. A trace that was measured on CUDA includes its workspaces.
    """
    by_device = _added_by_device(asked, card)
    devices = _on_devices(asked, card, conf, others, by_device, {})
    worst, there = devices[0], _devices_of(asked)
    context, extras = card.context_bytes.low, [extra for added in by_device.values() for extra in added.low]
    trace = simulate(asked, card.usable_high_bytes, conf, context, extras, devices=there)
    predicted = Forecast(
        card=card,
        trace=trace,
        allocated_bytes=worst.allocated_bytes,
        reserved_bytes=worst.reserved_bytes,
        device_bytes=worst.device_bytes,
        fits=worst.fits,
        out_of_memory=_failure(trace) or worst.out_of_memory,
        parts=tuple(_parts(by_device[worst.index])),
        assumptions=_assumptions(asked, card, conf),
        devices=tuple(devices),
    )
    return dataclasses.replace(predicted, trace=_with_notes(predicted))


def on_devices(
    asked: Trace, card: Card, conf: str = "", others: Iterable[Trace] = (), known: Known | None = None
) -> list[DeviceForecast]:
    """What `forecast` says of each GPU, the one that needs most first, without the trace.

    `known` has what was simulated for other cards: a call adds to it, and simulates only what is not the same there.
    """
    return _on_devices(asked, card, conf, others, _added_by_device(asked, card), {} if known is None else known)


def _added_by_device(asked: Trace, card: Card) -> dict[int, Workspaces]:
    used = [one for one in _devices_of(asked) if bool((asked.events.device == one).any())] or [DEVICE]
    return {device: _added(asked, card, device) for device in used}


def _on_devices(
    asked: Trace,
    card: Card,
    conf: str,
    others: Iterable[Trace],
    by_device: Mapping[int, Workspaces],
    known: Known,
) -> list[DeviceForecast]:
    found = [_on_device(asked, card, conf, others, *one, known) for one in by_device.items()]
    # That which would fail, then that which needs most memory, comes first.
    return sorted(
        found, key=lambda one: (_ORDER[one.fits], -one.device_bytes.high, -one.allocated_bytes.high, one.index)
    )


def _devices_of(asked: Trace) -> tuple[int, ...]:
    """The GPUs of a program."""
    return tuple(index for index in asked.device_indices if index != CPU) or (DEVICE,)


def _on_device(
    asked: Trace,
    card: Card,
    conf: str,
    others: Iterable[Trace],
    device: int,
    added: Workspaces,
    known: Known,
) -> DeviceForecast:
    """The forecast of one GPU; the others take no part in it."""
    fixed = _outside(added, card)
    best, worst = [], []
    least = round(card.usable_bytes * (1 - _RESERVED_ERROR))
    most = round(card.usable_high_bytes * (1 + _RESERVED_ERROR))
    for one in (asked, *others):
        extra = added if one is asked else _added(one, card, device)
        for is_downwards in (False, True) if _hangs_on_places(one, conf) else (False,):
            best.append(_case(one, conf, most, fixed.low, extra.low, device, is_downwards, known))
            worst.append(_case(one, conf, least, fixed.high, extra.high, device, is_downwards, known))
    allocated, reserved, failures = zip(*best, *worst, strict=True)
    # More workspace may need less in all, as blocks are cut otherwise: it certainly does not fit if no case does.
    fits: Fits = "no" if all(failures) else "close" if any(failures) else "yes"
    reserved_range = ByteRange(
        round(min(reserved) * (1 - _RESERVED_ERROR)), round(max(reserved) * (1 + _RESERVED_ERROR))
    )
    placed = _PLACED_ERROR if _hangs_on_places(asked, conf) else 0.0
    return DeviceForecast(
        index=device,
        allocated_bytes=ByteRange(round(min(allocated) * (1 - placed)), round(max(allocated) * (1 + placed))),
        reserved_bytes=reserved_range,
        device_bytes=reserved_range + fixed,
        fits=fits,
        out_of_memory=next(filter(None, (worst[0][2], *failures)), ""),
    )


def fits_for_certain(asked: Trace, card: Card, conf: str = "", others: Iterable[Trace] = ()) -> bool:
    """Whether the requests fit on `card` in the worst case: what a forecast's "yes" depends on, in a third of its time."""
    least = round(card.usable_bytes * (1 - _RESERVED_ERROR))
    for one in (asked, *others):
        added = _added(one, card)
        for place in (None, _below()) if _hangs_on_places(one, conf) else (None,):
            if _failure(simulate(one, least, conf, _outside(added, card).high, added.high, place)):
                return False
    return True


def _outside(added: Workspaces, card: Card) -> ByteRange:
    """What the process holds besides PyTorch's allocator."""
    return card.context_bytes + ByteRange(0, sum(part.high_bytes for part in added.outside if part.name == NCCL))


def _added(asked: Trace, card: Card, device: int = DEVICE) -> Workspaces:
    """The workspaces on one GPU."""
    if asked.made_by.current_engine != PREDICTING:
        return workspaces(asked.events, (), card)
    notes = asked.notes.get(NOTES, {})
    operators = [
        WorkspaceOperator(row, name, tuple(map(tuple, shapes)), dtype, in_backward, stream)
        for row, name, stream, in_backward, shapes, dtype, *there in notes.get("operators", ())
        if (there or [DEVICE]) == [device]
    ]
    found = workspaces(
        asked.events,
        operators,
        card,
        torch_version=asked.made_by.versions.get("torch", ""),
        communicators=sum(size != 1 for size in notes.get("groups", {}).values()),
        cleared=[(row, stream) for row, stream, there in notes.get("cleared", ()) if there == device],
    )
    held = [
        Workspace(row, size, stream, until, Category.OTHER, HELD) for row, size, stream, until in notes.get("held", ())
    ]
    low, high = found.low, tuple(sorted((*found.high, *held), key=lambda extra: extra.row))
    if device != DEVICE:
        low, high = (tuple(dataclasses.replace(extra, device=device) for extra in some) for some in (low, high))
    return dataclasses.replace(found, low=low, high=high)


def _hangs_on_places(asked: Trace, conf: str) -> bool:
    """Whether it matters where the driver puts segments; expandable ones are each a range of addresses of their own."""
    by_address = Ties.of(asked.made_by.versions.get("torch", "")) is Ties.ADDRESS
    return by_address and not parse_conf(conf).expandable_segments


def _below() -> Place:
    """Each segment below the one before."""
    end = _HIGHEST_ADDRESS

    def place(size: int, stream: int) -> int:
        nonlocal end
        end -= -(-size // ROUND_LARGE) * ROUND_LARGE
        return end

    return place


def _case(
    asked: Trace,
    conf: str,
    room: int,
    context: int,
    extra: tuple[Workspace, ...],
    device: int,
    is_downwards: bool,
    known: Known,
) -> tuple[int, int, str]:
    """The peaks of *allocated* and *reserved*, and the error, "" if it fits; else the peaks on an unlimited card."""
    # A full card releases its cache before it fails. Where nothing was released, more memory changes nothing.
    key = (id(asked), conf, extra, device, is_downwards)
    shares = parse_conf(conf).memory_fraction == 1  # else the limit follows the memory of the card
    failure = ""
    for total, taken in ((room, context), (_UNLIMITED_BYTES, 0)):
        least, allocated, reserved = known.get(key, (_UNLIMITED_BYTES + 1, 0, 0))
        if shares and total - taken >= least:
            return allocated, reserved, failure
        there = simulate(asked, total, conf, taken, extra, _below() if is_downwards else None, [device])
        facts = there.made_by.device(device)
        error, peaks = _failure(there), (facts.end_peak_allocated_bytes, facts.end_peak_reserved_bytes)
        if not error and not facts.num_alloc_retries:
            known[key] = (total - taken, *peaks)
        if not error or total == _UNLIMITED_BYTES:
            break
        failure = error
    return *peaks, failure


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


def _assumptions(asked: Trace, card: Card, conf: str) -> tuple[str, ...]:
    found = [what_follows(asked)] if other_version(asked) else []
    found += card.assumptions
    if _hangs_on_places(asked, conf):
        found.append(_PLACES)
    notes = asked.notes.get(NOTES, {})
    for text, count in notes.get("assumptions", ()):
        found.append(text if count == 1 else f"{text} ({count} times)")
    if notes.get("held"):
        found.append(f"{HELD}: only the upper bound includes it, for steps of 50 ms or more")
    if asked.made_by.current_engine == PREDICTING and len(_devices_of(asked)) > 1:
        born = asked.events.rows(asked.events.kind == Kind.ALLOC)
        if len({*born.device[asked.blocks.phase[born.block] == Phase.BACKWARD].tolist()}) > 1:
            found.append(BRANCHES)
    if asked.made_by.current_engine != PREDICTING:
        there = "with the workspaces and kernels of the card they were measured on"
        found.append(f"the requests are those that were measured, {there}")
    return tuple(dict.fromkeys(found))


def _with_notes(predicted: Forecast) -> Trace:
    trace, card = predicted.trace, predicted.card
    facts: dict[str, Any] = {
        "card": {field.name: getattr(card, field.name) for field in dataclasses.fields(card)},
        "fits": predicted.fits,
        "peaks": _peaks(predicted),
        "out_of_memory": predicted.out_of_memory,
        "parts": [dataclasses.asdict(part) for part in predicted.parts],
        "assumptions": predicted.assumptions,
    }
    if [one.index for one in predicted.devices] != [DEVICE]:
        facts["devices"] = [
            {"index": one.index, "fits": one.fits, "peaks": _peaks(one), "out_of_memory": one.out_of_memory}
            for one in predicted.devices
        ]
    if any(one.decides and not one.is_given for one in assumed_in(trace)):
        facts["has_assumed_sizes"] = True
    there = _devices_of(trace)
    devices = tuple(
        dataclasses.replace(device, name=card.name) if device.index in there else device
        for device in trace.made_by.devices
    )
    made_by = dataclasses.replace(trace.made_by, devices=devices)
    trace = dataclasses.replace(trace, made_by=made_by, notes={**trace.notes, "prediction": facts})
    how = how_to_set(trace)
    setting = (Gap("to set an assumed value", how),) if how else ()
    return trace.with_gaps(*(Gap("assumed", text) for text in predicted.assumptions), *setting)


def _peaks(of: Forecast | DeviceForecast) -> dict[str, ByteRange]:
    return {name: getattr(of, field) for name, field in _PEAKS.items()}


def _ranges(peaks: Mapping[str, Any]) -> dict[str, Any]:
    return {_PEAKS[of]: ByteRange(*map(int, ends)) for of, ends in peaks.items()}


def forecast_of(trace: Trace) -> Forecast | None:
    """The forecast in the notes of a trace; None for a measured one."""
    facts = trace.notes.get("prediction")
    if not isinstance(facts, dict):
        return None
    card: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in facts["card"].items()}
    devices = [
        DeviceForecast(one["index"], **_ranges(one["peaks"]), fits=one["fits"], out_of_memory=one["out_of_memory"])
        for one in facts.get("devices", [{**facts, "index": DEVICE}])
    ]
    return Forecast(
        card=Card(**card),
        trace=trace,
        **_ranges(facts["peaks"]),
        fits=facts["fits"],
        out_of_memory=facts["out_of_memory"],
        parts=tuple(WorkspacePart(**part) for part in facts["parts"]),
        assumptions=tuple(facts["assumptions"]),
        devices=tuple(devices),
    )
