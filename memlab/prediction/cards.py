"""The GPUs that a run can be predicted for: `find("RTX 4060")`, `Card(...)` for your own, `cards` for the known ones.

Omitted fields are estimated from known GPUs, as a range, and listed among the assumptions. A calibration on this machine
replaces estimates. Limits: figures are for Linux drivers. On Windows
PyTorch reports the nominal size, part of which the desktop uses.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memlab.errors import MemlabError, PredictionError
from memlab.prediction import calibration_file
from memlab.prediction.catalogue import CARDS, CONTEXTS, NOT_ON_A_THREAD
from memlab.units import ByteRange, GiB, MiB, format_bytes, parse_bytes

_SHARES_SEEN = {
    ("H100",): (0.98, 0.995),
    ("RTX A", "RTX PRO", "A10G", "A40"): (0.91, 0.99),
    ("",): (0.95, 0.99),
}
"""The share of its memory that PyTorch sees, by prefix of the name, from the catalog: HBM, whose error correction has extra
memory (0.984 to 0.992); professional GPUs with GDDR, where error correction uses part of it (A10 0.916, others up to 0.987);
consumer GPUs (RTX 3050 Laptop 0.953, RTX 3090 0.988)."""
_DRIVERS_DIFFER = {1: 0.01, 2: 0.005}
"""The spread between drivers, as a share of the nominal size, if there are only one or two figures (T4: 1.2 %)."""
_LAST_DIGIT = GiB // 200

_CONTEXT_LOW = (25 * MiB, 2.2 * MiB)
_CONTEXT_HIGH = (75 * MiB, 4.4 * MiB)
"""A constant and a part per multiprocessor: these lines enclose all of `catalogue.CONTEXTS`, with 24 to 170 of them."""
_CONTEXT_HOPPER_HIGH = 900 * MiB
_CONTEXT_HOPPER_SOURCE = (
    "an H200 with driver 580 and PyTorch 2.11 (benchmarks/results/gpu-nvidia-h200-torch2.11.0.json): 518 MiB without a tensor, 676 "
    "with cuBLAS, 864 with cuDNN, cuSOLVER and cuFFT, too"
)
_CONTEXT_UNKNOWN = ByteRange(100 * MiB, 850 * MiB)
_CONTEXT_ROCM = ByteRange(256 * MiB, 2 * GiB)
_SMALLEST = 64 * MiB
_SIMILAR_SIZE = 1.5
"""GPUs of the same capability whose memory differs by at most this factor have a plausible number of multiprocessors."""
_NOT_GIVEN = ByteRange(-1, -1)
_ESTIMATED = "estimated from similar GPUs"
_ROCM = "ROCm: the allocator is the same code; workspaces and context are estimates that were never compared with a GPU"
KERNELS_CHANGE = (8, 0)
"""From this compute capability on there is flash attention; before, attention in bfloat16 is a matrix of all scores."""
_NO_KERNELS = "PyTorch's CUDA 13 builds have no kernels below capability 7.5: this card needs a build for CUDA 12.6"


@dataclass(frozen=True, slots=True)
class Card:
    """The memory-related facts of a GPU; sizes may be given as text ("8GiB").

    `total_bytes` is the nominal size. `usable_bytes` and `usable_high_bytes` bound what PyTorch sees of it (`total_memory`);
    if neither is given and the size is a whole number of GiB they are estimated, else they are `total_bytes`.
    `context_bytes` is a range (or one number) for the memory of the process outside PyTorch's allocator. The scratch buffers
    of kernels depend on `multiprocessors`: without it that of the best-known GPU of its capability and size is used, and
    `plausible_multiprocessors` is the range that a prediction covers.
    """

    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    context_bytes: ByteRange = _NOT_GIVEN
    usable_bytes: int = -1
    usable_high_bytes: int = -1
    multiprocessors: int = 0
    aliases: tuple[str, ...] = ()
    backend: str = "cuda"
    usable_source: str = ""
    context_source: str = ""
    assumptions: tuple[str, ...] = ()
    plausible_multiprocessors: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or len(self.name) > 200:
            raise PredictionError(f"a card needs a name, got {self.name!r:.80}.")
        self._set(total_bytes=_size("total_bytes", self.total_bytes))
        if self.total_bytes < _SMALLEST:
            raise PredictionError(
                f"{self.name!r} has {format_bytes(self.total_bytes)}: no card is below {format_bytes(_SMALLEST)}. "
                "Write a unit, for example 8GiB."
            )
        parts = self.compute_capability
        is_pair = isinstance(parts, tuple | list) and len(parts) == 2 and all(type(part) is int for part in parts)
        if not (is_pair and 3 <= parts[0] < 100 and 0 <= parts[1] < 10):
            raise PredictionError(f"compute_capability must be two numbers such as (8, 9), got {parts!r:.80}.")
        self._set(compute_capability=tuple(parts))
        if type(self.multiprocessors) is not int or not 0 <= self.multiprocessors <= 4096:
            raise PredictionError(f"multiprocessors must be a number up to 4096, got {self.multiprocessors!r:.80}.")
        if self.backend not in ("cuda", "rocm"):
            raise PredictionError(f'backend must be "cuda" or "rocm", got {self.backend!r:.80}.')
        self._fill_usable()
        self._fill_context()
        self._fill_multiprocessors()

    def _set(self, *assumed: str, **values: Any) -> None:
        for name, value in (*values.items(), ("assumptions", (*self.assumptions, *assumed))):
            object.__setattr__(self, name, value)

    def _fill_usable(self) -> None:
        low, high = self.usable_bytes, self.usable_high_bytes
        if low == -1 and self.total_bytes % GiB == 0:
            share = next(share for names, share in _SHARES_SEEN.items() if self.name.startswith(names))
            low, high = (round(self.total_bytes * part) for part in share)
            text = f"PyTorch sees {share[0]:.0%} to {share[1]:.0%} of the memory of {self.name}"
            self._set(text, usable_source=_ESTIMATED)
        elif low == -1:
            low = high = self.total_bytes
            self._set(usable_source="as given")
        low = _size("usable_bytes", low)
        high = low if high == -1 else _size("usable_high_bytes", high)
        if low < _SMALLEST // 2:
            raise PredictionError(f"usable bytes of {self.name!r} are {format_bytes(low)}: no card has so little.")
        if not low <= high <= self.total_bytes:
            raise PredictionError(
                f"usable bytes must not exceed the {format_bytes(self.total_bytes)} of {self.name!r}, "
                f"got {format_bytes(low)} to {format_bytes(high)}."
            )
        self._set(usable_bytes=low, usable_high_bytes=high)

    def _fill_context(self) -> None:
        given: Any = self.context_bytes
        if given is None or given == (-1, -1):
            self._estimate_context()
            return
        ends = given if isinstance(given, tuple | list) else (given, given)
        if len(ends) != 2:
            raise PredictionError(f"context_bytes must be (low, high) or one size, got {given!r:.80}.")
        low, high = (0 if value == 0 else _size("context_bytes", value) for value in ends)
        if not low <= high < self.usable_bytes:
            raise PredictionError(
                f"context_bytes must be (low, high) below the {format_bytes(self.usable_bytes)} that {self.name!r} has, "
                f"got {format_bytes(low)} and {format_bytes(high)}."
            )
        self._set(context_bytes=ByteRange(low, high), context_source=self.context_source or "as given")

    def _estimate_context(self) -> None:
        if self.backend == "rocm":
            likely, source = _CONTEXT_ROCM, "not known for ROCm"
        else:
            ends = (round(fixed + each * self.multiprocessors) for fixed, each in (_CONTEXT_LOW, _CONTEXT_HIGH))
            likely = ByteRange(*ends) if self.multiprocessors else _CONTEXT_UNKNOWN
            count = len({name for name, *_ in CONTEXTS})
            general = f"a line around {len(CONTEXTS)} out-of-memory messages of {count} cards"
            source = "; ".join([general, *(address for name, _, address in CONTEXTS if name == self.name)])
            if self.compute_capability == (9, 0):
                likely = ByteRange(likely.low, _CONTEXT_HOPPER_HIGH)
                source += f"; above it {_CONTEXT_HOPPER_SOURCE}"
        half = self.usable_bytes // 2  # a small card is a partition of a larger one
        self._set(context_bytes=ByteRange(*(min(end, half) for end in likely)), context_source=source)
        self._set(f"the CUDA context takes {self.context_bytes}")

    def _fill_multiprocessors(self) -> None:
        if self.multiprocessors:
            if self.plausible_multiprocessors == (0, 0):
                self._set(plausible_multiprocessors=(self.multiprocessors, self.multiprocessors))
            return
        same = [row for row in CARDS if row[2] == self.compute_capability]
        same = same or [row for row in CARDS if row[2][0] == self.compute_capability[0]] or list(CARDS)
        factors = {}
        for name, gib, *_ in same:
            smaller, larger = sorted((gib * GiB, self.total_bytes))
            factors[name] = larger / smaller
        # The nearest in size (PyTorch sees a little less than the nominal size), and of those the one with the most sources.
        model = min(same, key=lambda row: (round(factors[row[0]], 1), -len(row[5]), -row[3]))
        counts = [row[3] for row in same if factors[row[0]] <= _SIMILAR_SIZE] or [row[3] for row in same]
        low, high = min(model[3], *counts), max(model[3], *counts)
        between = f", or between {low} and {high}" if low < high else ""
        self._set(
            f"{self.name} has {model[3]} multiprocessors as {model[0]} has{between}: kernels take scratch buffers for each",
            multiprocessors=model[3],
            plausible_multiprocessors=(low, high),
        )

    @property
    def usable_range(self) -> ByteRange:
        """The memory that PyTorch sees."""
        return ByteRange(self.usable_bytes, self.usable_high_bytes)

    @property
    def room_bytes(self) -> ByteRange:
        """What PyTorch's allocator can reserve if there is no other process."""
        return self.usable_range - self.context_bytes

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return f"{self.name}: {self.usable_range} usable, capability {major}.{minor}, context {self.context_bytes}"


