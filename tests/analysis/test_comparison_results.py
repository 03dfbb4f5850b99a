from __future__ import annotations

import numpy as np
import pytest
import torch

from memlab.analysis.results import CLOSE, MAX_DEPTH, ResultCheck, check, positions, read_result
from memlab.api.results import serialized
from memlab.errors import TraceError


def checked(a: object, b: object, **options) -> ResultCheck:
    """Both ways: a comparison of results has no direction."""
    first, second = (read_result(serialized(one)) for one in (a, b))
    found, back = check(first, second, **options), check(second, first, **options)
    assert (found.verdict, found.largest_difference, found.relative) == (
        back.verdict, back.largest_difference, back.relative)  # fmt: skip
    return found


X: torch.Tensor
LARGE: torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def tensors():
    """Made when these tests run: what a module holds would be part of every peak that other tests measure."""
    global X, LARGE
    X = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    LARGE = torch.randn(600_000, generator=torch.Generator().manual_seed(1))
    yield
    del X, LARGE


NAN, INF = float("nan"), float("inf")


def put(tensor: torch.Tensor, value: float, at: int = 0) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[at] = value
    return changed


@pytest.mark.parametrize(
    "make",
    [lambda: X, lambda: LARGE, lambda: [X, LARGE], lambda: {"a": 1, "b": [0.5, "t", None]}, lambda: put(X, NAN),
     lambda: put(X, INF), lambda: put(LARGE, INF), lambda: torch.arange(200_000)],
)  # fmt: skip
def test_what_is_the_same_is_equal_bit_for_bit(make):
    value = make()
    found = checked(value, value)
    assert (found.verdict, found.largest_difference, found.relative) == ("equal", 0.0, 0.0)
    assert found.short == "equal bit for bit"
    assert not found.is_bound


def test_what_is_near_is_close_and_says_how_near():
    found = checked(X, X + 1e-5)
    assert found.verdict == "close"
    assert found.largest_difference == pytest.approx(1e-5, rel=0.1)
    assert found.relative == pytest.approx(1e-5 / float((X + 1e-5).abs().max()), rel=0.1)
    assert not found.is_bound


@pytest.mark.parametrize(("apart", "verdict"), [(0.5 * CLOSE, "close"), (2 * CLOSE, "different")])
def test_close_ends_at_a_thousandth_of_the_largest_value(apart, verdict):
    a = np.array([1.0, 0.0])
    assert checked(a, a - np.array([apart, 0])).verdict == verdict
    assert checked(a, a + np.array([0, apart])).verdict == verdict  # of the largest value of all, not of each by itself


def test_what_is_close_can_be_asked():
    assert checked(1.0, 1.01, tolerance=0.02).verdict == "close"
    assert checked(1.0, 1.0 + 1e-9, tolerance=0).verdict == "different"


def test_each_part_has_a_scale_of_its_own():
    found = checked({"large": 1e6, "small": 1.0}, {"large": 1e6, "small": 1.01})
    assert found.verdict == "different"
    assert found.where == "small"
    assert found.relative == pytest.approx(0.01, rel=0.02)
    assert "1 of 2 parts" in found.why


def test_another_dtype_is_named_and_never_equal():
    same, rounded = checked(torch.ones(3), torch.ones(3).bfloat16()), checked(X, X.bfloat16())
    assert (same.verdict, same.largest_difference) == ("close", 0.0)
    assert rounded.verdict == "different"
    assert 1e-3 < rounded.relative < 2**-8
    assert same.notes == rounded.notes == ("dtypes differ: float32 and bfloat16",)


