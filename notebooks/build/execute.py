"""Executing a lesson in a kernel of its own, in an empty folder, with the guesses of an imagined student."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from notebooks.build.cells import SourceError

TIMEOUT_S = 300
HEADLINES = "application/vnd.memlab.headlines+json"


COMMIT = """
asked = [guess for guess in lesson.guesses if guess.state == "open"]
if len(asked) != len(answers):
    raise ValueError(f"it asked for {len(asked)} guesses and answers {len(answers)}")
for guess, answer in zip(asked, answers):
    guess.commit(answer)
"""
"""What commits the answers to the guesses of the cell that ran last."""


def executed(
    notebook: NotebookNode, more: Sequence[str] = (), answers: Mapping[str, Sequence[Any]] | None = None
) -> NotebookNode:
    """The notebook with its outputs; the sources in `more` run after its cells. An error of a cell goes out.

    `answers` are committed to the guesses of a cell, by its id, once it has run; SourceError if one cannot be.
    """
    made = copy.deepcopy(notebook)
    made.cells += [nbformat.v4.new_code_cell(source) for source in more]
    with tempfile.TemporaryDirectory() as folder:
        # One thread: where cores are shared, as by two lessons at once, threads that wait for each other spin.
        environment = {**os.environ, "MEMLAB_GUESSES": str(Path(folder) / "guesses.json"), "OMP_NUM_THREADS": "1"}
        client = NotebookClient(
            made, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
        )

        async def commit(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
            said = answers.get(cell.id) if answers else None
            if said and execute_reply["content"]["status"] == "ok":
                await _commit(client, cell, cell_index, said)

        client.on_cell_executed = commit
        client.execute(env=environment)
    return made


async def _commit(client: NotebookClient, cell: NotebookNode, index: int, answers: Sequence[Any]) -> None:
    """Commit answers in the kernel, as a press of Commit does: the cell's outputs follow, and no cell is counted."""

    def take(message: dict[str, Any]) -> None:
        if message["msg_type"] == "update_display_data" or message["msg_type"].startswith("comm"):
            client.process_message(message, cell, index)

    # In names of its own, so that the notebook finds nothing new among its own; silent: no hook of a cell hears of it.
    code = f"exec({COMMIT!r}, {{'lesson': lesson, 'answers': {list(answers)!r}}})"
    reply = await client.kc.execute_interactive(
        code, silent=True, store_history=False, allow_stdin=False, output_hook=take, timeout=TIMEOUT_S
    )
    if reply["content"]["status"] != "ok":
        raise SourceError(f"the cell {cell.id}: {reply['content']['evalue']}")


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
