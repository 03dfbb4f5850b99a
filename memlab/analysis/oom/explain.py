"""Explain an out-of-memory error: requested and free, how the numbers add up, what was short, what to do.

Pure: it works from texts and numbers, without tensors. Sizes from a message are intervals; a statement about them holds for
the whole interval, or is called likely.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memlab.analysis.breakdown import Breakdown
from memlab.analysis.oom.actions import OF_ERRORS, OUTPUTS, Action, actions, root_of
from memlab.analysis.oom.facts import FRAGMENTATION, FULL, LIMIT, OTHERS, TOO_MUCH, Failure, Holder
from memlab.analysis.oom.moment import StepNeed
from memlab.analysis.oom.text import IMPOSSIBLE
from memlab.trace.columns import Phase
from memlab.trace.trace import SIMULATED_GPU
from memlab.units import ByteRange, format_bytes

_STEP = re.compile(r" -> |\.")
"""Where a reference path takes a step, other than into a list."""
NAMED = 8
"""How many names of live storages are listed, the largest first."""


@dataclass(frozen=True, slots=True)
class Term:
    """One number, and what it means."""

    name: str
    amount: ByteRange
    meaning: str


@dataclass(frozen=True, slots=True)
class Named:
    """What one name held: a variable, a traceback, an output; the path is that of its largest storage."""

    path: str
    category: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of an out-of-memory error, ready to be shown.

    `verdict` is a code of `oom_facts`; `remark` says where the figures come from if not measured.
    """

    label: str
    verdict: str
    title: str
    sentences: tuple[str, ...]
    terms: tuple[Term, ...]
    named: tuple[Named, ...]
    more_named: int
    alive_bytes: int
    shares: tuple[Breakdown, ...]
    actions: tuple[Action, ...]
    gaps: tuple[str, ...]
    remark: str = ""
    step: StepNeed | None = None


def explain(failure: Failure) -> Explanation:
    """Put the facts into words."""
    named = grouped(failure.holders)
    return Explanation(
        failure.message.label,
        failure.verdict,
        _title(failure),
        tuple(_sentences(failure)),
        tuple(_terms(failure)),
        tuple(named[:NAMED]),
        max(len(named) - NAMED, 0),
        failure.alive_bytes,
        failure.moment.shares if failure.moment is not None else (),
        actions(failure),
        failure.gaps,
        _REMARKS.get(failure.provenance, ""),
        failure.moment.step if failure.moment is not None else None,
    )


def amount_text(amount: ByteRange) -> str:
    """An amount as text: one figure if its bounds are close, else a range."""
    low, high = format_bytes(amount.low), format_bytes(amount.high)
    if amount.high - amount.low <= max(0.011 * amount.middle, 0):
        return low if low == high else format_bytes(amount.middle)
    return f"at most {high}" if amount.low <= 0 else f"{low} to {high}"


# --- title and sentences --------------------------------------------------------------------------------------------------

_REMARKS = {"simulated": SIMULATED_GPU, "predicted": "predicted: nothing ran on a card"}
VERDICTS = {
    TOO_MUCH: "This single request is larger than the whole device: only a smaller one can succeed.",
    LIMIT: "The limit of this process was reached, not that of the device.",
    FRAGMENTATION: "The cache of PyTorch's allocator is large enough but fragmented.",
    OTHERS: "Without the other processes on the device it would have fit.",
    FULL: "The device was full.",
}


def _title(failure: Failure) -> str:
    where, message = f"{failure.message.label} ran out of memory", failure.message
    if not failure.has_context and message.free is not None and message.capacity is not None:
        left = f"{amount_text(message.free)} of {amount_text(message.capacity)} were free"
        return f"{where}: {left}, too little for the CUDA context of this process."
    if message.asked is None:
        is_odd = any(note.startswith(IMPOSSIBLE) for note in message.notes)
        return f"{where}; the message gives no size{' that can be' if is_odd else 's'}."
    short = failure.shortfall
    free = f", {amount_text(message.free)} free" if message.free is not None else ""
    missing = f": {amount_text(short)} short" if short is not None and short.high > 0 else ""
    why = VERDICTS.get(failure.verdict, "")
    if failure.verdict == TOO_MUCH and message.allowed is not None:
        why = f"This single request is larger than the {amount_text(message.allowed)} that this process may use."
    return f"{where}: {amount_text(message.asked)} requested{free}{missing}. {why}".rstrip()


