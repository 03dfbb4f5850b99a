"""What marks mean: phases of nested, failed and recomputed work."""

from __future__ import annotations

import time

import numpy as np
import pytest

from memlab.trace import MarkKind, Phase
from memlab.trace.spans import BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE, recording, resolve

TEXTS = (BACKWARD, OPTIMIZER, OPTIMIZER_WITH_CLOSURE, "Net", "Net.layer")
MARKS = {
    "B(": (MarkKind.PHASE_BEGIN, 0),
    "B)": (MarkKind.PHASE_END, 0),
    "O(": (MarkKind.PHASE_BEGIN, 1),
    "O)": (MarkKind.PHASE_END, 1),
    "C(": (MarkKind.PHASE_BEGIN, 2),
    "C)": (MarkKind.PHASE_END, 2),
    "N(": (MarkKind.MODULE_BEGIN, 3),
    "N)": (MarkKind.MODULE_END, 3),
    "L(": (MarkKind.MODULE_BEGIN, 4),
    "L)": (MarkKind.MODULE_END, 4),
    "of N": (MarkKind.BACKWARD_OF, 3),
    "of L": (MarkKind.BACKWARD_OF, 4),
}


def phases(marks: str) -> str:
    """The phase after each mark: its first letter, a dot for other."""
    kinds, names = zip(*(MARKS[mark] for mark in marks.split()), strict=True)
    phase, _ = resolve(range(len(kinds)), kinds, names, TEXTS)
    return "".join(".FBO"[int(value)] for value in phase.at(np.arange(len(kinds))))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("N( L( L) N) B( B) O( O)", "FFFFB.O."),  # a plain step: the loss after the model is forward
        ("N( N) O( O)", "F.O."),  # no backward follows: what lies between is nobody's
        ("N( N) B( L( L) B) .".replace(" .", ""), "FFBBB."),  # a checkpoint recomputes inside backward
        ("N( B( B) N) B( B)", "FBFFB."),  # forces by autograd.grad inside a forward
        ("B( B( B) B)", "BBB."),  # grad inside a custom Function's backward
        ("C( N( N) B( B) C)", "OFFBO."),  # LBFGS calls its closure
        ("O( N( N) B( B)", "OFFB."),  # a step that raised: the next forward ends it
        ("O( O( O) O)", "OOO."),  # a step that calls the step of its base
        ("O( O( O) N(", "OOOF"),  # or one that raised, until the next forward
        ("N( L( N) B( B)", "FFFB."),  # a module whose end is missing
        ("N) B)", ".."),
    ],
)
def test_phases(marks, expected):
    assert phases(marks) == expected


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["N(", "L(", "L)", "N)", "B(", "L(", "L)", "B)"], [3, 4, 3, -1, -1, 4, -1, -1]),
        (["of L", "N(", "N)", "B(", "of L", "N(", "N)", "of N", "B)", "B("], [-1, 3, -1, -1, 4, 3, 4, 3, -1, -1]),
    ],
)
def test_the_innermost_module_is_known_or_that_whose_forward_backward_works_on(marks, expected):
    kinds, names = zip(*(MARKS[mark] for mark in marks), strict=True)
    _, module = resolve(range(len(marks)), kinds, names, TEXTS)
    assert module.at(np.arange(-1, len(marks))).tolist() == [-1, *expected]


@pytest.mark.parametrize(
    "marks",
    [[("L(", 1), ("N)", 1)], [("B(", 1), ("B)", 2)], [("C(", 1), ("O)", 1)], [("N(", 1)], [("B(", 1)], [("N)", 1)]],
)
def test_millions_of_marks_without_their_other_ends_take_linear_time(marks):
    half = 100_000  # squared, it would be minutes
    kinds, names = zip(*(MARKS[mark] for mark, times in marks for _ in range(times * half)), strict=True)
    began = time.process_time()
    resolve(range(len(kinds)), kinds, names, TEXTS)
    recording(np.arange(len(kinds)), kinds, names)
    assert time.process_time() - began < 5


def test_no_marks_mean_other():
    phase, module = resolve([], [], [], TEXTS)
    assert phase.at(np.array([5])).tolist() == [Phase.OTHER]
    assert module.at(np.array([5])).tolist() == [-1]
