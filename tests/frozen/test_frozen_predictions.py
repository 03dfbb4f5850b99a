"""Predictions are what they were before the package was rebuilt: 94 programs on five kinds of GPU, in three precisions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frozen import freeze

PREDICTIONS = json.loads((Path(__file__).parent / "predictions.json").read_text())
SAMPLE = list(PREDICTIONS)[::20]


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("--every-prediction")
    metafunc.parametrize("case", list(PREDICTIONS) if every else SAMPLE)


@pytest.mark.slow
def test_a_prediction_is_what_it_was(case):
    assert freeze.predicted(case) == PREDICTIONS[case]
