"""Tests of probes begin without garbage: tensors in cycles that earlier tests left would go at any time, and count as freed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("simulated"):
        gc.collect()
    yield
