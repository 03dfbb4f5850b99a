"""`Bracket`: the largest number is found, above 100 to 1 %, in few trials, without one above a number that was too large."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from memlab.api.largest_batch import Bracket

LIMIT = 8 << 30


def trials(need: Callable[[int], float], at_most: int = 1 << 16) -> tuple[int, list[int]]:
    """The answer, and what was tried for it."""
    bracket, tried = Bracket(LIMIT, at_most, {}), list[int]()
    while (number := bracket.next_number) is not None:
        assert number not in tried and bracket.low < number < bracket.high
        tried.append(number)
        bracket.add(number, need(number) <= LIMIT, int(need(number)))
    return bracket.low, tried


def largest(need: Callable[[int], float], at_most: int = 1 << 16) -> int:
    return next((number - 1 for number in range(1, at_most + 1) if need(number) > LIMIT), at_most)


@pytest.mark.parametrize("each", [9 << 30, 5 << 30, 1 << 30, 700 << 20, 95 << 20, 20 << 20])
@pytest.mark.parametrize("floor", [0, 500 << 20, 7 << 30])
def test_on_a_line_four_trials_are_enough_up_to_256(floor, each):
    need = lambda number: floor + each * number  # noqa: E731
    found, tried = trials(need)
    assert largest(need) / 1.01 <= found <= largest(need)
    assert len(tried) <= 4 + (found > 256)


@pytest.mark.parametrize(
    ("need", "most"),
    [
        (lambda number: (3 << 30) + (number * 11_000_000 >> 21 << 21), 5),  # the allocator's steps, up to 488
        (lambda number: (3 << 30) + (number * 1_100_000 // (20 << 20)) * (20 << 20), 7),  # up to 4,899
        (lambda number: max(5 << 30, (1 << 30) + 40_000_000 * number), 6),  # small batches peak in the optimizer
        (lambda number: (1 << 30) + 300_000 * number**2, 10),  # a batch against itself
        (lambda number: (1 << 30) + 900_000_000 * number**0.7, 5),
        (lambda number: LIMIT + 1, 1),
        (lambda number: 1 << 20, 5),
        (lambda number: 1 if number <= 700 else LIMIT + 1, 35),  # nothing to go by
        (lambda number: (7 << 30) + number % 7 * 1000 + (number > 100) * LIMIT, 16),
    ],
)
def test_what_is_no_line_is_found_too(need, most):
    found, tried = trials(need)
    assert largest(need) / 1.01 <= found <= largest(need) and (found > 100 or found == largest(need))
    assert len(tried) <= most
    too_large = [number for number in tried if need(number) > LIMIT]
    assert all(later < earlier for earlier, later in itertools.pairwise(too_large))


def test_what_was_tried_before_counts():
    bracket = Bracket(LIMIT, 64, {64: (False, 12 << 30), 32: (True, 7 << 30)})
    assert (bracket.low, bracket.high, bracket.next_number) == (32, 64, 38)
    assert Bracket(LIMIT, 9, {9: (True, 1 << 30)}).next_number is None
