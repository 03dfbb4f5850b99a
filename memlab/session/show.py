"""How a run shows itself: live while it goes on, one static bundle when it has ended, text where there is no notebook."""

from __future__ import annotations

import contextlib
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memlab import seams
from memlab.analysis.curves import Curves, curves
from memlab.errors import MemlabError
from memlab.session.advise.pointing import pointer_of
from memlab.session.lines import has_lines, lines
from memlab.units import format_seconds
from memlab.views.bundle import figure_bundle
from memlab.views.table import Report, report

if TYPE_CHECKING:
    from memlab.probes.measurement import Measurement
    from memlab.session.run import Run


class RunReport:
    """The report of a run: `print` it, let a notebook show it, or take `text`, `html`, `figure` and `to_pandas()`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.table: Report = report(run.summary, pointer_of(run))

    @property
    def text(self) -> str:
        """The report in words, with the lines below it where these were asked for."""
        return f"{self.table.text()}\n\n{self._lines['text/plain']}" if self._lines else self.table.text()

    @property
    def html(self) -> str:
        """The same as small HTML tables."""
        return self.table.html() + self._lines.get("text/html", "")

    @cached_property
    def _lines(self) -> dict[str, str]:
        return lines(self.run).section() if has_lines(self.run) and self.run.devices else {}

    @property
    def curves(self) -> Curves:
        """What the figure shows."""
        if not self.run.devices:
            raise MemlabError(f"run {self.run.name!r} used no device of those it measured: there is nothing to draw.")
        return curves(self.run.trace, self.run.devices[0].device)

    @property
    def figure(self) -> Any:
        """The timeline as a plotly figure."""
        from memlab.views.figure import timeline_figure

        return timeline_figure(self.curves, self.title)

    @property
    def title(self) -> str:
        """One line above the figure."""
        device = self.run.devices[0].device.label if self.run.devices else "no device was used"
        if "prediction" in self.run.trace.notes and self.run.devices:
            return f"{self.run.name} · predicted for {self.run.devices[0].device.name}"
        return f"{self.run.name} · {device} · {format_seconds(self.run.summary.duration_s)}"

    def figure_bundle(self) -> dict[str, Any]:
        """MIME type -> content of the figure and its twins."""
        if not self.run.devices:
            return {"text/plain": "Nothing to draw: no device of those that were measured was used."}
        return figure_bundle(self.curves, self.title)

    def table_bundle(self) -> dict[str, Any]:
        """MIME type -> content of the table."""
        return {"text/html": self.html, "text/plain": self.text}

    def bundle(self) -> dict[str, Any]:
        """MIME type -> content of all in one; a front end shows the richest it knows."""
        return {**self.figure_bundle(), **self.table_bundle()}

    def to_pandas(self) -> Any:
        """The figures as a pandas DataFrame."""
        return self.run.summary.to_pandas()

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _ipython_display_(self) -> None:
        """The figure and below it the table, as a tracked cell shows them."""
        shell = ipython()
        if not seams.is_kernel(shell):
            print(self.text)
            return
        from IPython.display import display

        display(self.figure_bundle(), raw=True)
        display(self.table_bundle(), raw=True)


def ipython() -> Any:
    """The running IPython shell, or None; IPython is not imported for it."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


class Display:
    """What a track shows: in a notebook a live view that a static bundle replaces, elsewhere the text at the end."""

    def __init__(self, run: Run, measurement: Measurement, live: bool) -> None:
        self._run = run
        self._measurement = measurement
        self._in_notebook = seams.is_kernel(ipython())
        self._live = live and self._in_notebook
        self._view: Any = None
        self._figure: Any = None
        self._table: Any = None
        self._feed: Any = None

    @staticmethod
    def is_wanted(show: bool | None, depth: int) -> bool:
        """Whether a track shows itself: as asked, else in a notebook and not inside of another one."""
        if show is not None:
            return show
        return depth == 0 and seams.is_kernel(ipython())

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings that were shown while it ran."""
        return tuple(self._feed.notes) if self._feed is not None else ()

    def open(self) -> None:
        """Show the live view, and below it the place of the report; where that fails, the text comes at the end."""
        from memlab.session.live import LiveFeed

        if self._in_notebook:
            try:
                self._open_outputs()
            except Exception:  # a broken front end must not fail the cell
                self._in_notebook = False
                self.discard_view()
        self._feed = LiveFeed(self._view, self._measurement)

    def _open_outputs(self) -> None:
        from IPython.display import display

        if self._live:
            self._view = self._new_view()
        waiting = {"text/plain": f"memlab measures {self._run.name!r}; the report replaces this line."}
        if self._view is not None:
            self._figure = display(self._view, display_id=True)
        else:
            self._figure = display(waiting, raw=True, display_id=True)
        self._table = display(waiting, raw=True, display_id=True)

    def _new_view(self) -> Any:
        from memlab.session.live import interrupt_main
        from memlab.views.live import LiveView

        def stop() -> None:
            if self._run.is_running:
                interrupt_main()

        series = ("allocated", "reserved", "used", "rss")
        capacity = self._measurement.capacity_bytes
        return LiveView(self._run.name, series, capacity, can_stop=True, on_stop=stop)

    def tick(self, sample: Any) -> None:
        """Show one sample; called by the sampler's thread."""
        if self._feed is not None:
            self._feed.tick(sample)

    def finish(self) -> None:
        """Replace the live view by the static bundle. What fails here is said, and never fails the cell."""
        try:
            finished = RunReport(self._run)
            figure, table = finished.figure_bundle(), finished.table_bundle()
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
            return
        if not self._replace(figure, table):
            _print(table["text/plain"])

    def fail(self, reason: str) -> None:
        """Say that there is no report, in the place where it would stand."""
        text = f"memlab could not report on {self._run.name!r}: {reason}"
        if not self._replace({"text/plain": text}, {"text/plain": ""}):
            _print(text)

    def _replace(self, figure: dict[str, Any], table: dict[str, Any]) -> bool:
        """Put these into the places that were opened; False where there are none, or nobody takes them."""
        try:
            if not self._in_notebook or self._figure is None or self._table is None:
                return False
            if self._view is not None:
                self._view.finish()
            self._figure.update(figure, raw=True)
            self._table.update(table, raw=True)
            return True
        except Exception:
            return False
        finally:
            self.discard_view()

    def discard_view(self) -> None:
        """Close the live view, whose output has been replaced."""
        if self._view is not None:
            with contextlib.suppress(Exception):
                forget_code(self._view)
                layout = self._view.layout  # a widget of its own, which closing the view leaves open
                self._view.close()
                layout.close()
            self._view = None


def forget_code(view: Any) -> None:
    """Empty a widget that is about to be closed: nbconvert keeps the last state of every one, 70 kB of JavaScript each."""
    with view.hold_sync():
        view.set_trait("_esm", "export default {}")
        view.set_trait("_css", "")
        view.set_trait("key", b"")
        view.set_trait("setup", {})


def _print(text: str) -> None:
    """Print, also to a terminal that lacks some characters; a closed one is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        try:
            print(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding or "ascii"
            print(text.encode(encoding, "replace").decode(encoding))
