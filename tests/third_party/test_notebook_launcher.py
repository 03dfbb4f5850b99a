"""accelerate's notebook_launcher in a tracked cell, in a real kernel with two real gloo processes: the cell shows both ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from kernel import Kernel, kernel
from rank_functions import KEPT_BYTES

if importlib.util.find_spec("accelerate") is None:  # importing it leaves threads behind
    pytest.skip("needs accelerate", allow_module_level=True)

TRAIN = f"""
def train(fails_on=None):
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    kept = torch.ones({KEPT_BYTES} // 4) if accelerator.process_index == 1 else None
    for step in range(3):
        accelerator.backward(model(torch.ones(8, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.process_index == fails_on:
            raise MemoryError("planted")
    accelerator.end_training()
"""
# A port for each launch: after a failed one its store is still alive with the addresses of its ranks, and torch takes it again.
FREE_PORT = """
def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])
"""
SETUP = (
    "%load_ext memlab",
    "import os, socket, sys, memlab\nfrom accelerate import notebook_launcher",
    FREE_PORT,
    TRAIN,
)
LAUNCH = "notebook_launcher(train, {arguments}, num_processes=2, use_port=free_port())"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("launcher"), *SETUP) as found:
        yield found


def test_the_cell_shows_both_ranks(notebook):
    reply = notebook.run(f"%%memtrack --name job\n{LAUNCH.format(arguments='()')}")
    assert reply.status == "ok", reply.said
    (peaks,) = notebook.value("[[one.peak.low for one in job.ranks] for job in memlab.runs['job'].started_ranks]")
    # DDP's threads free the scalars of a step when they come to it: one may be there at a peak (seen: 4 bytes).
    assert abs(peaks[1] - peaks[0] - KEPT_BYTES) <= 64
    _, ranks, parent = reply.shown
    assert ranks["text/plain"].startswith("job · 2 ranks · measured · peak allocated ")
    assert "DistributedDataParallel.module.0" in ranks["text/plain"]
    assert "started 2 ranks, each measured by itself" in parent["text/plain"]


def test_what_the_cell_prints_and_raises_is_as_without_memlab(notebook):
    plain = []
    for how in ("", "%%memtrack --name failed\n"):
        reply = notebook.run(f"{how}{LAUNCH.format(arguments='(1,)')}")
        plain.append((reply.error, reply.stdout))
    assert plain[0] == plain[1] and plain[0][0] == "ChildFailedError"
    text = notebook.value("memlab.runs['failed'].started_ranks[0].text")
    assert "Rank 1 failed first" in text and "MemoryError: planted" in text