def _size(field: str, value: Any) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise MemlabError("")
        return parse_bytes(value)
    except MemlabError:
        raise PredictionError(f'{field} must be a size in bytes or a text such as "8GiB", got {value!r:.80}.') from None


# --- the catalog and calibrations -----------


@functools.cache
def _known() -> dict[str, Card]:
    found = {}
    for name, gib, capability, count, aliases, seen in CARDS:
        more, where = NOT_ON_A_THREAD.get(name, ((), ""))
        total, is_rocm = round(gib * GiB), name.startswith("MI")
        given = [*(figure for figure, _ in seen), *more]
        figures = [round(figure * GiB) if isinstance(figure, float) else figure for figure in given]
        sources = dict.fromkeys([*(address for _, address in seen), where])
        margin = round(_DRIVERS_DIFFER.get(len(figures), 0) * total) + _LAST_DIGIT
        low, high = (min(figures) - margin, min(max(figures) + margin, total)) if figures else (-1, -1)
        warnings = [_ROCM] if is_rocm else [_NO_KERNELS] if capability < (7, 5) else []
        found[name] = Card(
            name, total, capability, usable_bytes=low, usable_high_bytes=high, multiprocessors=count, aliases=aliases,
            backend="rocm" if is_rocm else "cuda", usable_source="; ".join(filter(None, sources)) or _ESTIMATED,
            assumptions=tuple(warnings),
        )  # fmt: skip
    return found


