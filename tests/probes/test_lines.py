"""Lines on the CPU: what each line held against sums over the objects, on programs made at random."""

from __future__ import annotations

from typing import Any

import pytest
from probes.line_programs import Outside, programs, run

from memlab.session.lines import lines

BATCHES = [(first, 10) for first in range(0, 30, 10)]
MANY = [(first, 50) for first in range(30, 330, 50)]


def bytes_in(keep: dict[str, Any]) -> int:
    """The storages of all tensors in `keep`, each once."""
    tensors = [t for value in keep.values() for t in (value if isinstance(value, list) else [value]) if t is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def compare(first: int, count: int, folder: Any) -> int:
    """How many lines were compared with the sum over the objects."""
    compared = 0
    for seed, writer, text in programs(count, first):
        keep: dict[str, Any] = {}
        outside = Outside(lambda keep=keep: bytes_in(keep))
        report = lines(run(text, "cpu", outside, keep, folder))
        rows = {row.line: row for row in report if row.source == "program.py"}
        sums = sum(row.held_bytes + row.backward_bytes for row in report) + report.table.outside_bytes
        assert sums == report.table.end_bytes - report.table.start_bytes, seed
        for line, change in outside.change.items():
            assert rows[line].total_bytes == change, (seed, line, text)
            if line in writer.bracketed and "backward" not in text.splitlines()[line - 1]:
                assert rows[line].held_bytes == change, (seed, line, text)
            assert rows[line].peak_bytes >= max(change, 0) / max(outside.executions[line], 1)
            compared += 1
    return compared


@pytest.mark.parametrize(("first", "count"), BATCHES)
def test_each_line_held_what_the_objects_say(first, count, tmp_path):
    assert compare(first, count, tmp_path) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("first", "count"), MANY)
def test_each_line_held_what_the_objects_say_in_many_more_programs(first, count, tmp_path):
    assert compare(first, count, tmp_path) > 250
