"""Values that only a GPU computes, as a prediction assumes them: each with the line that read it, its key, and its bounds.

A key such as "train.py:41 nonzero" is what a user gives to set the value (`assume=` of `memlab.predict`). What a library reads
has its lines in the key, too: "train.py:41 rpn.py:271 nonzero", for which "train.py:41 nonzero" and "rpn.py:271 nonzero" stand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.errors import MemlabError
from memlab.fake_cuda import places, program_length
from memlab.units import listed

MOST_NAMED = 3
MOST_TURNS = 1_000
"""A loop whose condition is a float would never end: after so many reads it gets 0, and then a large one, for once."""
LARGE = 1e9
FINITE = "a check for inf or nan"
"""Why: it decides nothing, as a program that fails it is taken to end."""
Bounds = tuple[Any, Any]
UNBOUNDED: Bounds = (None, None)
_TRUTH: Bounds = (False, True)


@dataclass(slots=True)
class AssumedValue:
    """What one line read for one purpose: the values from `low` to `high`, `count` times; plain values of JSON.

    `least` and `most` bound it, None where nothing is known. `is_given`: the user set it. `decides` is "length" if how
    long the program runs depends on it, "size" if a shape does, else "".
    """

    key: str
    low: Any
    high: Any
    least: Any = None
    most: Any = None
    count: int = 0
    why: str = ""
    decides: str = ""
    is_given: bool = False

    @property
    def setting(self) -> str:
        """As `--assume` takes it."""
        return f"{self.key}={self.high}"

    @property
    def text(self) -> str:
        """In words: "train.py:41 nonzero: assumed 100, at most 1,000"."""
        values = shown(self.low) if self.low == self.high else f"{shown(self.low)} to {shown(self.high)}"
        why = f" ({self.why})" if self.why else ""
        return f"{self.key}: {'set to' if self.is_given else 'assumed'} {values}{self._bounds}{why}"

    @property
    def _bounds(self) -> str:
        if (self.least, self.most) == _TRUTH and type(self.least) is bool:
            return f", may be {not self.high}" if self.low == self.high else ""
        if self.most is not None and self.least == self.most:
            return ""
        if self.most is None:
            return "" if self.least is None else f", at least {shown(self.least)}"
        return f", at most {shown(self.most)}" if not self.least else f", {shown(self.least)} to {shown(self.most)}"

    def add(self, value: Any, bounds: Bounds) -> None:
        """Another read of it."""
        least, most = bounds
        if self.count:
            self.low, self.high = min(self.low, value), max(self.high, value)
            self.least = None if None in (self.least, least) else min(self.least, least)
            self.most = None if None in (self.most, most) else max(self.most, most)
        else:
            self.low, self.high, self.least, self.most = value, value, least, most
        self.count += 1


def shown(value: Any) -> str:
    """A value in words: 1,000, True, 0.5."""
    return f"{value:,}" if type(value) is int else f"{value:g}" if type(value) is float else str(value)


def assumed(
    cuda: Any,
    what: str,
    value: Any,
    bounds: Bounds = UNBOUNDED,
    why: str = "",
    decides: str = "",
    room: int | None = None,
) -> Any:
    """The value to take for one that only a GPU computes: this one, or what the user gave for its key, within its bounds.

    `room` is the most that others leave for it, if they are as was assumed: it bounds what the user gave.
    """
    key = places.key(what)
    if type(value) is bool:
        bounds = _TRUTH
    given = next((cuda.given[one] for one in (key, *places.wider(key)) if one in cuda.given), None)
    if given is not None:
        # What is outside of all bounds is refused when the program has ended; it may be outside of some only.
        least, most = bounds
        within = given if most is None else min(given, most)
        within = within if room is None else min(within, room)
        value = type(value)(within if least is None else max(within, least))
    noted = value.real if isinstance(value, complex) else value
    found = cuda.assumed.pop(key, None) or AssumedValue(key, noted, noted, why=why, decides=decides)
    if decides == "length":
        found.why, found.decides = why, decides
    found.is_given = given is not None
    found.add(noted, bounds)
    cuda.assumed[key] = found  # as the last one: an error is most likely to come from what was read last
    if found.decides != "length" and why != FINITE and program_length.depends(decides == "size", found.count):
        found.decides = "length"
    # Only of floats: an integer may be an index.
    if type(value) is float and found.decides == "length" and found.count % MOST_TURNS == 0:
        value = 0.0 if found.count // MOST_TURNS % 2 else LARGE
        found.low, found.high = min(found.low, value), max(found.high, value)
    return value


def note(cuda: Any, what: str, text: str) -> None:
    """Record an assumption about an operator with the line that called it; it has no value that could be set."""
    cuda.assume(f"{places.key(what)}: {text}")


def explain(error: BaseException | None, values: Mapping[str, AssumedValue]) -> None:
    """Say in an error of the user's program that values had been assumed, as it may come from them."""
    if not values or not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError | MemlabError):
        return
    latest = [one.setting for one in values.values()][::-1]
    said = f"after values that only a GPU computes were assumed: {listed(latest, MOST_NAMED)}"
    if len(error.args) == 1 and str(error) == error.args[0]:
        error.args = (f"{error} ({said})",)
    else:
        error.add_note(f"This was raised {said}.")


def facts(values: Mapping[str, AssumedValue]) -> list[dict[str, Any]]:
    """As plain JSON, those first that were read first."""
    return [dataclasses.asdict(one) for one in values.values()]
