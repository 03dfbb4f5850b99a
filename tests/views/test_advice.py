from __future__ import annotations

import dataclasses

import pytest
from html_text import Words

from memlab.analysis.advice import Findings, Tried
from memlab.units import ByteRange
from memlab.views.advice import advice_page

MiB = 1 << 20
EVIL = "<script>alert(1)</script>\x1b[31m\nnext&\"'"

BEST = Tried(
    ("checkpoint",), ByteRange.exact(40 * MiB), ByteRange.exact(60 * MiB), 1.25, "equal", prices=("one more forward",)
)
NONE = Tried(("in_place",), ByteRange.exact(100 * MiB), ByteRange(0, 0), 1.0, "equal", prices=("none",), costs=False)
WRONG = dataclasses.replace(BEST, results="different", is_wrong=True)
FAILED = Tried(("offload",), failed="does not apply: this is on the CPU")
FOUND = Findings(
    "gpt laptop", "cpu", "allocated", ByteRange.exact(100 * MiB), 50 * MiB, {"activation": 80 * MiB, "parameter": 20 * MiB},
    (BEST, NONE, FAILED), (), BEST, (("sgd", "changes training"), ("adafactor", "changes training")), ("A note.",), "", False, 3.0,
)  # fmt: skip


def test_the_text_stands_alone():
    assert (
        advice_page(FOUND, "x = checkpoint(block, x)\n").text()
        == """\
memlab · advice on gpt laptop · measured on cpu · 3.0 s

checkpoint: peak of allocated 40.00 MiB instead of 100.0 MiB (−60.00 MiB, −60 %), a step takes 1.25 times as long, results equal.
The target of 50.00 MiB is reached.
Held at the peak before: activation 80.00 MiB (80 %), parameter 20.00 MiB (20 %).

                   peak      saved  share   time  results  price
  as it is    100.0 MiB                                                      ████████████
  checkpoint  40.00 MiB  60.00 MiB   60 %  1.25×  equal    one more forward  █████
  in_place    100.0 MiB        0 B    0 %  1.00×  equal    none              ████████████

Could not be tried:
- offload: does not apply: this is on the CPU

Not tried:
- sgd, adafactor: changes training

A note.

To paste:

    x = checkpoint(block, x)"""
    )


def test_html_says_the_same_as_the_text():
    shown = advice_page(FOUND, "x = checkpoint(block, x)\n")
    words = Words(shown.html())
    for cell in (cell.strip() for line in shown.text().splitlines() for cell in line.split("  ") if cell.strip(" █")):
        assert cell.removeprefix("- ").removesuffix(":") in words


@pytest.mark.parametrize(
    "where", ["name", "on", "share", "failed", "left out", "note", "remark", "code", "stopped", "results"]
)
def test_whatever_comes_from_outside_is_escaped(where):
    changes = {
        "name": {"name": EVIL},
        "on": {"on": EVIL},
        "share": {"shares": {EVIL: 80 * MiB}},
        "failed": {"tried": (BEST, dataclasses.replace(FAILED, failed=EVIL))},
        "left out": {"left_out": ((EVIL, EVIL),)},
        "note": {"notes": (EVIL,)},
        "remark": {"remarks": (EVIL,)},
        "stopped": {"stopped": EVIL},
        "results": {"tried": (dataclasses.replace(BEST, results=EVIL, prices=(EVIL,)),)},
    }
    shown = advice_page(dataclasses.replace(FOUND, **changes.get(where, {})), EVIL if where == "code" else "")
    assert "script" not in Words(shown.html()).tags
    assert where == "code" or "\x1b" not in shown.text()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recommended": None}, "Nothing that was tried saves memory here: the peak of allocated stays 100.0 MiB."),
        ({"recommended": None, "tried": ()}, "Nothing was tried: the peak of allocated is 100.0 MiB."),
        ({"target_bytes": 30 * MiB}, "The target of 30.00 MiB is missed by 10.00 MiB.\nHeld"),
        ({"target_bytes": 30 * MiB, "remarks": ("A remark.",)}, "is missed by 10.00 MiB.\nA remark.\nHeld"),
        ({"recommended": None, "target_bytes": 200 * MiB}, "the target of 200.0 MiB is already met."),
        ({"of": "device", "is_predicted": True, "on": "T4"}, "checkpoint: peak of the device 40.00 MiB instead of 100.0 MiB"),
        ({"stopped": "interrupted after 1 of 3 techniques"}, "The search is not complete: interrupted after 1 of 3 techniques."),
        ({"tried": (WRONG,), "recommended": None}, "different, more than allowed"),
    ],
)  # fmt: skip
def test_what_is_said_of_how_it_ended(changes, sentence):
    assert sentence in advice_page(dataclasses.replace(FOUND, **changes)).text()


def test_what_predictions_lack_is_one_note_instead_of_two_columns():
    predicted = dataclasses.replace(BEST, ratio=None, results="not checked")
    found = dataclasses.replace(FOUND, tried=(predicted,), recommended=predicted, is_predicted=True)
    text = advice_page(found).text()
    assert "Times were not measured. Results were not checked." in text
    assert "time  results" not in text and text.count("not checked") == 2


def test_a_combination_has_the_price_of_what_has_no_row_of_its_own():
    together = dataclasses.replace(
        BEST, names=("checkpoint", "offload"), prices=("one more forward", "crosses the bus")
    )
    found = dataclasses.replace(FOUND, tried=(BEST, NONE), combined=(together,), recommended=together)
    (row,) = [line for line in advice_page(found).text().splitlines() if line.startswith("  checkpoint + offload")]
    assert "crosses the bus" in row and "one more forward" not in row
