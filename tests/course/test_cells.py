"""A lesson's prose and code are joined by the ids of its cells; where they do not fit, each fault is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest

from notebooks.build import __main__ as build
from notebooks.build import source
from notebooks.build.cells import Cell, SourceError, cells_of, faults, joined, spoken
from notebooks.build.source import SOURCES, Lesson, lessons

LESSONS = pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one.name)
PROSE = """# Why?

<!-- cell: first -->

<!-- cell: ask -->

<!-- cell: yours -->

<details><summary>Solution</summary>

<!-- cell: solution -->
</details>

<!-- prose -->

It is so.

<!-- cell: last -->
"""
CODE = """# %% first
%%memtrack --name step
!ls

x = "# %% of a line"

# %% ask guesses=["24 MiB", 25] tags=["asking"]
peak = lesson.guess("Peak?", between=(1, 2)), lesson.guess("Share?")

# %% yours tags=["exercise", "hidden"] scrolled=true
def yours():
    ...

# %% solution tags=["solution"]
def yours():
    return 1

# %% last
yours()
"""


@LESSONS
def test_ids_of_a_lesson_are_short_and_unique(lesson: Lesson) -> None:
    ids = [cell.id for cell in lesson.fresh().cells]
    assert ids[:2] == ["title", "idea"] and len(set(ids)) == len(ids)
    assert all(len(cell.id) <= 24 for cell in lesson.cells)


def test_prose_and_code_are_joined_at_the_markers():
    made = joined(PROSE, cells_of(CODE, "x.py"))
    nbformat.validate(nbformat.v4.new_notebook(cells=made))
    listing = "```python\ndef yours():\n    return 1\n```"
    assert [(cell.id, cell.cell_type, cell.source) for cell in made] == [
        ("title", "markdown", "# Why?"),
        ("first", "code", '%%memtrack --name step\n!ls\n\nx = "# %% of a line"'),
        ("ask", "code", 'peak = lesson.guess("Peak?", between=(1, 2)), lesson.guess("Share?")'),
        ("yours", "code", "def yours():\n    ..."),
        ("after-yours", "markdown", f"<details><summary>Solution</summary>\n\n{listing}\n</details>"),
        ("after-yours-2", "markdown", "It is so."),
        ("last", "code", "yours()"),
    ]
    assert made[2].metadata == {"tags": ["asking"]}, "a notebook holds no answers"
    assert made[3].metadata == {"tags": ["exercise", "hidden"], "scrolled": True}


@pytest.mark.parametrize(
    ("prose", "code", "expected"),
    [
        ("<!-- cell: a -->\n<!-- cell: b -->", "# %% a\n", ["x.md: <!-- cell: b --> has no cell in x.py"]),
        ("<!-- cell: a -->", "# %% a\n# %% b\n", ["x.py: the cell b has no <!-- cell: b --> in x.md"]),
        ("<!-- cell: a -->\n<!-- cell: a -->", "# %% a\n", ["x.md: two markers <!-- cell: a -->"]),
        ("<!-- cell: a -->", "# %% a\n1\n# %% a\n2\n", ["x.py: two cells have the id a"]),
        (
            "<!-- cell: a -->\n<!-- cell: c -->\n<!-- cell: b -->",
            "# %% a\n# %% b\n# %% c\n",
            ["x.md: from <!-- cell: c --> on the order is not that of the cells in x.py"],
        ),
        ("<!-- cell: a -->\n<!-- cell: -->", "# %% a\n", ["x.md: <!-- cell:  --> has no cell in x.py"]),
        ("<!-- cell:a-->", "# %% a\n", []),
        (
            "<!-- cell: a -->",
            '# %% a guesses=["yes"]\nlesson.guess("A?"), lesson.guess("B?")\n',
            ["x.py: the cell a asks for 2 guesses and answers 1: guesses=[...]"],
        ),
        (
            "<!-- cell: a -->",
            "# %% a guesses=[1]\n",
            ["x.py: the cell a asks for 0 guesses and answers 1: guesses=[...]"],
        ),
    ],
)
def test_each_fault_is_one_line(prose: str, code: str, expected: list[str]) -> None:
    assert faults(prose, cells_of(code, "x.py"), "x.md", "x.py") == expected


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import torch\n# %% a\n", "x.py: code above the first cell"),
        ("# %%\n1\n", "x.py: `# %%` has no id"),
        ("# %% Two Words\n", "x.py: `# %% Two Words` has no id"),
        ("# %% a tags=[exercise]\n", "x.py: the metadata of cell a is not key=JSON: tags=[exercise]"),
        ("# %% a guesses=3\n", "x.py: the guesses of cell a are no list: 3"),
    ],
)
def test_a_cell_that_cannot_be_read_is_named(code: str, said: str) -> None:
    with pytest.raises(SourceError) as caught:
        cells_of(code, "x.py")
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A course of one lesson, in English and in German."""
    folder = tmp_path / "source"
    (folder / "de").mkdir(parents=True)
    name = "01_one_step"
    for ending in (".md", ".py", ".svg", ".png"):
        (folder / f"{name}{ending}").write_bytes((SOURCES / f"{name}{ending}").read_bytes())
    (tmp_path / f"{name}.ipynb").write_bytes(Lesson(name).notebook.read_bytes())
    german = Lesson(name).prose.replace("## Half the rows", "## Die Hälfte der Zeilen")
    (folder / "de" / f"{name}.md").write_text(german, encoding="utf-8")
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    monkeypatch.setattr(source, "SOURCES", folder)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["build", *arguments])
    return build.main()