@pytest.mark.parametrize(
    ("a", "b", "verdict", "said"),
    [
        (lambda: put(X, NAN), lambda: X, "different", "differ (1 and 0 NaN)"),
        (lambda: put(LARGE, NAN), lambda: LARGE, "different", "differ (1 and 0 NaN)"),
        (lambda: put(X, NAN, 0), lambda: put(X, NAN, 1), "different", "differ (NaN at 2 places in one alone)"),
        (lambda: put(X, NAN), lambda: put(X + 1e-6, NAN), "close", "close ("),  # beside it values are compared
        (lambda: put(X, INF), lambda: put(X + 1e-6, INF), "close", "close ("),
        (lambda: put(X, INF), lambda: X, "different", "differ (an infinity in one alone)"),
        (lambda: put(X, INF), lambda: put(X, -INF), "different", "differ (an infinity in one alone)"),
        # Whole numbers are never close.
        ([10_000, 2], [10_001, 2], "different", "differ by "),
        (True, False, "different", "differ by 100 % of the largest value"),
        (2**63 - 1, 2**63 - 2, "different", "differ by "),  # the same as float64
        # Beyond what is kept, known by the digest alone.
        (lambda: torch.arange(200_000), lambda: put(torch.arange(200_000), 7, 6), "different", "differ (whole numbers"),
        ([1, [2.0]], (1, (2.0,)), "equal", "equal"),  # lists and tuples are alike
        (1.0, 1.01, "different", "differ by 0.99 % of the largest value"),
    ],
)
def test_of_values_that_are_odd_or_whole(a, b, verdict, said):
    found = checked(*(one() if callable(one) else one for one in (a, b)))
    assert (found.verdict, found.short[: len(said)]) == (verdict, said)


@pytest.mark.parametrize("name", ["X", "LARGE"])
def test_nan_equals_nan_at_the_same_place_and_is_named(name):
    one = put(globals()[name], NAN)
    equal = checked(one, one.clone())
    assert equal.verdict == "equal"
    assert any("1 NaN" in note for note in equal.notes)


def test_the_sign_of_zero_is_a_bit():
    found = checked(torch.zeros(2), -torch.zeros(2))
    assert (found.verdict, found.relative) == ("close", 0.0)
    assert "-0.0" in found.why


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (lambda: X, lambda: X[0], "shapes (100, 100) and (100,)"), ([1, 2], [1], "2 and 1 items"), ({"a": 1}, {"b": 1}, "'a'"),
        ("x", "y", "texts differ"), (b"x", "x", "bytes and a text"), (b"x", b"y", "bytes differ"),
        (None, 1, "None and numbers"), ([], {}, "a list and a dict"),
        (1 << 70, 1 << 71, "differ"),
    ],
)  # fmt: skip
def test_another_structure_is_different_and_named(a, b, said):
    found = check(*(read_result(serialized(one() if callable(one) else one)) for one in (a, b)))
    assert (found.verdict, found.relative) == ("different", None)
    assert said in found.why


# --- more than is kept ---


def test_of_large_ones_the_difference_is_a_lower_bound():
    near, far, one = checked(LARGE, LARGE + 1e-6), checked(LARGE, LARGE * 2), checked(LARGE, put(LARGE, 1e4, 77))
    assert (near.verdict, near.is_bound) == ("close", True)
    assert "at least" in near.short
    assert far.verdict == "different"
    assert (one.verdict, one.is_bound) == ("different", True)  # no sample holds it: the largest value and the norm tell
    assert one.largest_difference <= 1e4
    assert one.largest_difference > 9e3


def test_a_small_change_that_no_statistic_shows_is_close_and_says_of_what():
    found = checked(LARGE, put(LARGE, float(LARGE[5]) + 1e-4, 5))
    assert found.verdict == "close"
    assert found.is_bound
    assert "kept are 4,096 of 600,000 values" in found.why


def test_a_lower_bound_never_exceeds_the_difference():
    random = np.random.default_rng(0)
    for _ in range(12):
        a = random.normal(size=200_000) * random.choice([1e-3, 1, 1e6])
        b = a.copy()
        where = random.integers(0, len(a), random.choice([1, 100, 100_000]))
        b[where] += random.normal(size=len(where)) * random.choice([1e-9, 1e-3, 1])
        found, true = checked(a, b), np.abs(a - b).max()
        assert found.largest_difference is None or found.largest_difference <= true * (1 + 1e-9)
        assert found.verdict != "equal" or true == 0


