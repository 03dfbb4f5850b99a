"""Ways out on the page of an out-of-memory error."""

from __future__ import annotations

import dataclasses

from memlab.analysis.breakdown import Breakdown
from memlab.analysis.oom.actions import WayOut, WaysOut
from memlab.analysis.oom.explain import explain
from memlab.analysis.oom.facts import Failure
from memlab.analysis.oom.text import read_message
from memlab.units import ByteRange
from memlab.views.oom import oom_page

NEEDS = ByteRange(1 << 30, 2 << 30)
SETTING = "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'"


def test_what_cannot_be_written_into_the_cell_comes_with_its_code():
    found = explain(
        Failure(read_message("CUDA out of memory. Tried to allocate 20.00 MiB."), gaps=("names: cut short",))
    )
    ways = (
        WayOut("technique", "`expandable_segments`", NEEDS, code=SETTING),
        WayOut("gpu", "the same cell on T4", NEEDS),
    )
    page = oom_page(found, ways=WaysOut("a GPU", 1 << 30, NEEDS, ways)).text()
    assert f"1. how it is written:\n\n    {SETTING}" in page
    assert "2. how" not in page
    assert "\n- names: cut short" in page and "- - " not in page


def test_a_table_whose_only_large_row_is_no_known_line_is_left_out():
    found = explain(Failure(read_message("CUDA out of memory. Tried to allocate 20.00 MiB.")))
    shares = {"elsewhere": 7 << 30, "workspace of cuBLAS": 16 << 20}
    by_category = Breakdown("category", "allocated", {"optimizer": 7 << 30})
    page = oom_page(dataclasses.replace(found, shares=(by_category, Breakdown("line", "allocated", shares))))
    assert "peak by category" in page.text() and "line" not in page.text().partition("peak by category")[2]
    page = oom_page(dataclasses.replace(found, shares=(Breakdown("line", "allocated", {"a:1": 5 << 20, **shares}),)))
    assert "Allocated when memory ran out" not in page.text()
