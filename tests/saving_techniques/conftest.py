"""What holds for every technique's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from job_runs import one_thread


@pytest.fixture(autouse=True)
def alone_on_one_thread() -> Iterator[None]:
    """Sums of floats depend on the number of threads; garbage of other tests would be part of the peaks here."""
    gc.collect()
    gc.freeze()  # what a test imported would make every later collection slow
    with one_thread():
        yield
