"""What a message of out-of-memory says, read from its text: PyTorch 0.4 to 2.15 on CUDA, ROCm, XPU, NPU, MPS and the CPU.

Messages give sizes with two decimals, so each size is an interval. Nothing is read into what a text does not say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from memlab.errors import MemlabError

IMPOSSIBLE = "the size that it names is beyond all memory"
"""How the note begins of a size that is no size."""
MAX_CHARACTERS = 2_000_000
"""Of a longer text only the end is read: what ended a program is told last."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A size known between two bounds, equal where it is known to the byte."""

    low_bytes: int
    high_bytes: int

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.low_bytes + other.low_bytes, self.high_bytes + other.high_bytes)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.low_bytes - other.high_bytes, self.high_bytes - other.low_bytes)

    @property
    def is_exact(self) -> bool:
        """Whether it is known to the byte."""
        return self.low_bytes == self.high_bytes

    @property
    def middle_bytes(self) -> int:
        """The middle between the bounds."""
        return (self.low_bytes + self.high_bytes) // 2

    def not_negative(self) -> Amount:
        """The same, where less than nothing cannot be."""
        return Amount(max(self.low_bytes, 0), max(self.high_bytes, 0))


def exactly(count: int) -> Amount:
    """A size known to the byte."""
    return Amount(count, count)


@dataclass(frozen=True, slots=True)
class Message:
    """The terms of one message; None is what it does not say.

    `reserved` is all that PyTorch's allocator held, `cached` the part of it that no tensor used; older wordings give one,
    newer ones the other. `process` is this process with its context, `others` the other processes by pid.
    """

    backend: str
    device: int | None = None
    asked: Amount | None = None
    capacity: Amount | None = None
    free: Amount | None = None
    allowed: Amount | None = None
    allocated: Amount | None = None
    reserved: Amount | None = None
    cached: Amount | None = None
    private_pools: Amount | None = None
    process: Amount | None = None
    elsewhere: Amount | None = None
    others: tuple[tuple[int, Amount], ...] = ()
    notes: tuple[str, ...] = ()
    count: int = field(default=1, compare=False)

    @property
    def has_sizes(self) -> bool:
        """Whether it says more than that memory ran out."""
        return self.asked is not None

    @property
    def label(self) -> str:
        """The device as users name it."""
        kind = {"CUDA": "cuda", "HIP": "cuda", "XPU": "xpu", "NPU": "npu", "MPS": "mps"}.get(self.backend, "cpu")
        return kind if self.device is None or kind in ("cpu", "mps") else f"{kind}:{self.device}"


# --- sizes ----------------------------------------------------------------------------------------------------------------

_SIZE = r"(\d+(?:\.\d*)?) ?(bytes|[KMGTPE]i?B)\b"
_POWER = {letter: 10 * power for power, letter in enumerate("KMGTPE", 1)}
_NO_SIZE = 1 << 60
"""Sizes from here on are a counter that failed: -1 read as unsigned is written 17179869184.00 GiB."""


def amount(number: str, unit: str) -> Amount | None:
    """A size as a message writes it; PyTorch's GB and GiB both mean the binary unit. None for a counter that failed.

    >>> amount("20.00", "MiB"), amount("35184372088832", "bytes")
    (Amount(low_bytes=20966278, high_bytes=20976762), Amount(low_bytes=35184372088832, high_bytes=35184372088832))
    """
    value = Fraction(number.rstrip("."))
    if unit == "bytes":
        return exactly(int(value)) if value < _NO_SIZE else None
    scale = 1 << _POWER[unit[0]]
    if value * scale >= _NO_SIZE:
        return None
    # Half of the last digit to either side; a whole number may also have been cut off (PyTorch 0.x).
    decimals = len(number.partition(".")[2])
    below, above = Fraction(1, 2 * 10**decimals), Fraction(1, 2 * 10**decimals if decimals else 1)
    return Amount(max(math.ceil((value - below) * scale), 0), math.floor((value + above) * scale))


# --- wordings -------------------------------------------------------------------------------------------------------------

# Where a message begins -> the backend it comes from, "" where the first word tells.
_BEGINS = (
    (r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU|PrivateUse1) out of memory\b", ""),
    (r"\bMPS backend out of memory\b|\bInvalid buffer size: \d", "MPS"),
    (r"\bAllocation on device \d+ would exceed allowed memory\b", "CUDA"),
    (
        r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b|\bnot enough memory: you tried to allocate",
        "CPU",
    ),
    (r"\bUnable to allocate \S+ ?(?:bytes|[KMGTPE]iB) for an array\b", "numpy"),
    (r"\b(CUDA|HIP)(?: driver)? error: out of memory\b|\b(cuda) runtime error \(2\) ?: out of memory\b", ""),
    (r"\bCUBLAS_STATUS_ALLOC_FAILED\b|\bCUDNN_STATUS_ALLOC_FAILED\b|\bcudaErrorMemoryAllocation\b", "CUDA"),
    (r"\bCUDA_ERROR_OUT_OF_MEMORY\b|\bCuda failure \d* ?'out of memory'", "CUDA"),
    (r"\bhipErrorOutOfMemory\b|\bHIPBLAS_STATUS_ALLOC_FAILED\b", "HIP"),
)
_BEGIN = re.compile("|".join(f"({pattern})" for pattern, _ in _BEGINS))
_BARE = re.compile(r"\b[Tt]ried to allocate \d")
"""A message that was pasted without its first words."""
_LONGEST = 2000
"""Characters of one message; a list of processes is the longest part of it."""

