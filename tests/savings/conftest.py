"""What holds for every technique's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_waits_to_be_collected() -> Iterator[None]:
    """Models of other tests that wait for the collector would be part of the peaks here."""
    gc.collect()
    yield
