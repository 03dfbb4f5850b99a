"""Coined words stay out: docs/glossary.md has the field's word for each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COINED = re.compile(
    r"(?<![a-z])(fore(tell|told|telling|tells)|tall(y|ies)|stillness|belongings|census(es)?|rehears(al|als|e|ed)|overlook(s|ed)?|"
    r"standins?|let(s|ting)? go|pass(es|ed|ing) by|made again|dear to|left behind|pretend(s|ed|ing)?|seams?|"
    r"told apart|whoever|by all means|what came of|come less gone|an out-of-memory(?! (error|message)))(?![a-z])",
    re.IGNORECASE,
)
BRITISH = re.compile(
    r"(quanti|initiali|normali|synchroni|recogni|seriali|optimi)s(e|ed|es|ing|ation)(?![a-z])|neighbour|behaviour|favour|"
    r"(?<![a-z])labelled|centred",
    re.IGNORECASE,
)
READ = (
    "memlab/**/*.py",
    "tests/**/*.py",
    "benchmarks/**/*.py",
    "notebooks/**/*.py",
    "notebooks/source/*.md",
    ".ci/run",
    "*.md",
    "docs/*.md",
)
ALLOWED = {
    "docs/glossary.md": r".",  # names what is not used
    "tests/test_language.py": r".",
    "tests/analysis/test_summary.py": r'"pretend CUDA',
    "tests/api/test_compare.py": r'"CPU dispatch tally"',
    "tests/api/test_who.py": r"found\.census",
    "memlab/allocator/replay.py": r'"pretend"',  # keys and engines in files that earlier versions saved
    "memlab/trace/trace.py": r'"CPU dispatch tally"|"pretend CUDA"',
    "memlab/api/who.py": r"census = property",  # the earlier name of an attribute
    "memlab/prediction/probe.py": r'"pretend( CUDA)?"',
}
"""File -> lines that may use a coined word."""


def offences(words: re.Pattern[str] = COINED) -> list[str]:
    found = []
    for pattern in READ:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            allowed = [text for place, text in ALLOWED.items() if path.match(place) or name == place]
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                word = words.search(line)
                if word and not any(re.search(text, line) for text in allowed):
                    found.append(f"{name}:{number}: {word[0]}")
    return found


def test_no_coined_words():
    assert offences() == []


def test_spelling_is_american_as_pytorch_has_it():
    assert [one for one in offences(BRITISH) if not one.startswith("CHANGELOG.md")] == []
    assert BRITISH.search("dequantising it") and not BRITISH.search("a quantized layer, its optimism")


@pytest.mark.parametrize(
    "text", ["a foretold peak", "It lets go of them.", "what is left behind", "on_the_pretend_device"]
)
def test_a_coined_word_is_found(text):
    assert COINED.search(text)


def test_names_of_files_are_plain():
    files = subprocess.run(
        ["git", "ls-files", "memlab", "tests"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert [name for name in files.split() if COINED.search(Path(name).stem.replace("_", " "))] == []
