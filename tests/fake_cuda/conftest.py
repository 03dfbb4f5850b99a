"""Fake CUDA switched on around a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_gpus import card

from memlab.fake_cuda import FakeCuda


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with FakeCuda(card()) as on:
        yield on
