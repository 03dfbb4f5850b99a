"""Output while something runs: the live view of a track, later replaced by its report, and a progress line."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from memlab import torch_internals
from memlab.api.provenance import remark_here
from memlab.api.run import Run
from memlab.probes.counters import NOT_READ
from memlab.probes.host import HostGrowth, HostReading, low_memory
from memlab.probes.marks import marker
from memlab.probes.measurement import Measurement
from memlab.probes.sampler import Reading, Sample
from memlab.torch_internals.traceback import running_shell
from memlab.trace.columns import Phase
from memlab.trace.spans import MarkStack
from memlab.trace.trace import CPU
from memlab.units import format_bytes, format_seconds
from memlab.views import theme
from memlab.views.shown import html_of, marimo_notebook, print_text
from memlab.views.table import safe

if TYPE_CHECKING:
    from memlab.views.live import LiveView


@dataclass(frozen=True, slots=True)
class LevelNow:
    """What the device that is used holds at one sample; the peak so far is exact, or the highest that was seen."""

    label: str
    allocated_bytes: int
    peak_bytes: int
    peak_is_exact: bool
    capacity_bytes: int | None

    @classmethod
    def of(cls, measurement: Measurement, sample: Sample) -> LevelNow | None:
        """That of a sample; None if it has no device."""
        reading = used_device(measurement, sample)
        if reading is None:
            return None
        label = "cpu" if reading.device == CPU else f"{measurement.target.type or 'cuda'}:{reading.device}"
        return cls(label, reading.allocated_bytes, *measurement.peak_so_far(reading), measurement.capacity_bytes)


def used_device(measurement: Measurement, sample: Sample) -> Reading | None:
    """The reading of the device that is used: the accelerator with most allocated, or the host."""
    on_device = [reading for reading in sample.readings if reading.device != CPU]
    if on_device and measurement.uses_accelerator:
        return max(on_device, key=lambda reading: reading.allocated_bytes)
    return next((reading for reading in sample.readings if reading.device == CPU), next(iter(on_device), None))


_CODE_OF_PHASE = {phase: theme.PHASES.index(phase.name.lower()) for phase in Phase}
SILENT_S = 1.0
"""Shorter work shows no progress line."""
EVERY_S = 0.2


class Display:
    """The output of a track: in a notebook a live view, then a static bundle; elsewhere text at the end.

    marimo takes what is shown at the end; its outputs cannot be replaced one by one.
    """

    def __init__(self, run: Run, measurement: Measurement, live: bool) -> None:
        self._run, self._measurement = run, measurement
        self._in_notebook = torch_internals.is_kernel(running_shell())
        self._live = live and self._in_notebook
        self.view: LiveView | None = None
        self._figure: Any = None
        self._table: Any = None
        self.note = ""
        """The first warning shown while it ran."""
        self.rank_lines: Callable[[], tuple[str, ...]] | None = None
        """Tells what the ranks hold that the cell has started."""
        self._growth, self._highest_bytes = HostGrowth(), 0
        self._owner, self._stack = threading.get_ident(), MarkStack()
        self._seen, self._begun_s = 0, 0.0

    @staticmethod
    def is_wanted(show: bool | None, depth: int) -> bool:
        """Whether a track has output: as requested, else in a notebook and not inside another track."""
        if show is not None:
            return show
        return depth == 0 and (torch_internals.is_kernel(running_shell()) or marimo_notebook() is not None)

    def open(self) -> None:
        """Show the live view and a placeholder for the report; if that fails, print text at the end."""
        if not self._in_notebook:
            return
        try:
            from IPython.display import display

            # A page that was reloaded shows neither the live view nor what replaces it, and keeps this line.
            name, again = self._run.name, "if the page was reloaded, it is"
            words = f"memlab is measuring {name!r}; the report replaces this line ({again} memlab.runs[{name!r}])."
            waiting = {"text/plain": words}
            if self._live:
                with contextlib.suppress(Exception):  # widgets may be refused where a report is not (Colab's manager)
                    from memlab.views.live import LiveView  # imported late: no widgets without a notebook

                    series = ("allocated", "reserved", "used", "rss")
                    capacity = self._measurement.capacity_bytes
                    remark = remark_here([self._measurement.target.type or "cuda"])
                    self.view = LiveView(self._run.name, series, capacity, True, self._stop, remark)
                    self._figure = display(self.view, display_id=True)
            if self._figure is None:
                self._figure = display(waiting, raw=True, display_id=True)
            self._table = display(waiting, raw=True, display_id=True)
        except Exception:  # a broken front end must not fail the cell
            self._in_notebook = False
            self.discard_view()

    def _stop(self) -> None:
        if self._run.is_running:
            interrupt_main()

    def tick(self, sample: Sample) -> None:
        """Show one sample; called on the sampler's thread."""
        readings, elapsed_s, warning = sample.readings, sample.time_ns / 1e9, None
        host = next((reading for reading in readings if reading.device == CPU), None)
        if host is not None and host.available_bytes != NOT_READ:
            rate = self._growth.update(elapsed_s, host.available_bytes)
            total_bytes = host.used_bytes + host.available_bytes
            warning = low_memory(HostReading(host.own_bytes, host.available_bytes, total_bytes), rate)
            self.note = self.note or (f"While it ran: {warning}" if warning else "")
        view, shown = self.view, used_device(self._measurement, sample)
        if view is None or shown is None:
            return
        values = {"allocated": shown.allocated_bytes, "reserved": shown.reserved_bytes, "used": shown.used_bytes}
        if shown.device == CPU:
            values = {"allocated": shown.allocated_bytes, "rss": shown.own_bytes}
        peak_bytes, is_exact = self._measurement.peak_so_far(shown)
        self._highest_bytes = max(self._highest_bytes, peak_bytes)
        view.push(
            [elapsed_s],
            {name: [float(value)] for name, value in values.items() if value != NOT_READ},
            phases=self._phases(),
            peak_bytes=self._highest_bytes,
            peak_is_exact=is_exact,
            elapsed_s=elapsed_s,
            notes=((warning,) if warning else ()) + (self.rank_lines() if self.rank_lines is not None else ()),
        )

    def _phases(self) -> list[tuple[float, float, int]]:
        """(begin, end, code of the theme) of each phase that began or ended since the last call, in seconds.

        The last one is still running, and is repeated with a later end.
        """
        start_ns, count, now_ns = self._measurement.start_ns, marker.log.count(), time.time_ns()
        marks = marker.columns(start_ns, now_ns, self._owner, since=self._seen)
        self._seen = count
        stretches = []
        for moment, kind, name in zip(marks.time_ns.tolist(), marks.kind.tolist(), marks.name.tolist(), strict=True):
            before, moment_s = self._stack.phase, (moment - start_ns) / 1e9
            self._stack.step(kind, marks.texts[name])
            if self._stack.phase != before:
                stretches.append((self._begun_s, moment_s, _CODE_OF_PHASE[before]))
                self._begun_s = moment_s
        return [*stretches, (self._begun_s, (now_ns - start_ns) / 1e9, _CODE_OF_PHASE[self._stack.phase])]

    def finish(self) -> None:
        """Replace the live view by the static bundle. Errors are shown, and never fail the cell."""
        try:
            finished = self._run.report()
            figure, table = finished.figure_bundle(), finished.table_bundle()
            jobs = [(one.figure_bundle(), one.table_bundle()) for one in self._run.started_ranks]
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
            return
        if not jobs:
            self._replace(figure, table, table["text/plain"])
            return
        # The ranks did the work: they come first, and of this process only the table.
        (figure, first), *others = jobs
        self._replace({**figure, "text/plain": self._run.name}, first, first["text/plain"])
        for more in (*(table for _, table in others), table):
            self._append(more)

    def _append(self, table: dict[str, Any]) -> None:
        """Show a further table below."""
        try:
            if self._in_notebook:
                from IPython.display import display

                display(table, raw=True)
                return
            if self._append_in_marimo(table):
                return
        except Exception:
            pass
        print_text(table["text/plain"])

    @staticmethod
    def _append_in_marimo(shown: dict[str, Any]) -> bool:
        """Add to the outputs of a marimo cell, unless it failed: then its error takes their place, and text is printed."""
        marimo = marimo_notebook()
        if marimo is None or sys.exc_info()[0] is not None:
            return False
        marimo.output.append(marimo.Html(html_of(shown)))
        return True

    def fail(self, reason: str) -> None:
        """Show that there is no report, in its place."""
        text = f"memlab could not report on {self._run.name!r}: {reason}"
        self._replace({"text/plain": text}, {"text/plain": ""}, text)

    def _replace(self, figure: dict[str, Any], table: dict[str, Any], text: str) -> None:
        """Update the opened displays, or print the text."""
        try:
            if self._in_notebook and self._figure is not None and self._table is not None:
                if self.view is not None:
                    self.view.finish()
                self._figure.update(figure, raw=True)
                self._table.update(table, raw=True)
                return
            if self._append_in_marimo({**figure, **table}):
                return
        except Exception:
            pass
        finally:
            self.discard_view()
        print_text(text)

    def discard_view(self) -> None:
        """Close the live view after its output was replaced."""
        view, self.view = self.view, None
        with contextlib.suppress(Exception):  # a broken front end must not fail the cell
            if view is not None:
                view.close()


