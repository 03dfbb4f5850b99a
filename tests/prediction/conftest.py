"""Fake CUDA switched on around a test, and a folder to work in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_gpus import card

from memlab.fake_cuda import FakeCuda


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with FakeCuda(card()) as on:
        yield on


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a file, and a folder with a file."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("sub").mkdir()
    Path("sub/inner").write_text("kept too")
    return tmp_path


@pytest.fixture
def untouched(folder: Path) -> Iterator[Path]:
    """The same, which has to be as it was when the test ends."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}

    before = contents()
    yield folder
    assert contents() == before
