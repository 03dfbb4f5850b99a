"""The Lab on CUDA, on the simulated GPU: bytes are the allocator's, values are not checked."""

from __future__ import annotations

import time

import pytest
from lab_samples import tiny

import memlab
from memlab import Lab
from memlab.lab.estimates import Estimates
from memlab.units import format_bytes

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


def test_what_the_notebook_has_on_the_gpu_is_in_no_prediction_and_in_both_peaks_of_a_comparison():
    import torch

    lab = Lab("mlp", size="tiny", device="cuda", techniques=["sgd"], steps=1)
    lab.run()
    alone, predicted = lab.comparison.saved_bytes, lab.run(techniques=[], device="card").peak_bytes
    held = torch.ones(25 << 20, device="cuda")  # 100 MiB
    again = lab.run()
    assert (again.peak_bytes, again.devices[0].levels[0].start_bytes) == (predicted, 0)
    held.add_(1)  # it is as usable here as before
    lab.run(device="cuda", techniques=["sgd"])
    assert lab.comparison.saved_bytes == alone
    # Other tests may have left what cuBLAS keeps for their threads.
    assert f"include {format_bytes(lab.rows[0].start_bytes + held.nbytes)} that was there" in lab.result.remark


def test_a_function_of_the_users_may_use_what_the_notebook_has_on_the_gpu_so_that_is_said():
    import torch

    held = torch.ones(25 << 20, device="cuda")  # 100 MiB
    lab = Lab(tiny, steps=1, card="RTX 4060")
    lab.run()
    assert lab.rows[0].start_bytes == held.nbytes and "of the peak was there before the run: " in lab.sentence
    known = Estimates(lab.choices, lambda: None)
    known.want(lab.chosen)
    until = time.monotonic() + 100
    while known.of(lab.chosen, ()) is None and time.monotonic() < until:
        time.sleep(0.05)
    known.close()
    assert "predicted for RTX 4060, with 100.0 MiB that the notebook has on its GPU" in known.sentence(lab.chosen)
