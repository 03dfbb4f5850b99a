"""Pretend CUDA switched on around a test, and a folder to work in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlab.predictor.pretend import PretendCuda

sys.path.insert(0, str(Path(__file__).parent))

from conftest_cards import card


@pytest.fixture
def pretend() -> Iterator[PretendCuda]:
    with PretendCuda(card()) as on:
        yield on


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a file, and a folder with a file."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("sub").mkdir()
    Path("sub/inner").write_text("kept too")
    return tmp_path
