"""The probe of fake CUDA: a trace like that of a measured cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_gpus import card
from torch import nn

from memlab.analysis.breakdown import breakdown
from memlab.errors import PredictionError
from memlab.fake_cuda import FakeCuda
from memlab.prediction.probe import NOTES, FakeCudaProbe
from memlab.probes.cpu import CpuProbe
from memlab.probes.marks import marker
from memlab.trace.columns import Category, Kind, Phase, deltas
from memlab.trace.file import load, save
from memlab.trace.trace import PREDICTING, Trace


def trained(fake: FakeCuda, steps: int = 2) -> Trace:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    probe = FakeCudaProbe(fake)
    probe.start()
    for _ in range(steps):
        x, y = torch.randn(64, 256, device="cuda"), torch.randint(10, (64,), device="cuda")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return probe.stop()


def test_blocks_have_categories_names_phases_and_modules(fake):
    trace = trained(fake)
    names = {trace.text("name", index): block for block, index in enumerate(trace.blocks.name) if index >= 0}
    category = {name: Category(trace.blocks.category[block]) for name, block in names.items()}
    assert category["Sequential.0.weight"] == Category.PARAMETER
    assert category["grad of Sequential.2.bias"] == Category.GRADIENT
    assert category["exp_avg of Sequential.0.weight"] == Category.OPTIMIZER
    assert category["input of Sequential"] == Category.INPUT
    assert {Phase(code) for code in trace.blocks.phase} == set(Phase)
    modules = {trace.text("module", index) for index in trace.blocks.module}
    assert {"Sequential", "Sequential.0", "Sequential.1", "Sequential.2"} <= modules
    kept = [b for b in range(len(trace.blocks)) if trace.blocks.category[b] == Category.ACTIVATION]
    assert kept and all(trace.text("op", trace.blocks.op[b]).startswith("aten.") for b in kept)


def test_what_was_there_is_adopted_and_the_rows_are_in_order(fake):
    trace = trained(fake)
    events = trace.events
    assert trace.first_row == 4
    assert ((events.kind == Kind.PREEXISTING) == (np.arange(len(events)) < 4)).all()
    assert (np.diff(events.time_ns) >= 0).all() and set(events.device) == {0}
    assert (np.bincount(events.block[events.kind == Kind.ALLOC]) <= 1).all()
    freed = events.block[events.kind == Kind.FREE]
    assert len(freed) == len(set(freed))
    assert (trace.marks.row >= trace.first_row).all()


def test_the_trace_says_who_made_it_and_can_be_read(fake, tmp_path):
    trace = trained(fake)
    device = trace.made_by.device(0)
    assert trace.made_by.engine == PREDICTING and device.name == "Fake 8" and device.capacity_bytes == 8 << 30
    assert trace.gaps[0].name == "predicted"
    parts = breakdown(trace, device=0)
    peak = int(np.cumsum(deltas(trace.events, "requested")).max())
    assert sum(parts.values()) == peak and parts["parameter"]
    save(trace, tmp_path / "run.memlab")
    again = load(tmp_path / "run.memlab")
    operators = trace.notes[NOTES]["operators"]
    assert again.notes[NOTES]["operators"] == operators
    assert {one[3] for one in operators if "mm" in one[1]} == {True, False}, "of backward and of forward"


def test_notes_have_what_is_no_event(fake):
    probe = FakeCudaProbe(fake)
    before = torch.empty(1024, device="cuda")
    torch.cuda.empty_cache()
    probe.start()
    torch.empty(512, device="cuda")
    torch.cuda.empty_cache()
    side = torch.cuda.Stream()
    x = torch.empty(64, 64, device="cuda")
    x.record_stream(side)
    x @ x
    x.sum().item()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
    notes = probe.stop().notes[NOTES]
    assert notes["emptied"] == [3] and notes["recorded_streams"] == [[4, 2, side.cuda_stream]]
    row, name, stream, in_backward, shapes, dtype = notes["operators"][0]
    assert (row, name, stream, in_backward, dtype) == (4, "aten.mm.default", 0, False, "float32")
    assert shapes == [[64, 64], [64, 64]]
    assert notes["out_of_memory"][0][1:] == [9 << 30, 0]
    assert any("item: assumed" in text for text, _ in notes["assumptions"])
    del before


def test_nothing_is_left_on_and_without_fake_cuda_there_is_nothing_to_follow(fake):
    users = marker.users
    probe = FakeCudaProbe(fake)
    probe.start()
    assert marker.users != users
    probe.stop()
    assert marker.users == users
    with pytest.raises(PredictionError, match="not on"):
        FakeCudaProbe(FakeCuda(card())).start()
    assert marker.users == users


def test_phases_and_modules_are_those_of_the_same_cell_on_the_host(fake):
    """What a measured cell on the CPU says of phases, a predicted one says too."""

    def cell(device: str) -> None:
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            model(torch.ones(16, 32, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def summary(trace: Trace) -> list[tuple[str, str]]:
        rows = trace.events.block[trace.events.kind == Kind.ALLOC]
        return [(Phase(trace.blocks.phase[b]).name, trace.text("module", trace.blocks.module[b]))
                for b in rows if trace.blocks.phase[b] == Phase.FORWARD]  # fmt: skip

    probe = FakeCudaProbe(fake)
    probe.start()
    cell("cuda")
    predicted = summary(probe.stop())
    measured = CpuProbe()
    measured.start()
    cell("cpu")
    assert summary(measured.stop()) == predicted