def _sentences(failure: Failure) -> Iterator[str]:
    message, moment = failure.message, failure.moment
    if failure.place:
        yield f"It was raised {failure.place}."
    if message.count > 1:
        yield f"The text holds {message.count} such messages; this is the last that gives sizes."
    for note in message.notes:
        yield f"{note[0].upper()}{note[1:]}."
    if moment is not None and message.asked is not None and moment.asked_bytes < message.asked.low:
        yield f"The tensor itself needs {format_bytes(moment.asked_bytes)}; PyTorch requested a whole segment."
    if not failure.has_context and failure.others_bytes:
        held = f"Other processes hold {format_bytes(failure.others_bytes)} of the device"
        yield f"{held}; this one needs a context before its first tensor, and has none yet."
    yield from _sum(failure)
    if moment is not None and moment.step is not None:
        yield _step(moment.step, moment.phase)
    if failure.own_pid is not None:
        yield f"Process {failure.own_pid} must be this one: PyTorch's part leaves no space for another that large."
    free, asked = message.free, message.asked
    if free is not None and asked is not None and free.low >= asked.high and failure.verdict not in (LIMIT, TOO_MUCH):
        yield "The driver had more free memory than requested: fragmented, or freed only afterwards."
    cached, reserved = message.cached, message.reserved
    if failure.is_full_of_tensors and message.allocated is not None and cached is not None and reserved is not None:
        share = f"{100 * cached.middle / max(reserved.middle, 1):.0f} %"
        held = f"Live tensors held {amount_text(message.allocated)}, {share} of what PyTorch reserved was cached"
        yield f"{held}: too many live tensors, not fragmentation."
    largest = failure.largest_free_bytes
    if failure.verdict == FRAGMENTATION and largest is not None and asked is not None and largest < asked.low:
        yield f"The largest piece of the cache was {format_bytes(largest)} afterwards."
    if failure.verdict == FRAGMENTATION and failure.expandable:
        yield "Expandable segments are already on: cached memory belongs to other streams, pools or partly used pages."


def _sum(failure: Failure) -> Iterator[str]:
    """How the numbers add up: to the capacity, as the unknown part is the remainder; or beyond a limit."""
    message = failure.message
    rest = "of context, other processes and driver"
    if failure.process is not None:
        rest = "of other processes and the driver"
    parts = {
        "allocated": message.allocated,
        "cached": message.cached,
        "of this process outside PyTorch's allocator": failure.beside,
        rest: failure.rest,
        "free": message.free,
    }
    digits = max(0.01 * message.capacity.high, 0) if message.capacity is not None else 0
    known = {name: size for name, size in parts.items() if size and (size.low > 0 or size.high > digits)}
    if failure.held is None or not known:
        return
    if message.capacity is not None and message.free is not None:
        listed = " + ".join(f"{amount_text(size)} {name}" for name, size in known.items())
        yield f"{listed} = {amount_text(message.capacity)}, the whole device."
    if failure.verdict == LIMIT and message.allowed is not None and failure.over_limit:
        needed = failure.over_limit + message.allowed
        yield f"With this request the process would have {amount_text(needed)} of {amount_text(message.allowed)} allowed."


def _step(step: StepNeed, phase: Phase) -> str:
    """What the whole step needs, as far as that is known."""
    where = "" if phase == Phase.OTHER else f" in {phase.name.lower()}"
    least = format_bytes(step.at_least_bytes)
    could_have = f"{format_bytes(step.available_bytes)} was reserved or free"
    if step.is_first:
        begins = f"It was interrupted{where} before the first step of an optimizer had ended"
        needs = f"this needs at least {least} allocated, and what would have followed is not known"
        return f"{begins}: {needs}; {could_have}."
    if step.rise is None:
        so_far = f"The step was interrupted{where}: it needs at least {least} allocated"
        return f"{so_far}, and what would have followed is not known; {could_have}."
    before = "the step before it" if step.earlier == 1 else f"the {step.earlier} steps before it"
    rose = f"{before} rose by {amount_text(step.rise)}"
    if step.as_before is None:
        larger = f"it needs at least {least} allocated, more than a step like {before} from where it began"
        return f"The step was interrupted{where}: {larger} ({format_bytes(step.begin_bytes)} held); {could_have}."
    began = f"The whole step began with {format_bytes(step.begin_bytes)} allocated, and {rose}"
    like = f"if it is like {'that' if step.earlier == 1 else 'them'} it needs {amount_text(step.as_before)} at its peak"
    return f"{began}: {like}, at least {least}; {could_have}."


