"""Predictions for versions of PyTorch, against the real allocator of each on a simulated GPU of capability 8.0.

Each was measured where that version ran: `python -m benchmarks.prediction measure truth.json -p PROGRAM`.
"""

from __future__ import annotations

import pytest

import memlab
from benchmarks.programs import PROGRAMS
from memlab.units import GiB

CARD = memlab.Card("80 GiB", 80 * GiB, (8, 0), 0, 80 * GiB, 80 * GiB, 108)
BEFORE_2_12 = {
    "two_streams_at_work": (841682432, 1675624448),
    "loader_with_pinning": (387411456, 425721856),
    "half_inference": (284385792, 356515840),
    "llama_like": (2370698752, 2596274176),
}
MEASURED = {
    "2.10.0+cu128": BEFORE_2_12,
    "2.11.0+cu130": BEFORE_2_12,
    "2.12.1+cu130": {
        "two_streams_at_work": (839585280, 1449132032),
        "loader_with_pinning": (386625024, 459276288),
        "half_inference": (283337216, 354418688),
        "llama_like": (2370698752, 2596274176),
    },
    "2.13.0+cu130": {
        "two_streams_at_work": (839585280, 1675624448),
        "loader_with_pinning": (386362880, 425721856),
        "half_inference": (283337216, 354418688),
        "llama_like": (2370698752, 2596274176),
    },
    "2.14.1+cu130": {
        "two_streams_at_work": (839585280, 1675624448),
        "loader_with_pinning": (386362880, 425721856),
        "half_inference": (283337216, 354418688),
        "llama_like": (2051546624, 2269118464),
    },
}
"""Version -> program -> peak of allocated and of reserved, in bytes."""


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(("version", "name"), [(version, name) for version in MEASURED for name in MEASURED[version]])
def test_peaks_are_those_of_the_version(version, name):
    found = memlab.predict(PROGRAMS[name], CARD, torch_version=version)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == MEASURED[version][name]