_TERMS: dict[str, tuple[str, ...]] = {
    "asked": (
        rf"[Tt]ried to allocate {_SIZE}",
        rf"Requested(?: size)? ?: {_SIZE}",
        rf"Unable to allocate {_SIZE}",
        rf"Invalid buffer size: {_SIZE}",
    ),
    "capacity": (rf"{_SIZE} total capacity", rf"total capaci?ty of {_SIZE}", rf"Device limit ?: {_SIZE}"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free\b", rf"Free \(according to CUDA\) ?: {_SIZE}"),
    "allowed": (rf"{_SIZE} allowed;", rf"max allowed: {_SIZE}", rf"user-supplied memory fraction\) ?: {_SIZE}"),
    "allocated": (
        rf"{_SIZE} already allocated",
        rf"{_SIZE} is allocated by PyTorch",
        rf"[Cc]urrently allocated ?: {_SIZE}",
        rf"MPS allocated: {_SIZE}",
    ),
    "reserved": (rf"{_SIZE} reserved in total",),
    "cached": (rf"{_SIZE} cached", rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "private_pools": (rf"with {_SIZE} allocated in private pools",),
    "process": (rf"this process has {_SIZE} memory in use",),
    "elsewhere": (rf"other allocations: {_SIZE}",),
}
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_DEVICE = re.compile(r"\b(?:GPU|NPU|device) (\d+)\b")
_NOTES = {
    "more than 1EB": "it asked for more than an exabyte: a size was computed wrong, for example a negative one",
    "preemptively rejected": "it was refused without trying, because the limit set for this process would be passed",
    "Invalid buffer size": "Metal refuses a single buffer of this size, however much is free",
}
_NOT_MEMORY = {
    "out of resource: shared memory": "that is the shared memory inside one kernel's block, not the device's memory: use "
    "smaller blocks or fewer stages",
    "insufficient shared memory (shm)": "that is the machine's /dev/shm, where DataLoader workers pass batches: give it "
    "more (docker run --shm-size) or use fewer workers",
}

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"^\s*\[rank\d+\]:\s?", re.MULTILINE)


def is_out_of_memory(text: str) -> bool:
    """Whether a text tells of memory that ran out."""
    return _BEGIN.search(_clean(text)) is not None


def read_message(text: str) -> Message:
    """The last message of out-of-memory in a text, preferring those with sizes; MemlabError where there is none."""
    clean = _clean(text)
    found = list(_messages(clean))
    if found:
        with_sizes = [message for message in found if message.has_sizes]
        last = (with_sizes or found)[-1]
        return _counted(last, len(set(found)))
    for words, meaning in _NOT_MEMORY.items():
        if words in clean:
            raise MemlabError(f"this message is of something else: {meaning}.")
    shown = " ".join(text.split())[:80]
    what = f"no message of out-of-memory in {shown!r}" if shown else "the text is empty"
    raise MemlabError(f"{what}: paste the line that begins with, for example, 'CUDA out of memory. Tried to allocate'.")


def _counted(message: Message, count: int) -> Message:
    return Message(**{name: getattr(message, name) for name in Message.__slots__} | {"count": count})


def _clean(text: str) -> str:
    """One line without colours, ranks, line breaks (also escaped ones) and doubled blanks."""
    end = _ANSI.sub("", text[-MAX_CHARACTERS:])
    return " ".join(_RANK.sub("", end).replace("\\n", " ").split())


def _messages(clean: str) -> Iterator[Message]:
    begins = list(_BEGIN.finditer(clean)) or list(_BARE.finditer(clean))
    starts = [begin.start() for begin in begins] + [len(clean)]
    for begin, end in zip(begins, starts[1:], strict=True):
        yield _message(clean[begin.start() : min(end, begin.start() + _LONGEST)], _backend(begin))


def _backend(begin: re.Match[str]) -> str:
    """The backend that a beginning names, or stands for."""
    for pattern, backend in _BEGINS:
        known = re.fullmatch(pattern, begin[0])
        if known is not None:
            return backend or next(word for word in known.groups() if word).upper()
    return "CUDA"


def _message(text: str, backend: str) -> Message:
    device = _DEVICE.search(text)
    terms: dict[str, Any] = {name: _first(patterns, text) for name, patterns in _TERMS.items()}
    allocated, reserved, cached = terms["allocated"], terms["reserved"], terms["cached"]
    # PyTorch 1.0 to 1.3 and 2.1 on say what is cached beyond the allocated, 1.4 to 2.0 say both together.
    if allocated and cached and not reserved:
        terms["reserved"] = allocated + cached
    elif allocated and reserved and not cached:
        terms["cached"] = (reserved - allocated).not_negative()
    others = [(int(pid), size) for pid, *parts in _PROCESS.findall(text) if (size := amount(*parts)) is not None]
    notes = tuple(note for words, note in _NOTES.items() if words in text) + tuple(_impossible(terms["asked"], text))
    return Message(backend, int(device[1]) if device else None, others=tuple(others), notes=notes, **terms)


def _impossible(asked: Amount | None, text: str) -> Iterator[str]:
    """A note of a size that stands there and cannot be one."""
    found = next(filter(None, (re.search(pattern, text) for pattern in _TERMS["asked"])), None)
    if asked is None and found is not None:
        size = f"{found[1]} {found[2]}" if len(found[1]) < 30 else f"a number of {len(found[1])} digits"
        yield f"{IMPOSSIBLE} ({size}): it was computed wrong, for example from a negative one, or the text is not PyTorch's"


def _first(patterns: tuple[str, ...], text: str) -> Amount | None:
    """The size that the first fitting wording gives."""
    for pattern in patterns:
        found = re.search(pattern, text)
        if found is not None:
            return amount(found[1], found[2])
    return None
