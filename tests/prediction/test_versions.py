"""Predictions for versions of PyTorch, against the real allocator of each on a simulated GPU of capability 8.0.

Each was measured where that version ran: `python -m benchmarks.prediction measure truth.json -p PROGRAM`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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


def test_the_text_of_an_out_of_memory_error_is_that_of_a_real_h200():
    path = Path(__file__).parents[2] / "benchmarks/results/gpu-nvidia-h200-torch2.11.0.json"
    found = json.loads(path.read_text())
    total, context = (found["calibration"][name] for name in ("total_memory_bytes", "context_low_bytes"))
    card = memlab.Card("an H200", total, (9, 0), context, total, total, 132)
    said = memlab.predict(lambda: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"), card, torch_version="2.11")
    assert said.out_of_memory == found["out-of-memory text"]
    assert "4.00 TiB requested, 139.3 GiB free" in memlab.explain_oom(found["out-of-memory text"]).text
