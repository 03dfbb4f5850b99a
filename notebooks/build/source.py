"""The sources of the lessons: two files each, prose and code (see `notebooks.build.cells`), and a diagram."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from notebooks.build.cells import SPOKEN, Cell, SourceError, Spoken, cells_of, faults, joined, spoken
from notebooks.build.diagrams import alt
from notebooks.build.head import ENGLISH, head, minutes

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
    """One lesson by its name, as "08_checkpointing", in English or as the edition in another language."""

    name: str
    language: str = ""
    """The folder of an edition's prose and notebooks, as "de"; code, diagram and outputs are those of the English one."""

    @property
    def notebook(self) -> Path:
        """Where its notebook stands."""
        return FOLDER / self.language / f"{self.name}.ipynb"

    @property
    def original(self) -> Path:
        """The notebook in English, whose outputs every edition may show."""
        return FOLDER / f"{self.name}.ipynb"

    @property
    def diagram(self) -> Path:
        """The SVG of its idea; the PNG that was drawn from it stands beside it."""
        return SOURCES / f"{self.name}.svg"

    @property
    def prose(self) -> str:
        """Its text, with a marker where each cell stands."""
        return (SOURCES / self._prose_file).read_text(encoding="utf-8")

    @property
    def _prose_file(self) -> str:
        return Path(self.language, f"{self.name}.md").as_posix()

    @property
    def cells(self) -> list[Cell]:
        """Its code, solutions included; SourceError if the prose does not have the same cells."""
        file = f"{self.name}.py"
        found = cells_of((SOURCES / file).read_text(encoding="utf-8"), file)
        if wrong := faults(self.prose, found, self._prose_file, file):
            raise SourceError("\n".join(wrong))
        return found

    @property
    def spoken(self) -> Spoken:
        """What an edition says itself in the place of the build's and the code's English; SourceError if it cannot be read."""
        return spoken(self.prose, self.cells, self._prose_file)

    @property
    def answers(self) -> dict[str, list[Any]]:
        """The ids of cells that ask for guesses -> what a student might answer."""
        return {cell.id: cell.answers for cell in self.cells if cell.answers}

    @property
    def minutes(self) -> int:
        """How long a learner needs."""
        return minutes(self.prose, self.cells)

    def fresh(self) -> NotebookNode:
        """The notebook without outputs, its head below the title and its diagram below that."""
        said, cells = self.spoken, self.cells
        title, rest = SPOKEN.sub("", self.prose).split("\n", 1)
        above = head(self.name, self.prose, cells, said.head or ENGLISH)
        made = nbformat.v4.new_notebook(
            cells=joined(f"{title}\n\n{above}\n{rest}", [replace(one, source=said.code(one.source)) for one in cells]),
            metadata=NotebookNode(kernelspec=NotebookNode(KERNEL), language_info=NotebookNode(name="python")),
        )
        made.cells.insert(1, self._idea(said.idea or alt(self.diagram)))
        nbformat.validate(made)
        return made

    def _idea(self, alt_text: str) -> NotebookNode:
        """The diagram, which the cell itself holds: it is there wherever the notebook is."""
        cell = nbformat.v4.new_markdown_cell(f"![{alt_text}](attachment:{IDEA})", id="idea")
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
        solutions, checks = (
            [cell.source for cell in self.cells if cell.is_tagged(tag)] for tag in ("solution", "check")
        )
        assert len(solutions) == len(checks), f"{self.name}: {len(solutions)} solutions for {len(checks)} checks"
        return [Exercise(*both) for both in zip(solutions, checks, strict=True)]


def lessons(numbers: tuple[str, ...] = (), language: str = "") -> list[Lesson]:
    """All lessons in their order, or those whose names begin with one of these, in a language that has them."""
    names = sorted(path.stem for path in (SOURCES / language).glob("[0-9]*.md"))
    return [Lesson(name, language) for name in names if not numbers or name.startswith(numbers)]
