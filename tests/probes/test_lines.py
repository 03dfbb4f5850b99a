"""Lines on the CPU: what each line held against sums over the objects, on programs made at random."""

from __future__ import annotations

import pytest
from probes.line_programs import compare


def test_each_line_held_what_the_objects_say(tmp_path):
    assert compare(0, 10, "cpu", tmp_path) > 50


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("first", range(10, 330, 64))
def test_each_line_held_what_the_objects_say_in_many_more_programs(first, tmp_path):
    assert compare(first, 64, "cpu", tmp_path) > 250
