"""docs/tips.md: every classic tip, the lessons and techniques that answer it, and the effect as the kept notebooks measured it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

import memlab
from memlab.units import format_bytes
from notebooks.build.execute import headlines
from notebooks.build.source import FOLDER, lessons

SOURCE = Path(__file__).with_name("tips.toml")
TABLE = FOLDER.parent / "docs" / "tips.md"
RECORDED = FOLDER.parent / "benchmarks" / "results" / "techniques.json"
IDS = [
    f"{part}{number}"
    for part, count in zip("ABCDEFG", (8, 8, 18, 4, 7, 5, 6), strict=True)
    for number in range(1, count + 1)
]
PARTS = {
    "A": "Where the memory goes", "B": "Watching it", "C": "Saving it in training", "D": "Saving it in evaluation",
    "E": "Myths and switches", "F": "Feeding the GPU", "G": "Smaller models, lighter design",
}  # fmt: skip
VERDICTS = ("holds", "partly", "outdated", "wrong")
SAVED = ": share of the peak saved"
_HEAD = """# The classic tips, measured

Common advice on PyTorch memory since 2018, tip by tip: whether it holds today,
the lesson about it, the [techniques](techniques.md) in `memlab.techniques`, and the effect. This page is generated
by `python -m notebooks.build tips`.

*Effect* is a figure from the end of the lesson, measured on a CPU or predicted if a CPU cannot show it, or the saving of the
technique in the small workload that demonstrates it, measured on the CPU, as in [techniques](techniques.md). It is an
example, not a promise for another model: `memlab.advise` tries them on yours.

"""


@dataclass(frozen=True, slots=True)
class Tip:
    """One row."""

    name: str
    tip: str
    lessons: tuple[str, ...]
    verdict: str
    today: str
    figures: tuple[str, ...] = ()
    technique: str = ""
    practice: str = ""
    """A measurement of `benchmarks.techniques` that stands for the row, of what memlab does not switch on."""

    @property
    def techniques(self) -> tuple[str, ...]:
        """Those that say that they answer it."""
        return tuple(name for name, one in memlab.techniques.items() if self.name in one.tips)

    @property
    def shown(self) -> tuple[str, ...]:
        """Those whose effect may stand for the row: one by name, "-" for none."""
        if self.practice:
            return (self.practice,)
        return tuple(name for name in self.techniques if self.technique in ("", name))


def rows() -> list[Tip]:
    """All rows, as the small table has them."""
    known = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return [
        Tip(
            name,
            one["tip"],
            tuple(one["lessons"]),
            one["verdict"],
            one["today"],
            tuple(one.get("figures", ())),
            one.get("technique", ""),
            one.get("practice", ""),
        )
        for name, one in known.items()
    ]


def table() -> str:
    """The page."""
    found = rows()
    counted = ", ".join(f"{sum(one.verdict == verdict for one in found)} {verdict}" for verdict in VERDICTS)
    parts = [_HEAD, f"{len(found)} tips: {counted}.\n"]
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))["techniques"]
    for letter, title in PARTS.items():
        parts.append(
            f"\n## {letter}. {title}\n\n| | tip | today | lesson | techniques | effect |\n|---|---|---|---|---|---|\n"
        )
        parts += [_row(one, recorded) for one in found if one.name[0] == letter]
    return "".join(parts)


def _row(one: Tip, recorded: dict[str, Any]) -> str:
    links = ", ".join(_link(number) for number in one.lessons)
    names = ", ".join(f"`{name}`" for name in one.techniques) or "–"
    return (
        f"| {one.name} | {one.tip} | **{one.verdict}**: {one.today} | {links} | {names} | {_effect(one, recorded)} |\n"
    )


def _link(number: str) -> str:
    found = lessons((number,))
    return f"[{number}](../notebooks/{found[0].notebook.name})" if found else number


def _effect(one: Tip, recorded: dict[str, Any]) -> str:
    """The lesson's figures, else the saving of a technique, the largest without a word; a dash where neither has one."""
    figures = [_of_lesson(one, figure) for figure in one.figures]
    return "; ".join(filter(None, figures)) or _of_techniques(one, recorded) or "–"


def found_in(one: Tip, figure: str) -> tuple[str, int | float | str] | None:
    """The first headline of the row's lessons that begins so."""
    for lesson in (found for number in one.lessons for found in lessons((number,))):
        if lesson.notebook.exists():
            for name, value in headlines(nbformat.read(lesson.notebook, as_version=4)).items():
                if name.startswith(figure):
                    return name, value
    return None


def _of_lesson(one: Tip, figure: str) -> str:
    found = found_in(one, figure)
    return _figure_text(*found) if found else ""


def _figure_text(name: str, value: float | str) -> str:
    if name.endswith(SAVED) and not isinstance(value, str):
        share = f"−{value:.0%}" if value > 0.005 else "±0 %" if value > -0.005 else f"+{-value:.0%}"
        return f"{share.replace('%', ' %').replace('  ', ' ')} of the peak ({name.removesuffix(SAVED)})"
    if isinstance(value, int) and not isinstance(value, bool) and value > 9999:
        return f"{name}: {format_bytes(value)}"
    return f"{name}: {value}"


def _of_techniques(one: Tip, recorded: dict[str, Any]) -> str:
    saved = {name: cpu for name in one.shown if (cpu := recorded.get(name, {}).get("cpu", {})).get("before")}
    if not saved:
        return ""
    name = max(saved, key=lambda name: 1 - saved[name]["after"] / saved[name]["before"])
    share = 1 - saved[name]["after"] / saved[name]["before"]
    return f"{'−' if share >= 0 else '+'}{abs(share) * 100:.0f} % of the peak (`{name}`)"
