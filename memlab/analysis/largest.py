"""The largest number, such as a batch, that fits into a limit, in few trials: what is needed is nearly a line in it."""

from __future__ import annotations

from collections.abc import Mapping

_LEAP = 16
"""While nothing is too large, the next number is at most so many times the largest that fits: a line through two small
numbers may point far too high, and data that a trial makes on the host are real."""
_EXACT_TO = 0.01
"""Above 100, `low` is exact to this share: in the allocator's steps, the last numbers would take most of the trials."""


class Bracket:
    """`low` is the largest number that fits, `high` the smallest that does not; `next_number` is what to try between them.

    0 fits, and a number above `at_most` counts as too large. `known` (number -> whether it fits, bytes needed) was tried before.
    """

    def __init__(self, limit_bytes: int, at_most: int, known: Mapping[int, tuple[bool, int]]) -> None:
        self.low, self.high = 0, at_most + 1
        self._limit_bytes, self._needs = limit_bytes, dict[int, int]()
        self._were: list[tuple[int, int]] = []
        for number, (fits, needs_bytes) in known.items():
            self.add(number, fits, needs_bytes)
        self._were = [(self.low, self.high)]

    def add(self, number: int, fits: bool, needs_bytes: int) -> None:
        """Note a trial."""
        self._needs[number] = needs_bytes
        if fits:
            self.low = max(self.low, number)
        else:
            self.high = min(self.high, number)
        self._were.append((self.low, self.high))

    @property
    def next_number(self) -> int | None:
        """Where the line through the two trials nearest to the limit meets it; None if the largest is found, to 1 %."""
        low, high = self.low, self.high
        if high - low <= max(low * _EXACT_TO, 1):
            return None
        is_open = high not in self._needs
        most = min(high - 1, _LEAP * low or 1) if is_open else high - 1
        at = most if is_open else (low + high) // 2
        # Needs rise in steps, so a line through neighbors says little: the second trial is a tenth away.
        ranked = sorted(self._needs, key=lambda number: abs(self._needs[number] - self._limit_bytes))
        nearest = [number for number in ranked if number == ranked[0] or 10 * abs(number - ranked[0]) >= ranked[0]][:2]
        for pair in (nearest, [low, high]):  # the second where the first leads to what is known to be wrong
            if len(pair) == 2 and all(number in self._needs for number in pair):
                (first, a), (second, b) = ((number, self._needs[number]) for number in pair)
                rise = (b - a) / (second - first)
                meets = first + (self._limit_bytes - a) / rise if rise > 0 else -1.0
                if rise > 0 if is_open else low <= meets < high:
                    at = int(meets)
                    break
        # Without progress the middle is tried.
        some = 4 if is_open else 3
        if len(self._were) >= some:
            low_then, high_then = self._were[-some]
            if 2 * (high - low) > high_then - low_then and low <= 2 * low_then:
                at = 2 * low if is_open else (low + high) // 2
        return min(max(at, low + 1), most)
