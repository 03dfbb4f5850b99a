"""Pretend CUDA switched on around a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlab.predictor.pretend import PretendCuda

sys.path.insert(0, str(Path(__file__).parent))

from conftest_cards import card


@pytest.fixture
def pretend() -> Iterator[PretendCuda]:
    with PretendCuda(card()) as on:
        yield on
