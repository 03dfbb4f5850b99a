"""The table of `make agreement`: what counts as explained, and that the committed figures have a reason for each difference."""

from __future__ import annotations

import json

import pytest

from benchmarks import agreement
from benchmarks.agreement import REASONS, Row

pytestmark = pytest.mark.quick


def committed() -> list[Row]:
    peaks = json.loads(agreement.RESULTS.read_text())["peaks"]
    return [
        Row(name, key.split()[0], tuple(four[:2]), tuple(four[2:]))
        for key, of in peaks.items()
        for name, four in of.items()
    ]


def test_every_committed_difference_has_a_reason():
    rows = committed()
    assert len(rows) > 500
    assert [row for row in rows if not row.is_explained] == []


def test_every_reason_is_needed():
    assert {row.name for row in committed() if row.why} == REASONS.keys()


@pytest.mark.parametrize(
    ("row", "explained"),
    [
        (Row("mlp_sgd", "8.0", (1000, 2000), (1000, 2000)), True),
        (Row("mlp_sgd", "8.0", (1000, 2000), (1000, 1999)), False),
        (Row("gradient_penalty", "8.0", (100_000, 200_000), (99_950, 200_000)), True),
        (Row("gradient_penalty", "8.0", (100_000, 200_000), (99_000, 200_000)), False),
        (Row("channels_last", "7.5", (100_000, 200_000), (99_500, 200_000)), True),
        (Row("channels_last", "8.0", (100_000, 200_000), (99_500, 200_000)), False),
        (Row("lbfgs_closure", "8.0", error="RuntimeError: no"), False),
    ],
    ids=lambda value: value.name if isinstance(value, Row) else str(value),
)
def test_a_reason_covers_its_program_its_size_and_its_capability(row, explained):
    assert row.is_explained is explained


def test_what_was_measured_and_not_predicted_is_an_error():
    pair = {"measured": {"programs": {"x": {"allocated": 1, "reserved": 2}}}, "predicted": {"programs": {}}}
    (row,) = agreement.rows(pair, "8.0")
    assert row.error and not row.is_explained
    assert "**there is no prediction**" in "\n".join(agreement.differences({("8.0", "ours"): [row]}))
