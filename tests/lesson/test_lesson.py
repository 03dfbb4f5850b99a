from __future__ import annotations

import os

import pytest

from memlab.errors import MemlabError
from memlab.lesson import Lesson
from memlab.seams import blas_workspace_sizes
from memlab.units import MiB

NAME = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_workspace_is_that_of_most_cards_unless_somebody_said_otherwise(monkeypatch):
    monkeypatch.setenv(NAME, ":4096:8")
    Lesson("x", needs="1 MiB")
    assert os.environ[NAME] == ":4096:8"
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)
    Lesson("x", needs="1 MiB")
    assert 8 * MiB < sum(blas_workspace_sizes()) < 9 * MiB


def test_too_little_memory_is_said_in_one_line():
    with pytest.raises(MemlabError, match=r"takes about 1,000\.0? ?TiB|of this machine's memory") as error:
        Lesson("x", needs="1000 TiB")
    assert "\n" not in str(error.value)