# --- terms and names ------------------------------------------------------------------------------------------------------

_MEANINGS = {
    "asked": "the segment that PyTorch requested: the tensor, rounded up to 2 MiB, 20 MiB or a multiple of 2 MiB",
    "free": "free memory on the device, as the driver reports it",
    "capacity": "all memory of the device that programs can use",
    "allowed": "the limit set for this process",
    "allocated": "memory of PyTorch's allocator held by tensors",
    "private_pools": "the part of it in private pools of CUDA graphs",
    "cached": "cached by PyTorch's allocator; whole free segments had already been released",
    "reserved": "allocated and cached: everything PyTorch's allocator held",
    "process": "everything this process held: reserved, the CUDA context, libraries",
    "elsewhere": "memory of this process on the device outside PyTorch's allocator",
}
_OF_THE_MACHINE = {
    "free": "available on the machine afterwards",
    "capacity": "total memory of the machine, or of the container",
}
_MEANINGS_OF_BACKEND = {
    "MPS": {
        "asked": "the buffer that PyTorch requested from Metal",
        "allocated": "memory of Metal held by PyTorch's allocator, including its cache",
        "allowed": "PYTORCH_MPS_HIGH_WATERMARK_RATIO (by default 1.7) times what Metal recommends",
    },
    "CPU": _OF_THE_MACHINE | {"asked": "the bytes of one tensor, which the system refused"},
    "numpy": _OF_THE_MACHINE | {"asked": "the bytes of one array, which the system refused"},
}


def _terms(failure: Failure) -> Iterator[Term]:
    """The numbers in reading order."""
    message = failure.message
    for name, meaning in (_MEANINGS | _MEANINGS_OF_BACKEND.get(message.backend, {})).items():
        size = getattr(message, name)
        if size is not None:
            yield Term(name.replace("_", " "), size, meaning)
    for pid, size in message.others:
        yield Term(f"process {pid}", size, "this process" if pid == failure.own_pid else "another process")
    if failure.others_bytes:
        meaning = "other processes, as the driver listed them afterwards"
        yield Term("others", ByteRange.exact(failure.others_bytes), meaning)


def grouped(holders: tuple[Holder, ...]) -> list[Named]:
    """What each name holds, the largest first; unnamed storages are one entry per category.

    A group is named by its variable, and what nearly all of it is under (`trainer.kept` of a trainer) is an entry of its own;
    frames, outputs and unnamed storages are named by the path of the largest.
    """
    groups: dict[tuple[str, str], list[Holder]] = {}
    for holder in holders:
        root = root_of(holder.path)
        groups.setdefault((root, "" if root else holder.category), []).append(holder)
    named = []
    for (root, _), group in groups.items():
        largest = max(group, key=lambda holder: holder.nbytes)
        if len(group) == 1 or root in ("", OF_ERRORS, OUTPUTS):
            named.append(_named(largest.path, group))
            continue
        start = f"{root}()" if largest.path.startswith(f"{root}() ") else root
        branch = _branch(group, largest.path, start)
        under = [holder for holder in group if _is_under(holder.path, branch)]
        rest = [holder for holder in group if not _is_under(holder.path, branch)]
        named += [_named(path, part) for path, part in ((branch, under), (start, rest)) if part]
    return sorted(named, key=lambda one: -one.nbytes)


def _branch(group: list[Holder], path: str, start: str) -> str:
    """The longest beginning of a path that nine tenths of the bytes are under, up to the first index or graph."""
    end = min((at for sign in ("[", ".grad_fn") if (at := path.find(sign, len(start))) >= 0), default=len(path))
    steps = [match.start() for match in _STEP.finditer(path, len(start) + 1, end)]
    total = sum(holder.nbytes for holder in group)
    for length in (end, *reversed(steps)):
        if 10 * sum(holder.nbytes for holder in group if _is_under(holder.path, path[:length])) >= 9 * total:
            return path[:length]
    return start


def _is_under(path: str, branch: str) -> bool:
    return path.startswith(branch) and path[len(branch) : len(branch) + 1] in ("", ".", "[", " ", "(")


def _named(path: str, group: list[Holder]) -> Named:
    categories = " ".join(sorted({holder.category for holder in group}))
    return Named(path, categories, len(group), sum(holder.nbytes for holder in group))