def test_an_edition_shares_code_ids_figures_and_outputs(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "prose", "--language", "de") == 0
    english, german = (nbformat.read(course / one / "01_one_step.ipynb", as_version=4) for one in ("", "de"))
    assert [cell.id for cell in german.cells] == [cell.id for cell in english.cells]
    others = [(a.source, b.source) for a, b in zip(english.cells, german.cells, strict=True) if a != b]
    assert len(others) == 1 and "## Die Hälfte der Zeilen" in others[0][1]


QUESTION = "Share of the parameters in the peak of one training step, in percent?"
GERMAN = f"""
<!-- head: **Ziele**: wie die Spitze zustande kommt; die Tipps {{tips}}. **Vorher**: {{prerequisites}}.
**Zeit**: etwa {{minutes}} Minuten. -->
<!-- idea: Speicher in einem Schritt -->
<!-- say: {QUESTION} = Anteil der Parameter an der Spitze, in Prozent? -->
"""


def test_an_edition_has_its_own_head_alt_text_and_questions(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = course / "source" / "de" / "01_one_step.md"
    title, rest = file.read_text(encoding="utf-8").split("\n", 1)
    file.write_text(f"{title}\n{GERMAN}{rest}", encoding="utf-8")
    assert call(monkeypatch, "prose", "--language", "de") == 0
    english, german = (nbformat.read(course / one / "01_one_step.ipynb", as_version=4) for one in ("", "de"))
    assert "**Ziele**: wie die Spitze zustande kommt; die Tipps A1, C9. **Vorher**: –." in german.cells[0].source
    assert "Objectives" not in german.cells[0].source and "say:" not in german.cells[0].source
    assert german.cells[1].source.startswith("![Speicher in einem Schritt](attachment:")
    assert QUESTION in nbformat.writes(english) and QUESTION not in nbformat.writes(german)
    ask = next(cell for cell in german.cells if cell.id == "guess")
    assert 'lesson.guess("Anteil der Parameter an der Spitze, in Prozent?")' in ask.source
    assert any("Anteil der Parameter an der Spitze, in Prozent?" in str(output) for output in ask.outputs)
    assert Lesson("01_one_step", "de").minutes == Lesson("01_one_step").minutes, "what is said elsewhere is no prose"


def test_a_translated_question_keeps_what_its_fields_had() -> None:
    said = spoken(
        "<!-- say: Does it fit on the {card}? = Passt es auf {card}? -->\n",
        [Cell("a", 'f"Does it fit on the {card}?"', {})],
        "x.md",
    )
    assert said.code('f"Does it fit on the {card}?"') == 'f"Passt es auf {card}?"'
    assert said.output("Does it fit on the RTX 4060? You said") == "Passt es auf RTX 4060? You said"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("When?", "has no ` = ` and translation"),
        ("Where? = Wo?", "is in no cell of the code"),
        ("When? = Wann auf {card}?", "have other {fields}"),
        ('When? = "Wann?"', "would end the text in the code"),
    ],
)
def test_a_translation_that_cannot_stand_in_the_code_is_named(text: str, why: str) -> None:
    with pytest.raises(SourceError) as caught:
        spoken(f"<!-- say: {text} -->\n", [Cell("a", 'lesson.guess("When?")', {})], "de/x.md")
    assert str(caught.value).startswith("de/x.md: <!-- say: ") and why in str(caught.value)


def test_the_build_says_which_marker_an_edition_lacks(
    course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = course / "source" / "de" / "01_one_step.md"
    file.write_text(file.read_text(encoding="utf-8").replace("<!-- cell: price -->", ""), encoding="utf-8")
    assert call(monkeypatch, "prose", "--language", "de") == 1
    assert (
        capsys.readouterr().err == "01_one_step.py: the cell price has no <!-- cell: price --> in de/01_one_step.md\n"
    )