def interrupt_main() -> None:
    """The Stop button: raise KeyboardInterrupt, as the notebook's interrupt button does."""
    main = threading.main_thread().ident
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # also wakes a sleep, which a pending flag would not
    else:
        import _thread

        _thread.interrupt_main()


class Progress:
    """A progress line: an output in a notebook, overwritten in a terminal. Errors of a front end are ignored.

    As a context manager it shows the progress of predicting for `what`, which may change meanwhile.
    """

    def __init__(self, what: str = "") -> None:
        self.what = what
        self._begin, self._shown_s, self._width = time.monotonic(), -1.0, 0
        self._place: Any = None
        self._in_notebook = torch_internals.is_kernel(running_shell())

    @property
    def elapsed(self) -> str:
        """The elapsed time as text."""
        return format_seconds(time.monotonic() - self._begin)

    def write(self, line: str, more: Callable[[], Any] = lambda: None) -> None:
        """Replace the line; at most five times a second. In a notebook the page that `more()` gives stands below it."""
        took_s = time.monotonic() - self._begin
        if took_s < SILENT_S or took_s - self._shown_s < EVERY_S:
            return
        self._shown_s = took_s
        with contextlib.suppress(Exception):
            if self._in_notebook:
                page, shown = more(), {"text/plain": line}
                if page is not None:
                    shown = {
                        "text/plain": f"{line}\n{page.text()}",
                        "text/html": f"<div>{safe(line)}</div>{page.html()}",
                    }
                if self._place is None:
                    from IPython.display import display

                    self._place = display(shown, raw=True, display_id=True)
                else:
                    self._place.update(shown, raw=True)
            elif sys.stderr is not None and sys.stderr.isatty():
                most = shutil.get_terminal_size().columns - 1  # a wrapped line could not be overwritten
                line = line if len(line) <= most else f"{line[: most - 1]}…"
                sys.stderr.write(f"\r{line.ljust(min(self._width, most))}")
                sys.stderr.flush()
                self._width = len(line)

    def close(self, line: str = "") -> None:
        """Leave a final line in a notebook, or nothing where a result is shown, and nothing in a terminal."""
        with contextlib.suppress(Exception):
            if self._place is not None:
                self._place.update({"text/plain": line} if line else {"text/plain": "", "text/html": ""}, raw=True)
            elif self._width:
                sys.stderr.write(f"\r{' ' * self._width}\r")
                sys.stderr.flush()

    def show(self, news: dict[str, Any]) -> None:
        """Show what the child process reports."""
        if "events" in news:
            peak, count = format_bytes(int(news["peak_allocated_bytes"])), int(news["events"])
            self.write(f"predicting for {self.what}: {self.elapsed}, {count:,} events, peak so far {peak}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        end = f"predicted for {self.what} in" if error is None else f"stopped predicting for {self.what} after"
        self.close(f"{end} {self.elapsed}")
