"""What a prediction assumed, as text and as data, and the values that a user gives instead (`assume=`)."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from memlab.errors import PredictionError
from memlab.fake_cuda.assumed import FINITE, AssumedValue, shown
from memlab.fake_cuda.places import wider
from memlab.prediction.probe import NOTES
from memlab.trace.trace import Trace
from memlab.units import listed, one_line

MOST_NAMED, MOST_KEYS = 2, 8
_TRUTH = {"true": True, "false": False}
_NOT_IN_QUOTES = frozenset('"$`\\!')
"""What a shell, or the words of a magic, would not take as it stands between double quotes."""


class AssumeError(PredictionError):
    """A value was given that cannot be taken: there is no such key, or it is outside of its bounds."""


class Assumptions(tuple[str, ...]):
    """The assumptions in words; `values` has those on values of the GPU, and `to_pandas()` gives them as a table."""

    values: tuple[AssumedValue, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str], trace: Trace) -> Assumptions:
        """The texts, with the values in the notes of a trace."""
        found = cls(texts)
        found.values = assumed_in(trace)
        return found

    def to_pandas(self) -> Any:
        """One row per value: its key, what was assumed (low to high), its bounds, how often it was read, what it decides."""
        import pandas

        columns = [field.name for field in dataclasses.fields(AssumedValue)]
        return pandas.DataFrame([dataclasses.asdict(one) for one in self.values], columns=columns)


def assumed_in(trace: Trace) -> tuple[AssumedValue, ...]:
    """The values that a dry run assumed."""
    return tuple(AssumedValue(**one) for one in trace.notes.get(NOTES, {}).get("assumed", ()))


def length_condition(trace: Trace) -> str:
    """What to add to an answer if how long the program runs depends on assumed values; "" if not."""
    found = [one_line(one.setting, 80) for one in assumed_in(trace) if one.decides == "length"]
    return f", if it runs as long as was assumed ({listed(found, MOST_NAMED)})" if found else ""


def how_to_set(trace: Trace) -> str:
    """What to type to set one of the values that were assumed, the one that decides most; "" if there is none."""
    found = [one for one in assumed_in(trace) if not one.is_given and one.why != FINITE]
    if not found:
        return ""
    one = min(found, key=lambda one: ("length", "size", "").index(one.decides))
    setting = f'"{one.setting}"' if not _NOT_IN_QUOTES.intersection(one.setting) else shlex.quote(one.setting)
    return f"`--assume {setting}`, in Python `assume={{{one.key!r}: {one.high}}}`, with the value that you expect"


def fewest(trace: Trace) -> dict[str, Any]:
    """The least numbers of elements by key, of those that the user did not set and that may be less than was assumed."""
    return {
        one.key: one.least
        for one in assumed_in(trace)
        if one.decides == "size" and not one.is_given and one.least is not None and one.least < one.high
    }


def checked(given: object) -> dict[str, Any]:
    """The values of `assume=`: numbers, True or False by key; PredictionError for anything else."""
    how = 'assume takes values by key, as {"train.py:41 nonzero": 250}'
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PredictionError(f"{how}, got {type(given).__name__}.")
    for key, value in given.items():
        if not isinstance(key, str) or not key.strip():
            raise PredictionError(f"{how}, got the key {key!r:.80}.")
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise PredictionError(f"{how}; {key!r:.80} is given {value!r:.80}.")
    return {" ".join(key.split()): value for key, value in given.items()}


def parsed(words: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE as options give it."""
    found: dict[str, Any] = {}
    for word in words:
        key, _, text = word.rpartition("=")
        text = text.strip().replace(",", "")
        try:
            is_whole = text.lstrip("+-").isdecimal()
            found[key] = _TRUTH[text.lower()] if text.lower() in _TRUTH else int(text) if is_whole else float(text)
        except ValueError:
            what = "--assume takes KEY=VALUE with a number, True or False"
            raise PredictionError(f'{what}, as "train.py:41 nonzero=250", got {word!r:.80}.') from None
    return checked(found)


def check_given(given: Mapping[str, Any], values: Iterable[AssumedValue]) -> None:
    """AssumeError if a value was given for a key that no read had, or outside of the bounds of all that had it."""
    known: dict[str, list[AssumedValue]] = {}
    names = []
    for one in values:
        names.append(one.key)
        for key in (one.key, *wider(one.key)):
            known.setdefault(key, []).append(one)
    for key, value in given.items():
        found = known.get(key)
        if found is None:
            keys = [one_line(name, 80) for name in names]
            exist = f"the keys are {listed(keys, MOST_KEYS)}" if keys else "it assumed no value"
            raise AssumeError(f"assume: the program never read {key!r:.120}; {exist}.")
        least, most = _widest(found)
        is_outside = (least is not None and value < least) or (most is not None and value > most)
        is_whole = any(isinstance(one.low, float) for one in found) or value == int(value)
        if is_outside or not is_whole:
            if all(type(one.low) is bool for one in found):
                which = "True or False"
            elif most is not None:
                which = f"{shown(least)} to {shown(most)}"
            else:
                which = "a whole number" if least is None else f"{shown(least)} or more"
            raise AssumeError(f"assume: {key!r:.120} is {which}, got {shown(value)}.")


def _widest(values: Iterable[AssumedValue]) -> tuple[Any, Any]:
    """The bounds of some, None where one has none."""
    least, most = zip(*((one.least, one.most) for one in values), strict=True)
    return (None if None in least else min(least)), (None if None in most else max(most))
