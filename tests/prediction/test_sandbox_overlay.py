"""Files in a child: writing and deleting seem to work there, each path is listed, and the disk stays as it is."""

# ruff: noqa: PTH103, PTH104, PTH105, PTH107, PTH110, PTH113, PTH123, PTH207, PTH208, SIM115
from __future__ import annotations

import glob
import gzip
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from in_child import fine

from memlab.prediction.child.overlay import COPIED_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")


def fails(kind: type[OSError], act) -> None:
    """An error that says nothing of a fence: the one that would have come without it."""
    with pytest.raises(kind) as raised:
        act()
    assert "blocked" not in str(raised.value)


def test_a_new_file_is_written_and_read_back(untouched):
    def work():
        Path("new").write_text("text")
        assert Path("new").read_text() == "text"
        with open("new", "a") as file:
            file.write(" more")
        assert Path("new").stat().st_size == 9
        assert (os.path.exists("new"), os.path.isfile("new"), Path("new").is_dir()) == (True, True, False)
        assert sorted(os.listdir()) == ["file", "new", "sub"]
        assert sorted(path.name for path in Path().iterdir()) == ["file", "new", "sub"]
        assert sorted(glob.glob("*")) == ["file", "new", "sub"]
        assert [sorted(files) for _, _, files in os.walk(".")] == [["file", "new"], ["inner"]]

    assert fine(work).refused == ("writing 'new' (2 times)",)


def test_an_old_file_is_changed_for_the_child_alone(untouched):
    def work():
        with open("file", "r+") as file:
            assert file.read() == "kept"
            file.write(", and longer")
        assert Path("file").read_text() == "kept, and longer"
        with open("sub/inner", "a") as file:
            file.write("!")
        assert Path("sub/inner").read_text() == "kept too!"
        Path("file").write_text("new")
        assert Path("file").read_text() == "new"

    assert fine(work).refused == ("writing 'file' (2 times)", "writing 'sub/inner'")


def test_folders_are_made_and_used(untouched):
    def work():
        os.makedirs("a/b/c", exist_ok=True)
        Path("a/b").mkdir(parents=True, exist_ok=True)
        Path("sub").mkdir(exist_ok=True)
        Path("a/b/c/file").write_text("deep")
        assert [path.name for path in Path("a").rglob("*")] == ["b", "c", "file"]
        os.chdir("a/b")
        assert Path("c/file").read_text() == "deep"
        Path("here").write_text("x")
        shutil.rmtree("c")
        assert os.listdir() == ["here"]

    assert fine(work).refused[:4] == (
        "making the folder 'a'", "making the folder 'a/b'", "making the folder 'a/b/c'", "writing 'a/b/c/file'",
    )  # fmt: skip


def test_what_is_deleted_is_gone_for_the_child(untouched):
    def work():
        Path("file").unlink()
        assert not Path("file").exists()
        fails(FileNotFoundError, lambda: open("file"))
        fails(FileNotFoundError, lambda: Path("file").unlink())
        fails(OSError, lambda: Path("sub").rmdir())
        os.remove("sub/inner")
        assert list(Path("sub").iterdir()) == []
        Path("sub").rmdir()
        assert sorted(os.listdir()) == []
        fails(FileNotFoundError, lambda: Path("sub/new").write_text("x"))
        Path("file").write_text("again")
        assert Path("file").read_text() == "again"
        Path("sub").mkdir()
        assert list(Path("sub").iterdir()) == []

    assert fine(work).refused == (
        "deleting 'file'", "deleting 'sub/inner'", "deleting 'sub'", "writing 'file'", "making the folder 'sub'",
    )  # fmt: skip


def test_a_checkpoint_is_replaced_as_programs_do_it(untouched):
    def work():
        for step in range(3):
            torch.save({"step": step, "x": torch.ones(10) * step}, "model.pt.tmp")
            os.replace("model.pt.tmp", "model.pt")
        assert torch.load("model.pt")["step"] == 2
        assert not Path("model.pt.tmp").exists()
        shutil.move("file", "sub/moved")
        assert (Path("sub/moved").read_text(), Path("file").exists()) == ("kept", False)
        shutil.copy("sub/moved", "copy")
        assert Path("copy").read_text() == "kept"
        Path(tempfile.gettempdir(), "outside").write_text("in")
        os.rename(Path(tempfile.gettempdir(), "outside"), "in")
        assert Path("in").read_text() == "in"

    found = fine(work).refused[:2]
    assert found == ("writing 'model.pt.tmp' (3 times)", "renaming 'model.pt.tmp' to 'model.pt' (3 times)")


def test_libraries_write(untouched):
    def work():
        torch.save({"x": torch.ones(3)}, "modèle.pt")
        torch.save({"x": torch.ones(3)}, Path("sub/old.pt"), _use_new_zipfile_serialization=False)
        assert torch.load("modèle.pt")["x"].tolist() == torch.load("sub/old.pt")["x"].tolist() == [1, 1, 1]
        np.save("array.npy", np.arange(3))
        assert np.load("array.npy").tolist() == [0, 1, 2]
        with gzip.open("text.gz", "wt") as file:
            file.write("packed")
        with gzip.open("text.gz", "rt") as file:
            assert file.read() == "packed"
        handler = logging.FileHandler("run.log")
        handler.emit(logging.makeLogRecord({"msg": "logged"}))
        handler.close()
        assert Path("run.log").read_text() == "logged\n"
        with Path("a.json").open("w") as file:
            json.dump([1], file)
        memory = np.memmap("map", dtype="u1", mode="w+", shape=(10,))
        memory[:] = 7
        assert np.fromfile("map", dtype="u1").tolist() == [7] * 10

    assert {one.partition(" (")[0] for one in fine(work).refused} == {
        f"writing '{name}'" for name in ("modèle.pt", "sub/old.pt", "array.npy", "text.gz", "run.log", "a.json", "map")
    }


def test_errors_are_those_that_would_have_come(untouched):
    def work():
        fails(FileExistsError, lambda: open("file", "x"))
        fails(FileNotFoundError, lambda: open("nothing", "r+"))
        fails(FileNotFoundError, lambda: open("no/folder", "w"))
        fails(IsADirectoryError, lambda: open("sub", "w"))
        fails(FileExistsError, lambda: Path("sub").mkdir())
        fails(FileExistsError, lambda: os.open("file", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        fails(FileNotFoundError, lambda: Path("no/folder").mkdir())
        fails(FileNotFoundError, lambda: Path("nothing").rename("other"))
        fails(FileNotFoundError, lambda: Path("nothing").stat())
        with pytest.raises(TypeError):
            open(3.5, "w")

    assert fine(work).refused == ()


def test_a_large_file_is_not_copied(folder):
    with Path("large").open("wb") as file:
        file.truncate(COPIED_BYTES + 1)

    def work():
        with pytest.raises(PermissionError, match="blocked"):
            open("large", "a")
        with pytest.raises(PermissionError, match="blocked"):
            Path("large").rename("other")
        Path("large").write_text("new")

    fine(work)
    assert Path("large").stat().st_size == COPIED_BYTES + 1


def test_descriptors_are_diverted_as_well(untouched):
    def work():
        descriptor = os.open("new", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"low")
        os.close(descriptor)
        descriptor = os.open("file", os.O_RDWR)
        assert os.read(descriptor, 4) == b"kept"
        os.write(descriptor, b"!")
        os.close(descriptor)
        assert (Path("new").read_text(), Path("file").read_text()) == ("low", "kept!")
        Path("touched").touch()
        assert Path("touched").stat().st_size == 0

    assert fine(work).refused[:2] == ("writing 'new'", "writing 'file'")
