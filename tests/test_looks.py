"""`looks.md` names a test for everything that new users found wrong: the tests exist, and the phrases are gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_hints import texts

TESTS = Path(__file__).parent
ROWS = [line for line in (TESTS / "looks.md").read_text("utf-8").splitlines() if line.startswith("| ")]
FOUND = [line.strip("| ").rsplit(" | ", 1) for line in ROWS if line != "| found | shown right by |"]
# Others are among the coined words of test_language.py.
PHRASES = (
    "guess over measurement", "it (force)", "seconds mean nothing here", "Allowed: ", "(s)",
    "[enough for this request]\n", "ended early",
)  # fmt: skip


@pytest.mark.parametrize(("what", "shown"), FOUND, ids=[what[:40] for what, _ in FOUND])
def test_a_test_shows_it_right(what, shown):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", shown)
    assert named, what
    for file, name in named:
        assert f"def {name}(" in (TESTS / file).read_text("utf-8"), f"{file}::{name}"


def test_everything_that_was_found_has_its_row():
    assert len(FOUND) > 60


def test_phrases_that_were_found_are_gone():
    assert not [text for text in texts() for phrase in PHRASES if phrase in text and " " in text]
    assert not [text for text in texts() if re.search(r"\b1 names\b|commit\(1 to", text)]