def applied(card: Card) -> Card:
    """The card with this machine's calibration of it, for this PyTorch or else the latest, if there is one."""
    fitting = [one for one in calibration_file.kept() if one.card == card.name or name_of(one.card) == card.name]
    if not fitting:
        return card
    import torch  # here: most cards were never measured, and then their figures need no torch

    ours = [one for one in fitting if one.torch == torch.__version__]
    measured = max(ours or fitting, key=lambda one: one.measured_at_s)
    source = f"measured here with driver {measured.driver}, PyTorch {measured.torch}"
    usable = measured.total_memory_bytes
    return dataclasses.replace(
        card,
        total_bytes=max(card.total_bytes, usable),
        usable_bytes=usable,
        usable_high_bytes=usable,
        usable_source=source,
        context_bytes=ByteRange(*(min(end, usable - 1) for end in measured.context_bytes)),
        context_source=source,
        assumptions=tuple(text for text in card.assumptions if "takes" not in text and "PyTorch sees" not in text),
    )


# --- names ---

_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|graphics|gpu|generation|rtx|gtx|[^a-z0-9]")
_TWO_SIZES = {"A100": "A100 80GB", "V100": "V100 32GB"}
"""Names that two sizes share: the smaller one is used, and an assumption says so."""


def _plain_name(name: str) -> str:
    """Normalize a name: lower case, without vendors, blanks and punctuation; "16 GiB", "16G" and "16 GB" are equal."""
    text = re.sub(r"(\d)\s*g(i?b)?\b", r"\1gb", name.lower().strip())
    return _NOISE.sub("", text)


