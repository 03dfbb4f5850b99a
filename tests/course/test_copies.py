"""The learner's copies of the lessons: made once, never written to again, and whole."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from notebooks.copies import BESIDE, LESSONS, WORK, make_copies

ROOT = LESSONS.parent


@pytest.fixture
def lessons(tmp_path: Path) -> Path:
    """A folder of two lessons."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("01_one_step.ipynb", "02_by_hand.ipynb", "README.md"):
        shutil.copyfile(LESSONS / name, folder / name)
    return folder


def learned(copy: Path, text: str) -> str:
    """Change the second cell as a learner does; what the file has then."""
    notebook = json.loads(copy.read_text(encoding="utf-8"))
    notebook["cells"][1]["source"] = text
    copy.write_text(json.dumps(notebook), encoding="utf-8")
    return copy.read_text(encoding="utf-8")


def test_all_lessons_are_copied_with_what_they_link_to(tmp_path):
    work = tmp_path / "work"
    count = len(list(LESSONS.glob("[0-9]*.ipynb")))
    assert make_copies(work) == [f"copied {count} lessons to work/, which are yours to change"]
    for copy in work.glob("*.ipynb"):
        notebook = nbformat.read(copy, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert not any(cell.outputs or cell.execution_count for cell in code), "the answers stand in the outputs"
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        for target in re.findall(r"\]\(([^)#:\s]+\.(?:ipynb|md|png|svg))\)", text):
            assert (work / target).exists() or (ROOT / "work" / target).resolve().exists(), target
    assert make_copies(work) == []


def test_nothing_of_the_learner_is_overwritten(tmp_path, lessons):
    work = tmp_path / "work"
    make_copies(work, lessons)
    mine = learned(work / "01_one_step.ipynb", "x = 1")
    (work / "README.md").write_text("my notes")
    (work / "02_by_hand.ipynb").write_text("no notebook any more")
    assert make_copies(work, lessons) == []
    assert (work / "01_one_step.ipynb").read_text(encoding="utf-8") == mine
    assert (work / "README.md").read_text() == "my notes"
    assert (work / "02_by_hand.ipynb").read_text() == "no notebook any more"


def test_a_lesson_that_changed_says_so_in_one_line_and_a_rerun_of_it_does_not(tmp_path, lessons):
    work, lesson = tmp_path / "work", lessons / "01_one_step.ipynb"
    make_copies(work, lessons)
    notebook = json.loads(lesson.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell.pop("outputs", None)  # executed again, with other figures
    lesson.write_text(json.dumps(notebook), encoding="utf-8")
    assert make_copies(work, lessons) == []

    mine = learned(work / lesson.name, "mine = 1")
    learned(lesson, "better = 1")
    (line,) = make_copies(work, lessons)
    assert "this lesson has changed since you got it: 01_one_step.ipynb. Yours stays" in line
    assert (work / lesson.name).read_text(encoding="utf-8") == mine
    (work / lesson.name).rename(work / "my_01.ipynb")
    assert make_copies(work, lessons) == ["copied 1 lesson to work/, which is yours to change"]
    assert "better = 1" in (work / lesson.name).read_text(encoding="utf-8")


def test_guesses_made_in_the_folder_of_the_lessons_go_along(tmp_path, lessons):
    (lessons / BESIDE[1]).write_text("[]")
    make_copies(tmp_path / "work", lessons)
    assert (tmp_path / "work" / BESIDE[1]).read_text() == "[]"


def test_make_lab_copies_and_opens_the_copy_which_git_ignores_and_clean_leaves():
    def plan(*arguments: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", *arguments]  # whose path may have a folder named work
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout

    for target in ("lab", "lab-simulated"):
        text = plan(target)
        assert text.index("notebooks/copies.py") < text.index("/lab/tree/work/01_one_step.ipynb")
    assert not re.search(r"\bwork\b", plan("clean"))
    ignored = subprocess.run(["git", "check-ignore", "-q", WORK / "x.ipynb"], cwd=ROOT, check=False, timeout=300)
    assert ignored.returncode in (0, 128)  # 128: not a clone


def test_no_package_is_needed(tmp_path):
    """`make lab` calls it before anything of the course's extra is installed."""
    command = [sys.executable, "-S", "-I", LESSONS / "copies.py", tmp_path / "work"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith(f"memlab: copied {len(list(LESSONS.glob('[0-9]*.ipynb')))} lessons")


def test_an_installation_says_that_it_is_still_at_work(tmp_path):
    log = tmp_path / "pip.log"
    log.write_text(
        "2026-11-24T00:31:02,123   Downloading torch-2.13.0.whl (900.1 MB)\n2026-11-24T00:31:03,123   Link\n"
    )
    done = subprocess.run(
        ["sh", ROOT / ".ci/pulse", log, "sh", "-c", "sleep 1.6; exit 3"],
        env={"PATH": "/usr/bin:/bin", "PULSE_S": "1"}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout == "memlab: still installing, 1 s so far (Downloading torch-2.13.0.whl (900.1 MB))\n"