def test_a_whole_one_is_compared_with_one_that_was_too_large():
    half = LARGE[:200_000]
    found = checked({"x": half, "rest": 1}, {"x": half.double(), "rest": 1})  # 0.8 MB and 1.6 MB
    assert found.verdict == "close"
    assert found.largest_difference == 0
    assert any("float" in note for note in found.notes)


def test_digests_tell_of_equal_or_not_and_not_how_far_off():
    a, b = ({"losses": [1.0], "digest": letter * 64} for letter in "ab")
    assert checked(a, dict(a)).verdict == "equal"
    found = checked(a, b)
    assert (found.verdict, found.is_bound) == ("close", True)
    assert checked({**a, "losses": [2.0]}, b).verdict == "different"
    assert checked({"digest": "no digest"}, {"digest": "another"}).verdict == "different"


def test_a_sample_is_a_beginning_of_a_larger_one_and_within_bounds():
    for count in (1, 7, 1000, 10**12):
        places = positions(count, 500)
        assert places[:100].tolist() == positions(count, 100).tolist()
        assert 0 <= places.min() <= places.max() < count
    assert len(set(positions(10**6, 4096).tolist())) > 4080


# --- notes that nobody vouches for ---

NUMBERS = {"kind": "numbers", "dtype": "f", "shape": [1], "sha256": "x", "stored": "<f4", "data": "AACAPw=="}


def deep(levels: int) -> dict:
    node: dict = {"kind": "none"}
    for _ in range(levels):
        node = {"kind": "list", "items": [node]}
    return node


@pytest.mark.parametrize(
    "node",
    [
        None, 5, [], {}, {"kind": "object"}, {"kind": "list", "items": 5}, {"kind": "dict", "items": [1]},
        {"kind": "dict", "items": [[{"a": 1}, {"kind": "none"}]]}, deep(MAX_DEPTH + 2), {"kind": "text", "text": 5},
        {"kind": "list", "items": [{"kind": "none"}] * 30_000},
        {"kind": "list", "items": [{"kind": "list", "items": [{"kind": "none"}] * 15_000}] * 2},
        *({**NUMBERS, **change} for change in (
            {"stored": "|O8"}, {"stored": "<M8[s]"}, {"stored": ["<f4"]}, {"shape": [-1]}, {"shape": [2]}, {"shape": "a"},
            {"shape": [True]}, {"shape": [1 << 70]}, {"data": "é"}, {"data": "AAA"}, {"data": 5}, {"data": "AAAA"},
            {"data": None, "sample": "!"}, {"shape": [1] * 100},
            {"shape": [1 << 50] * 30, "data": None}, {"shape": [3 << 19], "data": "A" * (1 << 23)},
        )),
    ],
)  # fmt: skip
def test_a_damaged_note_is_refused_in_one_line(node):
    with pytest.raises(TraceError, match="cannot be read") as caught:
        read_result({"version": 1, "value": node})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("note", [None, [], {"version": 99}, {"version": 1}, "text"])
def test_a_note_of_no_known_form_is_refused(note):
    with pytest.raises(TraceError, match="Run it again"):
        read_result(note)


def test_parts_are_read_in_the_order_in_which_they_were_written():
    found = read_result(serialized({"a": [1, 2], "b": 3}))
    assert list(found) == [(), ("a",), ("a", 0), ("a", 1), ("b",)]


def test_statistics_that_are_no_numbers_are_none():
    node = NUMBERS | {"data": None, "nans": "x", "largest": 10**400, "norm": NAN, "sample": "AAAAAAAAAAA="}
    found = read_result({"version": 1, "value": node})[()]
    assert (found.nans, found.largest, found.norm, len(found.values)) == (None, None, None, 2)
