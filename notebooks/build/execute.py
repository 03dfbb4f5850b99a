"""Executing a lesson in a kernel of its own, in an empty folder, without the learner's guesses."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

TIMEOUT_S = 300
HEADLINES = "application/vnd.memlab.headlines+json"


def executed(notebook: NotebookNode, more: Sequence[str] = ()) -> NotebookNode:
    """The notebook with its outputs; the sources in `more` run after its cells. An error of a cell goes out."""
    made = copy.deepcopy(notebook)
    made.cells += [nbformat.v4.new_code_cell(source) for source in more]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MEMLAB_GUESSES": str(Path(folder) / "guesses.json"), "OMP_NUM_THREADS": "2"}
        client = NotebookClient(
            made, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env=environment)
    return made


def headlines(notebook: NotebookNode) -> dict[str, int | float | str]:
    """The figures that a lesson ends with: those in its last output that has any."""
    found = [output.data[HEADLINES] for output in outputs(notebook) if HEADLINES in output.get("data", {})]
    return dict(found[-1]) if found else {}


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    """All outputs of all cells."""
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def differences(kept: dict[str, int | float | str], fresh: dict[str, int | float | str]) -> list[str]:
    """One line for each figure that is another now."""
    names = [*kept, *(name for name in fresh if name not in kept)]
    return [
        f"{name}: kept {kept.get(name)}, now {fresh.get(name)}" for name in names if kept.get(name) != fresh.get(name)
    ]
