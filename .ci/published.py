"""published.py check | release | set NAME VALUE: what .ci/published.toml has, and the files that repeat it."""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(".ci/published.toml")
PLACEHOLDERS = {"owner": "OWNER-UNKNOWN", "contact": "contact@example.invalid", "sdist_sha256": "0" * 64}
FORMS = {
    "owner": (r"(?:github\.com|/github|/gh)/([\w.-]+)/memlab\b", r"//([\w.-]+)\.github\.io/memlab\b"),
    "contact": (r"[\w.+-]+@[\w-]+\.[\w.-]*\w",),
    "sdist_sha256": (r"sha256: ([0-9a-f]{64})",),
}
"""Name -> how it stands in a file."""
PLACES = {
    "pyproject.toml": ("owner",),
    "README.md": ("owner",),
    "CITATION.cff": ("owner",),
    "SECURITY.md": ("contact",),
    "CODE_OF_CONDUCT.md": ("contact",),
    "recipe/recipe.yaml": ("owner", "sdist_sha256"),
}
"""File -> what it repeats."""


def values(root: Path = ROOT) -> dict[str, str]:
    """The table."""
    return tomllib.loads((root / TABLE).read_text("utf-8"))


def found(text: str, name: str) -> list[str]:
    """The values of this name in a text."""
    return [value for form in FORMS[name] for value in re.findall(form, text)]


def disagreements(root: Path = ROOT) -> Iterator[str]:
    """The files that repeat something else than the table has, or nothing."""
    known = values(root)
    for file, names in PLACES.items():
        text = (root / file).read_text("utf-8")
        for name in names:
            seen = set(found(text, name))
            if seen != {known[name]}:
                yield f"{file} has {', '.join(sorted(seen)) or 'nothing'} for {name}, {TABLE} has {known[name]}"


def unfinished(root: Path = ROOT) -> Iterator[str]:
    """Everything that stands in the way of a release."""
    known = values(root)
    yield from disagreements(root)
    version = re.findall(r'^__version__ = "([^"]+)"', (root / "memlab/__init__.py").read_text("utf-8"), re.MULTILINE)[0]
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        yield f"memlab/__init__.py: the version {version} is none of a release"
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        yield f'CHANGELOG.md has no heading "## {version} (YYYY-MM-DD)"'
    for name in (name for name, value in known.items() if value == PLACEHOLDERS[name]):
        yield f"{TABLE}: {name} is a placeholder; .ci/published.py set {name} VALUE"
    if known["sdist_sha256"] != (built := checksum(root)):
        yield f"{TABLE}: sdist_sha256 is not that of the sdist of this tree, {built}"


def checksum(root: Path) -> str:
    """Of the sdist of this tree, which hatchling builds the same everywhere."""
    from hatchling.builders.sdist import SdistBuilder

    with tempfile.TemporaryDirectory() as folder:
        (file,) = SdistBuilder(str(root)).build(directory=folder, versions=["standard"])
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def fill(name: str, value: str, root: Path = ROOT) -> None:
    """Write a value into the table and wherever it is repeated."""

    def replaced(match: re.Match[str]) -> str:
        begin, end = match.span(match.re.groups)
        return match[0][: begin - match.start()] + value + match[0][end - match.start() :]

    table = root / TABLE
    table.write_text(
        re.sub(rf'(?m)^{name} = ".*"$', lambda _: f'{name} = "{value}"', table.read_text("utf-8")), "utf-8"
    )
    for file in (file for file, names in PLACES.items() if name in names):
        text = (root / file).read_text("utf-8")
        for form in FORMS[name]:
            text = re.sub(form, replaced, text)
        (root / file).write_text(text, "utf-8")


def main(arguments: list[str]) -> int:
    """The exit status; every problem is a line."""
    match arguments:
        case ["set", name, value] if name in FORMS:
            fill(name, value)
            problems = list(disagreements())
        case ["check"]:
            problems = list(disagreements())
        case ["release"]:
            problems = list(unfinished())
        case _:
            problems = [f"usage: published.py check | release | set {'|'.join(FORMS)} VALUE"]
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
