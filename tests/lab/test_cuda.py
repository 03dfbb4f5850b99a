"""The Lab on CUDA, on the simulated GPU: bytes are the allocator's, values are not checked."""

from __future__ import annotations

import pytest

import memlab
from memlab import Lab

pytestmark = pytest.mark.simulated


def test_measured_here_on_cuda():
    lab = Lab("mlp", size="tiny", device="cuda", techniques=["sgd"], steps=2)
    run = lab.run()
    assert run.devices[0].device.index == 0
    assert lab.comparison.saved_bytes > 0
    assert lab.table["results"].tolist() == ["", "not checked"]
    assert lab.table["how"].tolist() == ["simulated", "simulated"]


def test_out_of_memory_is_a_row_and_a_line(monkeypatch):
    import torch

    lab = Lab("mlp", size="tiny", device="cuda", steps=1, settings={"batch": 100_000_000})
    with pytest.raises(torch.OutOfMemoryError):
        lab.run()
    assert "out of memory" in lab.problem.lower()
    assert "\n" not in lab.problem
    assert "out of memory" in lab.table["note"][0].lower()
    assert lab.run(settings={}).peak_bytes > 0


def test_a_run_in_a_thread_is_measured_too():
    lab = Lab("mlp", size="tiny", device="cuda", steps=1)
    lab.start()
    assert lab.wait(120)
    assert lab.problem == ""
    assert lab.rows[0].peak_bytes[0] > 0


def test_what_is_said_to_the_allocator_can_only_be_predicted():
    lab = Lab("mlp", size="tiny", device="cuda", steps=1)
    confs = [name for name, one in memlab.techniques.items() if one.conf]
    if not confs:
        pytest.skip("no technique with a toggle speaks to the allocator")
    lab.run(techniques=[confs[0], "sgd"])
    assert confs[0] in lab.rows[-1].left_out
