"""The report of a finished run: figure, tables, modules and lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from memlab.analysis.advice import is_large, pointer
from memlab.analysis.curves import Curves, curves
from memlab.analysis.lines import LineTable
from memlab.analysis.modules import ModuleTree
from memlab.errors import MemlabError
from memlab.torch_internals.traceback import running_shell
from memlab.units import format_seconds
from memlab.views import lines as line_views
from memlab.views import modules as module_views
from memlab.views.curves import timeline_scene
from memlab.views.page import Page
from memlab.views.report import report
from memlab.views.scene import Scene
from memlab.views.shown import Shown, ShownWithFigure


class RunReport(ShownWithFigure):
    """The report of a run: as text, in a notebook, or `text`, `html`, `figure`, `to_pandas()`."""

    def __init__(self, run: Any) -> None:
        self.run, self.trace, self.summary = run, run.trace, run.summary
        shares = self.summary.devices[0].shares if self.summary.devices else ()
        held: Mapping[str, int] = next((one.shares for one in shares if one.by == "category"), {})
        hint = advice_hint(held, self.summary.name, self.trace.notes, run.cell_text)
        self.table: Page = report(self.summary, hint, run.verdict)

    @property
    def text(self) -> str:
        """The report as text, followed by the lines if they were requested."""
        return f"{self.table.text()}\n\n{self._lines['text/plain']}" if self._lines else self.table.text()

    @property
    def html(self) -> str:
        """The same as small HTML tables."""
        return self.table.html() + self._lines.get("text/html", "")

    @cached_property
    def _lines(self) -> dict[str, str]:
        were_asked_for = bool(self.summary.devices) and "executions" in self.trace.notes
        return self.run.lines().section() if were_asked_for else {}

    @property
    def curves(self) -> Curves:
        """The data of the figure."""
        if not self.summary.devices:
            raise MemlabError(f"run {self.summary.name!r} used no device: there is nothing to draw.")
        return curves(self.trace, self.summary.devices[0].device)

    def scene(self) -> Scene:
        """The timeline."""
        return timeline_scene(self.curves, self.title)

    @property
    def title(self) -> str:
        """One line above the figure."""
        name, devices = self.summary.name, self.summary.devices
        if self.run.verdict:
            return f"{name} · predicted: {self.run.verdict}"
        if self.trace.remark and devices:
            return f"{name} · {devices[0].device.label} · {self.trace.remark}"
        where = f"{self.summary.provenance} on {devices[0].device.label}" if devices else "no device was used"
        return f"{name} · {where} · {format_seconds(self.summary.duration_s)}"

    def figure_bundle(self) -> dict[str, Any]:
        """MIME type -> the figure as plotly, SVG or text."""
        if not self.summary.devices:
            return {"text/plain": "Nothing to draw: no device was used."}
        if self.run.verdict and not any(one.levels[0].peak.high_bytes for one in self.summary.devices):
            return {"text/plain": f"{self.title}: nothing to draw, as nothing was allocated."}
        return super().figure_bundle()

    def to_pandas(self) -> Any:
        """The figures as a pandas DataFrame."""
        return self.summary.to_pandas()


def advice_hint(
    shares: Mapping[str, int], name: str, notes: Mapping[str, Any], cell_text: str, of: str = "the peak"
) -> str:
    """The line that points to `memlab.advise`; "" if no category is large enough, or the cell cannot run again.

    `shares` has bytes by category, and `of` names their sum.
    """
    facts = notes.get("trial")
    is_workload = isinstance(facts, dict) and bool(facts.get("size"))
    if not is_large(shares) or not (cell_text or is_workload):
        return ""
    try:
        from memlab.saving_techniques import techniques  # imported late: most reports need none of them

        counts: dict[str, int] = {}
        for one in techniques.values():
            can = one.patch is not None or not cell_text
            for category in one.attacks if can and one.kind == "saving" and one.equality.kind != "changes" else ():
                counts[category] = counts.get(category, 0) + 1
        shell = running_shell()
        has_magic = shell is not None and "memadvise" in shell.magics_manager.magics["line"] and " --" not in name
        # `%load_ext memlab` does not bind the name
        call = f"%memadvise {name}" if has_magic else f"import memlab; memlab.advise(memlab.runs[{name!r}])"
        return pointer(shares, counts, call, of)
    except Exception:  # a failing hint must not cost the report
        return ""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RunModules(Shown, ModuleTree):
    """Path -> module with its memory; `figure` draws it."""

    tree = property(lambda self: self)
    """The tree itself."""

    @property
    def text(self) -> str:
        """The tree as text."""
        return module_views.text(self)

    @property
    def html(self) -> str:
        """The tree as collapsible HTML."""
        return module_views.html(self)

    @property
    def figure(self) -> Any:
        """A plotly figure: one tile per module, sized by what it held at the peak."""
        return module_views.figure(self)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LineReport(Shown, LineTable):
    """The memory of each line; `plain()` is the classic form, `table` has the figures.

    It is a sequence of rows, and `report["cell:12"]` is the row of one line.
    """

    name: str = ""

    table = property(lambda self: self)
    """The table itself."""

    @property
    def text(self) -> str:
        """The listing as text."""
        return line_views.listing_text(self, self.name)

    @property
    def html(self) -> str:
        """The listing for a notebook."""
        return line_views.listing_html(self, self.name)

    def plain(self) -> str:
        """The total line by line, and the tensors allocated and freed."""
        return line_views.plain_text(self)

    def section(self) -> dict[str, str]:
        """MIME type -> the listing below the report of a tracked cell, truncated if long."""
        return {
            "text/html": line_views.listing_html(self, self.name, limit=line_views.SECTION_HTML),
            "text/plain": line_views.listing_text(self, self.name, limit=line_views.SECTION_TEXT),
        }
