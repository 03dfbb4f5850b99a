"""The two files of a lesson, joined by the ids of its cells: prose in Markdown, and code that editions in other languages share.

In `NN_name.md` a line is the place of a cell, or the place where another cell of prose begins:

    <!-- cell: measure -->
    <!-- prose -->

In `NN_name.py`, the percent format of editors, cells stand in the same order, with magics as they are typed in a notebook:

    # %% measure
    # %% yours tags=["exercise"]

The prose of an edition in another language also carries what the build and the code would say in English: the head below
the title, the alt text of the diagram, and texts of the code that readers see, such as the questions of guesses:

    <!-- head: **Ziele**: ... **Vorher**: {prerequisites}. **Zeit**: etwa {minutes} Minuten. -->
    <!-- idea: was das Diagramm zeigt -->
    <!-- say: When is the peak? = Wann ist die Spitze? -->

What follows an id is metadata of the cell, as `key=JSON`. A cell that is tagged `solution` is not one of the notebook: its code
is a listing in the prose that folds it. `guesses` are what a student might answer to the questions of the cell, in their order,
and are committed when the lesson is executed; the notebook does not have them:

    # %% guess guesses=["24 MiB", "backward"]
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import nbformat
from nbformat import NotebookNode

MARKER = re.compile(r"^<!--\s*cell:\s*(.*?)\s*-->$", re.MULTILINE)
BREAK = re.compile(r"^<!-- prose -->$", re.MULTILINE)
SPOKEN = re.compile(r"^<!-- (head|idea|say): *(.*?) *-->\n?", re.MULTILINE | re.DOTALL)
"""What an edition says in its own language: the kind, and the text."""
_FIELD = re.compile(r"\{[^{}]*\}")
ANSWERS = "guesses"
_BEGIN = re.compile(r"^# %%(.*)$", re.MULTILINE)
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class SourceError(Exception):
    """What is wrong with the files of a lesson, one line for each fault."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of code."""

    id: str
    source: str
    metadata: dict[str, Any]

    def is_tagged(self, tag: str) -> bool:
        """Whether it has this tag."""
        return tag in self.metadata.get("tags", ())

    @property
    def asks(self) -> int:
        """How many guesses it asks for."""
        return self.source.count("lesson.guess(")

    @property
    def answers(self) -> list[Any]:
        """What a student might answer."""
        return list(self.metadata.get(ANSWERS, ()))


def cells_of(code: str, file: str) -> list[Cell]:
    """The cells of a file of code, in their order."""
    above, *parts = _BEGIN.split(code)
    if above.strip():
        raise SourceError(f"{file}: code above the first cell, which begins with `# %% ID`")
    return [_cell(head, source, file) for head, source in zip(parts[::2], parts[1::2], strict=True)]


def _cell(head: str, source: str, file: str) -> Cell:
    id, _, rest = head.strip().partition(" ")
    if not _ID.fullmatch(id):
        raise SourceError(f"{file}: `# %%{head}` has no id of small letters, digits and hyphens")
    try:
        metadata = dict(_metadata(rest))
    except ValueError:
        raise SourceError(f"{file}: the metadata of cell {id} is not key=JSON: {rest}") from None
    if not isinstance(answers := metadata.get(ANSWERS, []), list):
        raise SourceError(f"{file}: the guesses of cell {id} are no list: {answers}")
    return Cell(id, source.strip("\n"), metadata)


def _metadata(text: str) -> Iterator[tuple[str, Any]]:
    while text := text.strip():
        key, _, rest = text.partition("=")
        value, end = json.JSONDecoder().raw_decode(rest)
        yield key, value
        text = rest[end:]


def faults(prose: str, cells: Sequence[Cell], prose_file: str, code_file: str) -> list[str]:
    """Why the two files cannot be joined, one line each; none if they can."""
    places, ids = MARKER.findall(prose), [cell.id for cell in cells]
    found = [f"{prose_file}: two markers <!-- cell: {id} -->" for id in _doubled(places)]
    found += [f"{code_file}: two cells have the id {id}" for id in _doubled(ids)]
    found += [f"{prose_file}: <!-- cell: {id} --> has no cell in {code_file}" for id in places if id not in ids]
    found += [
        f"{code_file}: the cell {id} has no <!-- cell: {id} --> in {prose_file}" for id in ids if id not in places
    ]
    found += [
        f"{code_file}: the cell {cell.id} asks for {cell.asks} guesses and answers {len(cell.answers)}: guesses=[...]"
        for cell in cells
        if cell.asks != len(cell.answers)
    ]
    if not found and places != ids:
        first = next(id for id, other in zip(places, ids, strict=True) if id != other)
        found.append(f"{prose_file}: from <!-- cell: {first} --> on the order is not that of the cells in {code_file}")
    return found


