"""Lines on the pretend device: what each line held, and how high it rose, against the allocator's own counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probes.line_programs import Outside, programs, run

from memlab.session.lines import lines

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
