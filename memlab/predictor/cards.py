"""The cards that a run can be predicted for: `find("RTX 4060")`, `Card(...)` for one's own, `cards` for the known ones.

Each says how much of its memory PyTorch sees and what the CUDA context takes of it, as intervals with their sources.
Limits: figures are those of Linux drivers. On Windows PyTorch reports the nominal size, part of which the desktop holds.
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
from memlab.predictor.catalogue import CARDS, CONTEXTS, NOT_ON_A_THREAD, Seen
from memlab.units import GiB, MiB, format_bytes, parse_bytes

Interval = tuple[int, int]

_SHARE_SEEN = (0.95, 0.99)
"""How much of a consumer card's memory PyTorch sees: 0.953 (RTX 3050 Laptop) to 0.988 (RTX 3090) of those in the catalogue."""
_SHARE_SEEN_ECC = (0.91, 0.99)
"""Of professional cards with GDDR memory, where error correction takes its part if it is on: 0.916 (A10) to 0.987."""
_SHARE_SEEN_HBM = (0.98, 0.995)
"""Of those with HBM, which has error correction beside: 0.984 (A100 40GB) to 0.992 (V100 32GB)."""
_ECC = ("RTX A", "RTX PRO", "A10G", "A40")
_HBM = ("H100",)

_DRIVERS_DIFFER = {1: 0.01, 2: 0.005}
"""By how much of the nominal size other drivers may differ where there are only one or two figures (of T4s: 1.2 %)."""
_LAST_DIGIT = GiB // 200

_CONTEXT_LOW = (25 * MiB, 2.2 * MiB)
_CONTEXT_HIGH = (75 * MiB, 4.4 * MiB)
"""A fixed part and one for each multiprocessor: these lines enclose all of `catalogue.CONTEXTS`, 24 to 170 of them."""
_CONTEXT_UNKNOWN = (100 * MiB, 850 * MiB)
_CONTEXT_ROCM = (256 * MiB, 2 * GiB)
_SMALLEST = 64 * MiB
_GENERAL_SOURCE = "estimated from its relatives"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as far as memory is concerned; sizes may be given as texts ("8GiB").

    `total_bytes` is what it is sold with. `usable_bytes` is what PyTorch sees of it at least (its `total_memory`) and
    `usable_high_bytes` at most; where neither is given and the size is a whole number of GiB they are estimated, else they are
    `total_bytes`. `context_bytes` is an interval (or one number) for what the process takes beside PyTorch's allocator.
    """

    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    context_bytes: Interval = (-1, -1)
    usable_bytes: int = -1
    usable_high_bytes: int = -1
    multiprocessors: int = 0
    aliases: tuple[str, ...] = ()
    backend: str = "cuda"
    usable_source: str = ""
    context_source: str = ""
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.name)
        self._set(total_bytes=_size("total_bytes", self.total_bytes))
        if self.total_bytes < _SMALLEST:
            small = f"{self.name!r} has {format_bytes(self.total_bytes)}"
            raise PredictionError(
                f"{small}: no card is below {format_bytes(_SMALLEST)}. Write a unit, for example 8GiB."
            )
        self._set(compute_capability=_capability(self.compute_capability))
        if type(self.multiprocessors) is not int or not 0 <= self.multiprocessors <= 4096:
            raise PredictionError(f"multiprocessors must be a number up to 4096, got {self.multiprocessors!r:.80}.")
        if self.backend not in ("cuda", "rocm"):
            raise PredictionError(f'backend must be "cuda" or "rocm", got {self.backend!r:.80}.')
        self._fill_usable()
        self._fill_context()

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _fill_usable(self) -> None:
        low, high = self.usable_bytes, self.usable_high_bytes
        if low == -1 and self.total_bytes % GiB == 0:
            share = _share_seen(self.name)
            low, high = (round(self.total_bytes * part) for part in share)
            self._set(usable_source=_GENERAL_SOURCE)
            self._assume(f"PyTorch sees {share[0]:.0%} to {share[1]:.0%} of the memory of {self.name}")
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
        given = self.context_bytes
        if given == (-1, -1) or given is None:
            low, high = _context(self.multiprocessors, self.backend)
            half = self.usable_bytes // 2  # a small card is somebody's share of one
            self._set(context_bytes=(min(low, half), min(high, half)), context_source=_context_source(self))
            self._assume(f"the CUDA context takes {_span(self.context_bytes)}")
            return
        interval = given if isinstance(given, tuple | list) else (given, given)
        if len(interval) != 2:
            raise PredictionError(f"context_bytes must be (low, high) or one size, got {given!r:.80}.")
        low, high = (0 if value == 0 else _size("context_bytes", value) for value in interval)
        if not low <= high < self.usable_bytes:
            raise PredictionError(
                f"context_bytes must be (low, high) below the {format_bytes(self.usable_bytes)} that {self.name!r} has, "
                f"got {format_bytes(low)} and {format_bytes(high)}."
            )
        self._set(context_bytes=(low, high), context_source=self.context_source or "as given")

    def _assume(self, text: str) -> None:
        self._set(assumptions=(*self.assumptions, text))

    @property
    def room_bytes(self) -> Interval:
        """What PyTorch's allocator can reserve on it, when nobody else is there."""
        return self.usable_bytes - self.context_bytes[1], self.usable_high_bytes - self.context_bytes[0]

    def __str__(self) -> str:
        major, minor = self.compute_capability
        seen = _span((self.usable_bytes, self.usable_high_bytes))
        return f"{self.name}: {seen} usable, capability {major}.{minor}, context {_span(self.context_bytes)}"


