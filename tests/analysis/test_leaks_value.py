"""What `run.leaks()` gives: a tuple that reads as sentences, in text, in a notebook and as a frame."""

from __future__ import annotations

import copy
import pickle

import pytest
from handmade import Script
from IPython.core.formatters import DisplayFormatter

from memlab.analysis.leak import Leak, Leaks, Place, leaks, short_line
from memlab.trace import MarkKind

KiB = 1 << 10
FOUND = Leaks(
    [
        Leak("kept", 0, "backward", 1, 12, 24 * KiB, (Place("/a/<b>:7", "net.fc", "", "4x4", 2 * KiB, 1.0),
                                                     Place("", "net.head", "", "", KiB, 2.0))),
        Leak("growing", 0, "backward", 3, 12, 9 * KiB, (Place("", "", "aten::cat", "", KiB, 0.0),)),
    ],
    "backward: 12 of them",
)  # fmt: skip


def test_it_reads_as_one_sentence_for_each_leak():
    assert str(FOUND) == repr(FOUND) == f"{FOUND[0].text}\n{FOUND[1].text}"
    assert len(FOUND) == 2
    assert list(FOUND) == [FOUND[0], FOUND[1]]
    shown, _ = DisplayFormatter().format(FOUND)
    assert shown["text/plain"] == FOUND.text
    assert shown["text/html"].count("<div>") == 2
    assert "&lt;b&gt;" in shown["text/html"]
    assert "<b>" not in shown["text/html"]


def test_the_frame_has_a_row_for_each_place():
    frame = FOUND.to_pandas()
    assert list(frame["leak"]) == [1, 1, 2]
    assert list(frame["bytes_per_iteration"]) == [2 * KiB, KiB, KiB]
    assert list(frame["total_bytes"]) == [24 * KiB, 24 * KiB, 9 * KiB]
    assert list(Leaks().to_pandas().columns) == list(frame.columns)


def test_copies_are_the_same():
    for twin in (copy.copy(FOUND), copy.deepcopy(FOUND), pickle.loads(pickle.dumps(FOUND))):
        assert twin == FOUND
        assert (type(twin), twin.looked_at) == (Leaks, FOUND.looked_at)


def loop(count: int) -> Leaks:
    script = Script()
    for _ in range(count):
        script.free(script.alloc(KiB))
        script.mark(MarkKind.PHASE_END, "optimizer", at=script.now)
    return leaks(script.trace(), 0)


def test_nothing_that_grows_is_told_from_nobody_knows():
    assert loop(9) == loop(2) == ()
    assert str(loop(9)) == "Nothing grows from one iteration to the next (optimizer step: 9 of them)."
    assert str(loop(2)).startswith("Not told: this run has no row of at least four iterations")
    assert "Not told" in Leaks()._repr_html_()


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("/home/me/train.py:7", "train.py:7"),
        ("C:\\me\\train.py:7", "train.py:7"),
        ("cell:3", "line 3 of a cell"),
        ("/tmp/ipykernel_12/34.py:3", "line 3 of a cell"),
        ("before the cell", "before the cell"),
        ("workspace of cuBLAS", "workspace of cuBLAS"),
        ("/n/\x1b[2J\n.py:1", "?"),
    ],
)
def test_lines_in_short(line, short):
    found = short_line(line)
    assert found == short or (short == "?" and found.isprintable())