def _doubled(ids: Sequence[str]) -> list[str]:
    return [id for id, count in Counter(ids).items() if count > 1]


@dataclass(frozen=True, slots=True)
class Spoken:
    """What the prose of an edition says in the place of English: head and alt text, "" without, and texts of the code."""

    head: str = ""
    idea: str = ""
    texts: tuple[tuple[str, str], ...] = ()
    """English as it is typed in the code -> the edition's."""

    def code(self, source: str) -> str:
        """The code of a cell, with the texts of the edition."""
        for english, other in self.texts:
            source = source.replace(english, other)
        return source

    def output(self, text: str) -> str:
        """What a cell has shown; the fields of an f-string had some value then."""
        for english, other in self.texts:
            fields = _FIELD.findall(english)
            pattern = "(.+?)".join(map(re.escape, _FIELD.split(english)))

            def translated(found: re.Match[str], other: str = other, fields: list[str] = fields) -> str:
                values = dict(zip(fields, found.groups(), strict=True))
                return _FIELD.sub(lambda field: values.get(field[0], field[0]), other)

            text = re.sub(pattern, translated, text)
        return text


def spoken(prose: str, cells: Sequence[Cell], file: str) -> Spoken:
    """What a file of prose says in its own language; SourceError where no cell has such a text, or a translation is missing."""
    said, wrong = {"head": "", "idea": ""}, []
    texts: list[tuple[str, str]] = []
    for kind, text in SPOKEN.findall(prose):
        one = " ".join(text.split())
        english, _, other = one.partition(" = ")
        if kind != "say":
            said[kind] = one
        elif not other:
            wrong.append(f"{file}: <!-- say: {one} --> has no ` = ` and translation")
        elif not any(english in cell.source for cell in cells):
            wrong.append(f"{file}: <!-- say: {english} --> is in no cell of the code")
        elif sorted(_FIELD.findall(english)) != sorted(_FIELD.findall(other)):
            wrong.append(f"{file}: <!-- say: {english} --> and its translation have other {{fields}}")
        elif set(other) & {'"', "\\"}:
            wrong.append(f"{file}: <!-- say: {english} --> would end the text in the code: no quotes and backslashes")
        else:
            texts.append((english, other))
    if wrong:
        raise SourceError("\n".join(wrong))
    return Spoken(**said, texts=tuple(texts))


def joined(prose: str, cells: Sequence[Cell]) -> list[NotebookNode]:
    """The cells of the notebook. Prose is named after the code above it, so that its id stays if other cells come or go."""
    by_id = {cell.id: cell for cell in cells}
    text, *parts = MARKER.split(with_solutions(prose, cells))
    made = _prose_cells(text, "title")
    for id, text in zip(parts[::2], parts[1::2], strict=True):
        cell = by_id[id]
        metadata = {key: value for key, value in cell.metadata.items() if key != ANSWERS}
        made.append(nbformat.v4.new_code_cell(cell.source, id=id, metadata=NotebookNode(metadata)))
        made += _prose_cells(text, f"after-{id}")
    return made


def with_solutions(prose: str, cells: Sequence[Cell]) -> str:
    """The prose with a listing in the place of each solution's marker."""
    listings = {cell.id: f"```python\n{cell.source}\n```" for cell in cells if cell.is_tagged("solution")}
    return MARKER.sub(lambda marker: listings.get(marker[1], marker[0]), prose)


def _prose_cells(text: str, id: str) -> list[NotebookNode]:
    texts = [stripped for part in BREAK.split(text) if (stripped := part.strip("\n"))]
    ids = [id, *(f"{id}-{number}" for number in range(2, len(texts) + 1))]
    return [nbformat.v4.new_markdown_cell(text, id=id) for text, id in zip(texts, ids, strict=False)]