def find(card: str | int | Card) -> Card:
    """The card of that name, with what a calibration on this machine found; a size ("8GiB") is a card too."""
    if isinstance(card, Card):
        return card
    if isinstance(card, str) and (name := _index().get(_plain(card))):
        return _said_twice(card, _calibrated(_known()[name]))
    if isinstance(card, str) and (own := _measured_here(card)):
        return own
    try:
        if isinstance(card, str) and card.strip().isdigit():  # "4070": the number of a card, not of bytes
            raise MemlabError("")
        return _of_size(parse_bytes(card))
    except PredictionError:
        raise
    except MemlabError:
        near = difflib.get_close_matches(_plain(str(card)), _index(), 6, 0.5)
        names = list(dict.fromkeys(_index()[each] for each in near))[:3] or ["RTX 4060", "T4", "A100 80GB"]
        hint = (
            f"Did you mean {', '.join(names)}?"
            if near
            else f"Names are like {', '.join(names)}; memlab.cards lists all."
        )
        raise PredictionError(
            f"no card is known as {str(card)[:80]!r}. {hint} A size such as 8GiB will do too."
        ) from None


class Cards(Mapping[str, Card]):
    """The known cards by name; prints as a table."""

    def __getitem__(self, name: str) -> Card:
        card = _known()[name]
        return _calibrated(card)

    def __iter__(self) -> Iterator[str]:
        return iter(_known())

    def __len__(self) -> int:
        return len(CARDS)

    def __repr__(self) -> str:
        lines = [("card", "usable", "capability", "context")]
        for name in self:
            card = self[name]
            usable = _span((card.usable_bytes, card.usable_high_bytes)) + ("" if _is_seen(card) else " (est.)")
            lines.append((name, usable, ".".join(map(str, card.compute_capability)), _span(card.context_bytes)))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def to_pandas(self) -> Any:
        """One row per card, with the sources."""
        import pandas

        rows = [dataclasses.asdict(self[name]) for name in self]
        frame = pandas.DataFrame(rows).set_index("name")
        frame[["context_low_bytes", "context_high_bytes"]] = frame.pop("context_bytes").tolist()
        return frame


cards = Cards()
"""The known cards."""


# --- from the catalogue --------------------------------------------------------------------------------------------------


@functools.cache
def _known() -> dict[str, Card]:
    return {row[0]: _from_catalogue(*row) for row in CARDS}


def _from_catalogue(
    name: str,
    gib: float,
    capability: tuple[int, int],
    multiprocessors: int,
    aliases: tuple[str, ...],
    seen: tuple[Seen, ...],
) -> Card:
    total = round(gib * GiB)
    rocm = name.startswith("MI")
    usable, source = _usable(name, total, seen)
    return Card(
        name, total, capability, usable_bytes=usable[0], usable_high_bytes=usable[1], multiprocessors=multiprocessors,
        aliases=aliases, backend="rocm" if rocm else "cuda", usable_source=source, assumptions=_warnings(capability, rocm),
    )  # fmt: skip


def _usable(name: str, total: int, seen: tuple[Seen, ...]) -> tuple[Interval, str]:
    figures = [(round(figure * GiB) if isinstance(figure, float) else figure) for figure, _ in seen]
    sources = list(dict.fromkeys(address for _, address in seen))
    if name in NOT_ON_A_THREAD:
        more, source = NOT_ON_A_THREAD[name]
        figures += [round(figure * GiB) for figure in more]
        sources.append(source)
    if not figures:
        return (-1, -1), _GENERAL_SOURCE
    margin = round(_DRIVERS_DIFFER.get(len(figures), 0) * total) + _LAST_DIGIT
    return (min(figures) - margin, min(max(figures) + margin, total)), "; ".join(sources)


