"""Lines on the pretend device: what each line held, and how high it rose, against the allocator's own counters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from probes.line_programs import Outside, programs, run
from torch import nn

import memlab
from memlab.session.lines import LineReport, lines

pytestmark = pytest.mark.fakegpu


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_each_line_held_and_peaked_as_the_allocator_says(first, tmp_path):
    torch.ones(1, device="cuda")
    compared = 0
    for seed, writer, text in programs(50, first):
        keep: dict[str, Any] = {}
        outside = Outside(torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)
        start = torch.cuda.memory_allocated()
        report = lines(run(text, "cuda", outside, keep, tmp_path))
        rows = {row.line: row for row in report if row.source == "program.py"}
        sums = sum(row.held_bytes + row.backward_bytes for row in report) + report.table.outside_bytes
        assert sums == torch.cuda.memory_allocated() - start, seed
        for line, change in outside.change.items():
            assert rows[line].total_bytes == change, (seed, line, text)
            if line in writer.bracketed:
                assert rows[line].peak_bytes == outside.rise[line], (seed, line, text)
                if "backward" not in text.splitlines()[line - 1]:
                    assert rows[line].held_bytes == change, (seed, line, text)
            compared += 1
    assert compared > 250


def row(report: LineReport, text: str) -> Any:
    """The row of the line that contains this text."""
    source = next(iter(report.table.sources.values()))
    (number,) = [number for number, line in source.items() if text in line and "row(" not in line]
    return next(row for row in report if row.line == number)


def test_backward_in_the_engines_thread_is_charged_to_forward_lines():
    torch.ones(1, device="cuda")
    first = nn.Linear(128, 256, bias=False, device="cuda")
    second = nn.Linear(256, 128, bias=False, device="cuda")

    def step() -> None:
        hidden = first(torch.ones(64, 128, device="cuda"))
        output = second(hidden)
        output.backward(torch.ones_like(output))

    with memlab.track(functions=[step], show=False) as run:
        step()
    report = lines(run)
    saved_input, hidden, output = 64 * 128 * 4, 64 * 256 * 4, 64 * 128 * 4
    workspace = row(report, "output.backward(").total_bytes - 2 * 128 * 256 * 4 + saved_input + 0 * output
    assert workspace >= 0  # cuBLAS takes one in each thread
    assert row(report, "hidden = first(").backward_bytes == 128 * 256 * 4 - saved_input - hidden
    assert row(report, "output = second(").backward_bytes == 128 * 256 * 4 + hidden + workspace
    sums = sum(row.held_bytes + row.backward_bytes for row in report) + report.table.outside_bytes
    assert sums == report.table.change_bytes


def test_shapes_are_noted_on_request_and_the_price_is_named():
    torch.ones(1, device="cuda")

    def made() -> torch.Tensor:
        kept = torch.ones(8, 100, 3, device="cuda", dtype=torch.float16)
        return kept + kept

    for shapes in (False, True):
        with memlab.track(functions=[made], shapes=shapes, show=False) as run:
            result = made()
        (group,) = row(lines(run), "kept = torch.ones(8").came
        assert (group.count, group.bytes) == (1, 4800)
        assert (group.shape, group.dtype) == (("(8, 100, 3)", "float16") if shapes else ("", ""))
        assert ("shapes" in [gap.name for gap in run.gaps]) == shapes
        assert torch._C._len_torch_dispatch_stack() == 0
        del result


def test_lines_of_blocks_are_named_as_the_marks_are():
    torch.ones(1, device="cuda")
    with memlab.track(lines=True, show=False) as run:
        kept = torch.ones(300_000, device="cuda")  # here
    named = row(lines(run), "# here").text
    assert run.breakdown("line")[named] == kept.nbytes
    assert not [text for text in run.trace.texts["line"] if text.endswith(named) and text != named]


def test_a_program_that_comes_to_cuda_late_has_lines_of_cuda(tmp_path):
    code = (
        "import torch, memlab\n"
        "from memlab.session.lines import lines\n"
        "with memlab.track(lines=True, show=False) as run:\n"
        "    a = torch.ones(1000)\n"
        "    b = a.cuda()\n"
        "    del b\n"
        "report = lines(run)\n"
        "print(report.table.device, [(row.line, row.held_bytes) for row in report if not row.is_quiet])\n"
    )
    file = tmp_path / "late.py"
    file.write_text(code.replace("\\\n", "\n"))
    env = {**os.environ, "PYTHONPATH": str(Path(memlab.__file__).parent.parent)}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "cuda:0 [(5, 4096), (6, -4096)]"
