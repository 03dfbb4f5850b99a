"""The sources of the lessons: Markdown that jupytext reads, one file a lesson."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from notebooks.build.diagrams import alt
from notebooks.build.head import SOLUTION, head, minutes

FOLDER = Path(__file__).resolve().parents[1]
SOURCES = FOLDER / "source"
_FOLDED = re.compile(r"<details>\s*<summary>\s*Solution.*?</details>\s*", re.DOTALL)
MOVED = {"17_offloading": "27_offloading"}
"""Earlier names of lessons, which links elsewhere may still have -> their names now."""
IDEA = "idea.png"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


@dataclass(frozen=True, slots=True)
class Exercise:
    """The solution of an exercise and the cell that checks it."""

    solution: str
    check: str


@dataclass(frozen=True, slots=True)
class Lesson:
    """One lesson by its source."""

    source: Path

    @property
    def name(self) -> str:
        """As "08_checkpointing"."""
        return self.source.stem

    @property
    def notebook(self) -> Path:
        """Where its notebook stands."""
        return FOLDER / f"{self.name}.ipynb"

    @property
    def diagram(self) -> Path:
        """The SVG of its idea; the PNG that was drawn from it stands beside it."""
        return self.source.with_suffix(".svg")

    @property
    def text(self) -> str:
        """The source."""
        return self.source.read_text(encoding="utf-8")

    @property
    def minutes(self) -> int:
        """How long a learner needs."""
        return minutes(self.text)

    def fresh(self) -> NotebookNode:
        """The notebook without outputs, its head below the title and its diagram below that."""
        title, rest = self.text.split("\n", 1)
        made = jupytext.reads(f"{title}\n\n{head(self.name, self.text)}\n{rest}", fmt="md")
        made.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL), language_info=NotebookNode(name="python"))
        for index, cell in enumerate(made.cells):
            cell.id = f"cell-{index:02d}"  # else each build would change every cell
            if cell.cell_type == "code":
                cell.source = cell.source.strip("\n")
        made.cells.insert(1, self._idea())
        nbformat.validate(made)
        return made

    def _idea(self) -> NotebookNode:
        """The diagram, which the cell itself holds: it is there wherever the notebook is."""
        cell = nbformat.v4.new_markdown_cell(f"![{alt(self.diagram)}](attachment:{IDEA})", id="idea")
        drawn = base64.b64encode(self.diagram.with_suffix(".png").read_bytes()).decode()
        cell.attachments = NotebookNode({IDEA: NotebookNode({"image/png": drawn})})
        return cell

    def handout(self) -> NotebookNode:
        """The notebook without outputs and without solutions, for a class; hints stay."""
        made = self.fresh()
        for cell in made.cells:
            if cell.cell_type == "markdown":
                cell.source = _FOLDED.sub("", cell.source).strip()
        return made

    def exercises(self) -> list[Exercise]:
        """The solutions in their order, each with the next cell that is tagged `check`."""
        solutions = SOLUTION.findall(self.text)
        checks = [cell.source for cell in self.fresh().cells if "check" in cell.metadata.get("tags", ())]
        assert len(solutions) == len(checks), f"{self.name}: {len(solutions)} solutions for {len(checks)} checks"
        return [Exercise(*both) for both in zip(solutions, checks, strict=True)]


def lessons(numbers: tuple[str, ...] = ()) -> list[Lesson]:
    """All lessons in their order, or those whose names begin with one of these."""
    return list(_found(numbers))


def _found(numbers: tuple[str, ...]) -> Iterator[Lesson]:
    for path in sorted(SOURCES.glob("[0-9]*.md")):
        if not numbers or path.stem.startswith(numbers):
            yield Lesson(path)
