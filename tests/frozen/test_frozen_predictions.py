"""Predictions are what they were before the package was rebuilt: 94 programs on five kinds of GPU, in three precisions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frozen import freeze

PREDICTIONS = json.loads((Path(__file__).parent / "predictions.json").read_text())


@pytest.mark.slow
@pytest.mark.sample(20)
@pytest.mark.parametrize("case", PREDICTIONS)
def test_a_prediction_is_what_it_was(case):
    assert freeze.predicted(case) == PREDICTIONS[case]
