"""On a real GPU: the peak against PyTorch's counters, NVML, out of memory; `make gpu` runs these."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import memlab
from memlab.workloads import gpt2

pytestmark = pytest.mark.gpu
MiB = 1 << 20


def convolutions() -> Callable[[], object]:
    model = torch.nn.Sequential(*[torch.nn.Conv2d(3 if not i else 32, 32, 3, padding=1) for i in range(4)]).cuda()
    batch = torch.randn(16, 3, 128, 128, device="cuda")

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()

    return step


def matmuls() -> Callable[[], object]:
    a = torch.randn(3000, 3000, device="cuda", requires_grad=True)
    return lambda: (a @ a).sum().backward()


def several_streams() -> Callable[[], object]:
    side = torch.cuda.Stream()

    def step() -> None:
        x = torch.randn(4096, 4096, device="cuda")
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            y = x @ x
        x.record_stream(side)
        del x
        torch.randn(4096, 4096, device="cuda")
        side.synchronize()
        del y

    return step


def graph_capture() -> Callable[[], object]:
    def step() -> None:
        static = torch.zeros(1 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = static * 2 + 1
        graph.replay()
        del result

    return step


PROGRAMS = {f.__name__: f for f in (convolutions, matmuls, several_streams, graph_capture, gpt2)}


def fresh() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_exact_to_the_byte(name):
    fresh()
    step = PROGRAMS[name]()
    fresh()
    torch.cuda.reset_peak_memory_stats()
    with memlab.track(name, device="cuda", show=False) as run:
        step()
    # The counters were set back before, so they rose above in the cell alone: they are the outside authority.
    assert run.is_exact, run.gaps
    assert run.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert run.peak_reserved_bytes == torch.cuda.max_memory_reserved()
    assert not [gap for gap in run.gaps if gap.name == "counters differ"], run.gaps


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_is_exact_below_an_earlier_maximum(name):
    fresh()
    step = PROGRAMS[name]()
    step()
    fresh()
    torch.cuda.reset_peak_memory_stats()
    step()
    expected = torch.cuda.max_memory_allocated()
    fresh()
    del_me = torch.empty(expected + 512 * MiB, dtype=torch.uint8, device="cuda")
    del del_me
    fresh()
    earlier = torch.cuda.max_memory_allocated()
    with memlab.track(name, device="cuda", show=False) as run:
        step()
    assert torch.cuda.max_memory_allocated() == earlier
    assert run.is_exact, run.gaps
    assert run.peak_allocated_bytes == pytest.approx(expected, abs=64 * MiB)  # workspaces may have settled between


def test_nvml_sees_what_the_driver_sees():
    x = torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
    with memlab.track(device="cuda", show=False) as run:
        y = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    seen = run.devices[0].level("device used")
    assert seen is not None, run.gaps
    assert seen.end_bytes == pytest.approx(total - free, abs=64 * MiB)
    del x, y


def test_out_of_memory_is_recorded_and_the_error_goes_out():
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError), memlab.track("oom", device="cuda", show=False):
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    run = memlab.runs["oom"]
    assert run.devices[0].device.num_ooms == 1
    assert "OutOfMemoryError" in run.summary.notes[0]


def test_phases_fall_between_their_marks_on_a_real_clock():
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
    with memlab.track(device="cuda", show=False) as run:
        model(torch.randn(256, 512, device="cuda")).sum().backward()
    shares = run.breakdown(by="phase")
    assert shares["forward"] > 0
    assert shares["backward"] > 0