@functools.cache
def _index() -> dict[str, str]:
    names = {_plain_name(alias): row[0] for row in CARDS for alias in row[4]}
    own = {_plain_name(row[0]): row[0] for row in CARDS}
    # "RTX 4090 24GB" says no more than "RTX 4090".
    sized = {f"{_plain_name(row[0])}{row[1]:.0f}gb": row[0] for row in CARDS if "gb" not in _plain_name(row[0])}
    return {**sized, **names, **own}


def name_of(reported: str) -> str:
    """The catalog's name for a driver's name; "" if it is not in the catalog."""
    return _index().get(_plain_name(reported), "")


def find(card: str | int | Card) -> Card:
    """The card of that name, with this machine's calibration; a size ("8GiB") is a card too."""
    if isinstance(card, Card):
        return card
    if isinstance(card, str) and (name := name_of(card)):
        found = cards[name]
        for short, other in _TWO_SIZES.items():
            if _plain_name(card) == _plain_name(short):
                text = f"{short} is taken as {name}; there is {other} too"
                found = dataclasses.replace(found, assumptions=(*found.assumptions, text))
        return found
    if isinstance(card, str):
        for one in calibration_file.kept():  # a card that is not in the catalog
            if one.card.lower() == card.strip().lower():
                capability = (one.capability_major, one.capability_minor)
                known = Card(one.card, one.total_memory_bytes, capability, multiprocessors=one.multiprocessors)
                return applied(known)
    try:
        if isinstance(card, str) and card.strip().isdigit():  # "4070": the number of a card, not of bytes
            raise MemlabError("")
        total = parse_bytes(card)
    except MemlabError:
        raise _unknown(str(card)) from None
    assumed = "no card was named: capability 8.6 is assumed (cuBLAS workspaces, attention kernels depend on it)"
    return Card(f"{format_bytes(total)} card", total, (8, 6), assumptions=(assumed,))


_SIZE_LIKE = re.compile(r"[-+]?[\d.]+(?:e[-+]?\d+)? ?[kmgtpe]?i?b\w{0,3}|[-+][\d.]+|nan|[-+]?inf", re.IGNORECASE)


def _unknown(name: str) -> PredictionError:
    if _SIZE_LIKE.fullmatch(name.strip()):
        what = "is neither a card nor a size. A size is a number and a unit, such as 8GiB."
        return PredictionError(f"{name[:80]!r} {what}")
    near = difflib.get_close_matches(_plain_name(name), _index(), 6, 0.5)
    names = list(dict.fromkeys(_index()[each] for each in near))[:3] or ["RTX 4060", "T4", "A100 80GB"]
    hint = f"Did you mean {', '.join(names)}?"
    if not near:
        hint = (
            f"Names are like {', '.join(names)}; import memlab; memlab.cards lists all (in a terminal: memlab cards)."
        )
    return PredictionError(f"no card is known as {name[:80]!r}. {hint} A size such as 8GiB will do too.")


class Cards(Mapping[str, Card]):
    """The known cards by name; prints as a table."""

    def __getitem__(self, name: str) -> Card:
        return applied(_known()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_known())

    def __len__(self) -> int:
        return len(CARDS)

    def __repr__(self) -> str:
        lines = [("card", "usable", "capability", "context")]
        for name, card in self.items():
            usable = f"{card.usable_range}{' (est.)' if card.usable_source == _ESTIMATED else ''}"
            lines.append((name, usable, ".".join(map(str, card.compute_capability)), str(card.context_bytes)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (map(str.ljust, line, widths) for line in lines)
        return "\n".join("  ".join(texts).rstrip() for texts in padded)

    def to_pandas(self) -> Any:
        """One row per card, with the sources."""
        import pandas

        frame = pandas.DataFrame([dataclasses.asdict(card) for card in self.values()]).set_index("name")
        frame[["context_low_bytes", "context_high_bytes"]] = frame.pop("context_bytes").tolist()
        return frame.drop(columns="plausible_multiprocessors")


cards = Cards()
"""The known cards."""