def _warnings(capability: tuple[int, int], rocm: bool) -> tuple[str, ...]:
    if rocm:
        return (
            "ROCm: the allocator is the same code, workspaces and context are estimates nobody compared with a card",
        )
    if capability < (7, 5):
        text = "PyTorch's CUDA 13 builds have no kernels below capability 7.5: this card needs a build for CUDA 12.6"
        return (text,)
    return ()


def _share_seen(name: str) -> tuple[float, float]:
    if name.startswith(_HBM):
        return _SHARE_SEEN_HBM
    return _SHARE_SEEN_ECC if name.startswith(_ECC) else _SHARE_SEEN


def _is_seen(card: Card) -> bool:
    return card.usable_source != _GENERAL_SOURCE


def _context(multiprocessors: int, backend: str) -> Interval:
    if backend == "rocm":
        return _CONTEXT_ROCM
    if not multiprocessors:
        return _CONTEXT_UNKNOWN
    (fixed_low, each_low), (fixed_high, each_high) = _CONTEXT_LOW, _CONTEXT_HIGH
    return round(fixed_low + each_low * multiprocessors), round(fixed_high + each_high * multiprocessors)


def _context_source(card: Card) -> str:
    if card.backend == "rocm":
        return "not known for ROCm"
    own = [address for name, _, address in CONTEXTS if name == card.name]
    general = f"a line around {len(CONTEXTS)} out-of-memory messages of {len({name for name, *_ in CONTEXTS})} cards"
    return "; ".join([general, *own])


def _of_size(total: int) -> Card:
    assumption = "no card was named: capability 8.6 is assumed (cuBLAS workspaces, attention kernels depend on it)"
    return Card(f"{format_bytes(total)} card", total, (8, 6), assumptions=(assumption,))


def name_of(reported: str) -> str:
    """The catalogue's name for a card as its driver reports it, "" where it is not there."""
    return _index().get(_plain(reported), "")


def _said_twice(name: str, card: Card) -> Card:
    for short, other in _TWO_SIZES.items():
        if _plain(name) == _plain(short):
            text = f"{short} is taken as {card.name}; there is {other} too"
            return dataclasses.replace(card, assumptions=(*card.assumptions, text))
    return card


def _calibrated(card: Card) -> Card:
    """The card with what was measured on one, where it was."""
    from memlab.predictor import calibration

    return calibration.applied(card)


def _measured_here(name: str) -> Card | None:
    from memlab.predictor import calibration

    return calibration.own_card(name)


# --- names and values ------------------------------------------------------------------------------------------------------

_NOISE = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct|graphics|gpu|generation|rtx|gtx|[^a-z0-9]")
_TWO_SIZES = {"A100": "A100 80GB", "V100": "V100 32GB"}
"""Names that two sizes share: the smaller one is taken, and says so."""


def _plain(name: str) -> str:
    """A name as it is looked up: lower case, without makers, blanks and signs; "16 GiB", "16G" and "16 GB" are the same."""
    text = re.sub(r"(\d)\s*g(i?b)?\b", r"\1gb", name.lower().strip())
    return _NOISE.sub("", text)


@functools.cache
def _index() -> dict[str, str]:
    names = {_plain(alias): row[0] for row in CARDS for alias in row[4]}
    own = {_plain(row[0]): row[0] for row in CARDS}
    # "RTX 4090 24GB" says no more than "RTX 4090".
    sized = {f"{_plain(row[0])}{row[1]:.0f}gb": row[0] for row in CARDS if "gb" not in _plain(row[0])}
    return {**sized, **names, **own}


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or len(name) > 200:
        raise PredictionError(f"a card needs a name, got {name!r:.80}.")


def _size(field: str, value: Any) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise MemlabError("")
        return parse_bytes(value)
    except MemlabError:
        raise PredictionError(f'{field} must be a size in bytes or a text such as "8GiB", got {value!r:.80}.') from None


def _capability(value: Any) -> tuple[int, int]:
    if isinstance(value, tuple | list) and len(value) == 2 and all(type(part) is int for part in value):
        major, minor = value
        if 3 <= major < 100 and 0 <= minor < 10:
            return major, minor
    raise PredictionError(f"compute_capability must be two numbers such as (8, 9), got {value!r:.80}.")


def _span(interval: Interval) -> str:
    low, high = map(format_bytes, interval)
    if low == high:
        return low
    return f"{low[: -len(unit)]}-{high}" if low.endswith(unit := high[high.index(" ") :]) else f"{low} - {high}"
