"""Lines on the simulated GPU: what each line held, and how high it rose, against the allocator's own counters."""

from __future__ import annotations

import pytest
import torch
from probes.line_programs import compare, exact, row
from processes import python
from torch import nn

import memlab

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_each_line_held_and_peaked_as_the_allocator_says(first, tmp_path):
    torch.ones(1, device="cuda")
    assert compare(first, 50, "cuda", tmp_path) > 250


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
    report = run.lines()
    saved_input, hidden, output = 64 * 128 * 4, 64 * 256 * 4, 64 * 128 * 4
    workspace = row(report, "output.backward(").total_bytes - 2 * 128 * 256 * 4 + saved_input + 0 * output
    assert workspace >= 0  # cuBLAS takes one in each thread
    assert row(report, "hidden = first(").backward_bytes == 128 * 256 * 4 - saved_input - hidden
    assert row(report, "output = second(").backward_bytes == 128 * 256 * 4 + hidden + workspace
    assert exact(report)


def test_shapes_are_noted_on_request_and_the_price_is_named():
    torch.ones(1, device="cuda")

    def made() -> torch.Tensor:
        kept = torch.ones(8, 100, 3, device="cuda", dtype=torch.float16)
        return kept + kept

    for shapes in (False, True):
        with memlab.track(functions=[made], shapes=shapes, show=False) as run:
            result = made()
        (group,) = row(run.lines(), "kept = torch.ones(8").came
        assert (group.count, group.bytes) == (1, 4800)
        assert (group.shape, group.dtype) == (("(8, 100, 3)", "float16") if shapes else ("", ""))
        assert ("shapes" in [gap.name for gap in run.gaps]) == shapes
        assert torch._C._len_torch_dispatch_stack() == 0
        del result


def test_lines_of_blocks_are_named_as_the_marks_are():
    torch.ones(1, device="cuda")
    with memlab.track(lines=True, show=False) as run:
        kept = torch.ones(300_000, device="cuda")  # here
    named = row(run.lines(), "# here").text
    assert run.breakdown("line")[named] == kept.nbytes
    assert not [text for text in run.trace.texts["line"] if text.endswith(named) and text != named]


def test_a_program_that_comes_to_cuda_late_has_lines_of_cuda(tmp_path):
    file = tmp_path / "late.py"
    file.write_text(
        "import torch, memlab\n"
        "with memlab.track(lines=True, show=False) as run:\n"
        "    a = torch.ones(1000)\n"
        "    b = a.cuda()\n"
        "    del b\n"
        "report = run.lines()\n"
        "print(report.table.device, [(row.line, row.held_bytes) for row in report if not row.is_quiet])\n"
    )
    assert python(str(file)).strip() == "cuda:0 [(4, 4096), (5, -4096)]"
