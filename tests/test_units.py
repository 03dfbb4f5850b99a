from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab import units
from memlab.errors import MemlabError
from memlab.units import UNBOUNDED, ByteRange, GiB, KiB, MiB, TiB, format_bytes, format_seconds, parse_bytes, sentence


def test_the_examples_of_the_docstrings_hold():
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (KiB, "1.00 KiB"), (-KiB, "-1.00 KiB"), (1536 * MiB, "1.50 GiB"),
        (99 * MiB, "99.00 MiB"), (100 * MiB, "100.0 MiB"), (1023 * MiB, "1023.0 MiB"), (3 * TiB, "3.00 TiB"), (-5, "-5 B"),
        (5000 * TiB, "5000.0 TiB"),
    ],
)  # fmt: skip
def test_bytes_as_text(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512", 512), (512, 512), ("2GiB", 2 * GiB), ("2 gb", 2 * GiB), (" 1.5 GiB ", 1536 * MiB), (".5k", 512), ("7b", 7),
        ("300M", 300 * MiB), ("1TiB", TiB), (1.5e9, 1_500_000_000), ("1.0000000001 KiB", 1024),
    ],
)  # fmt: skip
def test_text_as_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "0", "0.0001", "1,5GiB", "1e9", "2 GiBs", "0x10", "nan", "inf", "1 2", "2**60", "99999999TiB",
     None, "x" * 10_000],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_its_text(text):
    with pytest.raises(MemlabError) as caught:
        parse_bytes(text)
    assert "size" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_text_that_is_too_long_ends_after_a_whole_word():
    assert sentence("CUDA out of memory. Tried to allocate", 30) == "CUDA out of memory. Tried to …"
    assert sentence("it is short", 30) == "it is short"
    assert sentence("x" * 40, 30) == "x" * 29 + "…"


@pytest.mark.parametrize("limit", range(8, 60))
def test_what_is_cut_is_a_beginning_of_the_words(limit):
    text = "what was to be said, in words of several lengths; and more of them"
    kept = sentence(text, limit).removesuffix(" …").split()
    assert [word.rstrip(".,;:") for word in text.split()][: len(kept)] == [word.rstrip(".,;:…") for word in kept]


@given(st.integers(1, 1 << 59))
def test_what_was_written_is_read_within_its_digits(count):
    assert abs(parse_bytes(format_bytes(count)) - count) <= count * 0.006


@given(st.integers(1, 1 << 59))
def test_a_plain_number_is_itself(count):
    read = parse_bytes(str(count))
    assert read == count or (count > 1 << 53 and abs(read - count) <= 64)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 ms"), (0.00042, "0.42 ms"), (0.35, "350 ms"), (12.3, "12.3 s"), (59.94, "59.9 s"), (60, "1:00 min"),
     (3599.7, "1:00:00"), (3725, "1:02:05"), (90061, "25:01:01")],
)  # fmt: skip
def test_seconds_as_text(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("found", "bounds", "text"),
    [
        (ByteRange(GiB, UNBOUNDED) - ByteRange.exact(MiB), (GiB - MiB, UNBOUNDED), "≥ 1023.0 MiB"),
        (ByteRange.exact(GiB) - ByteRange(MiB, UNBOUNDED), (-UNBOUNDED, GiB - MiB), "≤ 1023.0 MiB"),
        (ByteRange(GiB, UNBOUNDED) - ByteRange(MiB, UNBOUNDED), (-UNBOUNDED, UNBOUNDED), "unknown"),
        (ByteRange(GiB, UNBOUNDED) + ByteRange(GiB, UNBOUNDED), (2 * GiB, UNBOUNDED), "≥ 2.00 GiB"),
        (ByteRange(-UNBOUNDED, 0) + ByteRange.exact(GiB), (-UNBOUNDED, GiB), "≤ 1.00 GiB"),
    ],
)
def test_what_nothing_bounds_stays_without_bound(found, bounds, text):
    assert (found, str(found)) == (bounds, text)
    assert [math.isnan(number) for number in found.numbers()] == [abs(bound) == UNBOUNDED for bound in bounds]


@given(st.tuples(*[st.integers(0, 1 << 50)] * 4))
def test_a_byte_range_is_its_bounds(bounds):
    low, high, other_low, other_high = bounds
    one, two = ByteRange(*sorted((low, high))), ByteRange(*sorted((other_low, other_high)))
    assert one + two == (one.low + two.low, one.high + two.high)
    assert (one + two) - two == (one.low - (two.high - two.low), one.high + (two.high - two.low))
    assert one.low <= one.middle <= one.high
    assert one.is_exact == (one.low == one.high)
    assert str(ByteRange.exact(one.low)) == format_bytes(one.low)
    assert (one - two).at_least(0).low >= 0
