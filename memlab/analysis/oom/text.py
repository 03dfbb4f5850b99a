"""Parse out-of-memory messages: PyTorch 1.0 to 2.15 on CUDA, ROCm, XPU, MPS and the CPU.

Messages give sizes with two decimals, so each size is an interval. Nothing is assumed that a text does not say.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from memlab.errors import MemlabError
from memlab.units import ByteRange

IMPOSSIBLE = "the size in it is impossible"
"""The start of the note about an impossible size."""
MAX_CHARACTERS = 2_000_000
"""Only the end of a longer text is read: the error that ended a program comes last."""


@dataclass(frozen=True, slots=True)
class Message:
    """The terms of one message; None if it does not say.

    `reserved` is all that PyTorch's allocator held, `cached` the part of it that no tensor used; older wordings give one,
    newer ones the other. `process` is this process with its context, `others` the other processes by pid.
    """

    backend: str
    device: int | None = None
    asked: ByteRange | None = None
    capacity: ByteRange | None = None
    free: ByteRange | None = None
    allowed: ByteRange | None = None
    allocated: ByteRange | None = None
    reserved: ByteRange | None = None
    cached: ByteRange | None = None
    private_pools: ByteRange | None = None
    process: ByteRange | None = None
    elsewhere: ByteRange | None = None
    others: tuple[tuple[int, ByteRange], ...] = ()
    notes: tuple[str, ...] = ()
    count: int = field(default=1, compare=False)

    @property
    def label(self) -> str:
        """The device as users call it."""
        kind = {"CUDA": "cuda", "HIP": "cuda", "XPU": "xpu", "MPS": "mps", "NPU": "npu"}.get(self.backend, "cpu")
        return kind if self.device is None or kind in ("cpu", "mps") else f"{kind}:{self.device}"


# --- sizes ----------------------------------------------------------------------------------------------------------------

_SIZE = r"(\d+(?:\.\d*)?) ?(bytes|[KMGTPE]i?B)\b"
_NO_SIZE = 1 << 60
"""Sizes from here on come from a counter that failed: -1 as unsigned is printed as 17179869184.00 GiB."""


def amount(number: str, unit: str) -> ByteRange | None:
    """Parse a size; PyTorch's GB and GiB both mean the binary unit. None for a counter that failed.

    >>> amount("20.00", "MiB"), amount("35184372088832", "bytes")
    (ByteRange(low=20966278, high=20976762), ByteRange(low=35184372088832, high=35184372088832))
    """
    value, scale = Fraction(number.rstrip(".")), 1 << 10 * ("b" + "KMGTPE").index(unit[0])
    if value * scale >= _NO_SIZE:
        return None
    if unit == "bytes":
        return ByteRange.exact(int(value))
    # Half of the last digit to either side; a whole number may also have been cut off.
    decimals = len(number.partition(".")[2])
    below, above = Fraction(1, 2 * 10**decimals), Fraction(1, 2 * 10**decimals if decimals else 1)
    return ByteRange(max(math.ceil((value - below) * scale), 0), math.floor((value + above) * scale))


# --- wordings -------------------------------------------------------------------------------------------------------------

# Start of a message -> its backend, "" if the first word names it.
_BEGINS = (
    (r"\b(?:CUDA|HIP|XPU|NPU|MUSA|MLU|PrivateUse1) out of memory\b", ""),
    (r"\bMPS backend out of memory\b|\bInvalid buffer size: \d", "MPS"),
    (r"\bAllocation on device \d+ would exceed allowed memory\b", "CUDA"),  # backend:cudaMallocAsync
    (r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b", "CPU"),
    (r"\bnot enough memory: you tried to allocate", "CPU"),
    (r"\bUnable to allocate \S+ ?(?:bytes|[KMGTPE]iB) for an array\b", "numpy"),
    (r"\b(?:CUDA|HIP)(?: driver)? error: out of memory\b|\bcuda runtime error \(2\) ?: out of memory\b", ""),
    (r"\bCUBLAS_STATUS_ALLOC_FAILED\b|\bCUDNN_STATUS_ALLOC_FAILED\b|\bcudaErrorMemoryAllocation\b", "CUDA"),
    (r"\bCUDA_ERROR_OUT_OF_MEMORY\b|\bCuda failure \d* ?'out of memory'", "CUDA"),
    (r"\bhipErrorOutOfMemory\b|\bHIPBLAS_STATUS_ALLOC_FAILED\b", "HIP"),
)
_BEGIN = re.compile("|".join(f"({pattern})" for pattern, _ in _BEGINS))
_BARE = re.compile(r"\b[Tt]ried to allocate \d")
"""A message pasted without its first words."""
_LONGEST = 2000
"""Maximum length of one message; a list of processes is its longest part."""

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
    """Whether a text contains an out-of-memory message."""
    return _BEGIN.search(_clean(text)) is not None


def read_message(text: str) -> Message:
    """The last out-of-memory message in a text, preferring those with sizes; MemlabError if there is none."""
    clean = _clean(text)
    begins = list(_BEGIN.finditer(clean)) or list(_BARE.finditer(clean))
    starts, found = [begin.start() for begin in begins] + [len(clean)], []
    for begin, end in zip(begins, starts[1:], strict=True):
        backend = _BEGINS[begin.lastindex - 1][1] if begin.lastindex else "CUDA"
        part = clean[begin.start() : min(end, begin.start() + _LONGEST)]
        found.append(_message(part, backend or begin[0].split()[0].upper()))
    if found:
        last = ([message for message in found if message.asked is not None] or found)[-1]
        return dataclasses.replace(last, count=len(set(found)))
    for words, meaning in _NOT_MEMORY.items():
        if words in clean:
            raise MemlabError(f"this is another error: {meaning}.")
    shown = " ".join(text.split())[:80]
    what = f"no out-of-memory message in {shown!r}" if shown else "the text is empty"
    raise MemlabError(f"{what}: paste the line that begins with, for example, 'CUDA out of memory. Tried to allocate'.")


def _clean(text: str) -> str:
    """One line without colours, ranks, line breaks (also escaped ones) and doubled blanks."""
    end = _ANSI.sub("", text[-MAX_CHARACTERS:])
    return " ".join(_RANK.sub("", end).replace("\\n", " ").split())


def _message(text: str, backend: str) -> Message:
    terms: dict[str, Any] = {}
    notes = [note for words, note in _NOTES.items() if words in text]
    for name, patterns in _TERMS.items():
        found = next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)
        terms[name] = amount(found[1], found[2]) if found is not None else None
        if name == "asked" and found is not None and terms[name] is None:
            size = f"{found[1]} {found[2]}" if len(found[1]) < 30 else f"a number of {len(found[1])} digits"
            why = "it was computed wrong, for example from a negative one, or the text is not PyTorch's"
            notes.append(f"{IMPOSSIBLE} ({size}): {why}")
    allocated, reserved, cached = terms["allocated"], terms["reserved"], terms["cached"]
    # PyTorch 1.0 to 1.3 and from 2.1 on give cached without allocated, 1.4 to 2.0 give their sum.
    if allocated and cached and not reserved:
        terms["reserved"] = allocated + cached
    elif allocated and reserved and not cached:
        terms["cached"] = (reserved - allocated).at_least(0)
    processes = ((int(pid), amount(*size)) for pid, *size in _PROCESS.findall(text))
    others = tuple((pid, size) for pid, size in processes if size is not None)
    device = _DEVICE.search(text)
    return Message(backend, int(device[1]) if device else None, others=others, notes=tuple(notes), **terms)
