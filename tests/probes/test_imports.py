"""Tracking imports nothing that the cell does not import, and leaves the environment alone."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from processes import python

# An optimizer would import the compiler by itself.
CODE = """
import os, sys
import memlab, torch
before = dict(os.environ)
with memlab.track("inference", show=False) as run, torch.inference_mode():
    torch.nn.Linear(100, 100, device={device!r})(torch.ones(10, 100, device={device!r}))
assert run.peak_allocated_bytes >= 44_400 and str(run.report())
assert run.trace.device_indices == {indices}, run.trace
assert dict(os.environ) == before, set(os.environ) ^ set(before)
loaded = [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo", "triton"))]
assert not loaded and "_inductor" not in vars(torch), loaded[:5]
"""


@pytest.mark.parametrize(
    ("device", "indices"), [("cpu", (-1,)), pytest.param("cuda", (0,), marks=pytest.mark.simulated)]
)
def test_an_inference_cell_loads_no_compiler(device, indices):
    python("-c", CODE.format(device=device, indices=indices))


def test_snapshots_of_two_threads_each_have_their_own_stand_in_for_the_compiler(monkeypatch):
    import torch

    from memlab import torch_internals

    answered = []

    def take(_):
        for _ in range(5):
            time.sleep(0.01)
            answered.append(vars(torch)["_inductor"].thread == threading.get_ident())

    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", take, raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    monkeypatch.delitem(vars(torch), "_inductor", raising=False)
    threads = [threading.Thread(target=torch_internals.snapshot) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answered == [True] * 15 and "_inductor" not in vars(torch)


@pytest.mark.simulated
def test_a_compiler_that_is_imported_stays_where_it_is():
    import torch
    import torch._inductor

    from memlab import torch_internals

    torch.ones(1, device="cuda")
    torch_internals.snapshot()
    assert torch._inductor is sys.modules["torch._inductor"]
