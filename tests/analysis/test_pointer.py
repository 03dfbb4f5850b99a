from __future__ import annotations

import pytest

from memlab.analysis.pointer import LEAST_BYTES, PLURAL, pointer
from memlab.trace import Category
from memlab.units import MiB

LARGE = {"activation": 74 * MiB, "parameter": 26 * MiB}


def test_the_line_names_the_share_and_how_many_are_tried():
    line = pointer(LARGE, {"activation": 7}, "memlab.advise(memlab.runs['a'])")
    assert line == "Activations hold 74 % of the peak: memlab.advise(memlab.runs['a']) tries 7 techniques on them."
    assert "tries 1 technique on them" in pointer(LARGE, {"activation": 1}, "f()")
    assert "of what was allocated" in pointer(LARGE, {"activation": 1}, "f()", "what was allocated")


@pytest.mark.parametrize(
    ("shares", "known"),
    [
        ({}, {"activation": 7}),
        ({"activation": LEAST_BYTES - 1}, {"activation": 7}),
        ({"activation": 40 * MiB, "parameter": 30 * MiB, "gradient": 30 * MiB}, {"activation": 7}),
        ({"other": 100 * MiB}, {"other": 7, "activation": 7}),
        (LARGE, {"parameter": 7}),
        (LARGE, {"activation": 0}),
    ],
    ids=["nothing", "small", "spread", "unknown", "no technique", "none left"],
)
def test_nothing_is_said_where_nothing_large_applies(shares, known):
    assert pointer(shares, known, "f()") == ""


def test_it_knows_the_categories_that_techniques_attack():
    assert set(PLURAL) < {category.name.lower() for category in Category}
