"""The IPython extension: what `%load_ext memlab` installs and `%unload_ext memlab` removes.

A tracked cell is not wrapped: its first line becomes a call that starts a run, and the end of the cell ends it. So the
last value, `;`, `await`, nested magics, errors and interrupts are the same as without the magic. For front ends that do not
use IPython's input transformers there is an ordinary cell magic of the same name.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics
from IPython.display import display

from memlab import cells
from memlab.api.ledger import depth_of, error_of, the_ledger
from memlab.api.oom import note_oom, oom_error
from memlab.api.run import Run
from memlab.api.track import Track, without_our_frames
from memlab.errors import BudgetExceeded
from memlab.magics.line_magics import LineMagics, close_labs, usage_errors
from memlab.magics.track import TrackMagics, asked_of, options_of, parse
from memlab.torch_internals.shell import ShownTracebacks

MAGICS: tuple[type[Magics], ...] = (TrackMagics, LineMagics)
"""The magics classes that the extension installs."""


_MAGIC_FRAMES = frozenset(function.__code__ for function in (TrackMagics.memtrack, TrackMagics._run))


class CellTracker(threading.local):
    """Starts a run when a tracked cell begins, and ends it when exactly that cell has ended.

    Cells can be nested (%%capture, run_cell), so there is a stack; and one per thread (subshells).
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._cells: list[tuple[Any, list[Track]]] = []  # IPython's info of each, and its tracks

    @property
    def is_tracking(self) -> bool:
        """Whether a cell that is running is tracked."""
        return any(tracks for _, tracks in self._cells)

    def before_cell(self, info: Any) -> None:
        """pre_run_cell: push this execution."""
        self._cells.append((info, []))

    def arm(self, line: str) -> None:
        """The call in the first line of a tracked cell."""
        # Tracebacks show the cell as the user wrote it; IPython keeps the transformed lines in linecache.
        file = sys._getframe(1).f_code.co_filename
        entry = linecache.cache.get(file)
        if entry is not None and len(entry) == 4:
            size, changed, lines, name = entry
            linecache.cache[file] = (size, changed, list(map(cells.as_written, lines)), name)
        track = Track(parse(line))
        if not self._cells:
            raise UsageError(
                "%memtrack: this cell runs silently, so its end is not seen; import memlab and use memlab.track() in it."
            )
        with usage_errors("memtrack"):
            track.start()
        info, tracks = self._cells[-1]
        track.run.cell_text = cells.body_of(info.raw_cell)
        tracks.append(track)

    def predict(self, line: str, body: str) -> None:
        """The call that replaces a cell to be predicted."""
        from memlab.magics.predict_cell import predict_cell  # imported late: prediction is not loaded without it

        asked = asked_of(line)
        predict_cell(self.shell, asked, options_of(asked), line, body)

    def after_cell(self, result: Any) -> list[Run]:
        """post_run_cell: end the runs of the cell, and those of cells inside it; return them."""
        depth = depth_of([info for info, _ in self._cells], result)
        ended, self._cells[depth:] = self._cells[depth:], []
        tracks = [track for _, inside in reversed(ended) for track in reversed(inside)]
        for track in tracks:
            if track in ended[0][1]:  # the value is that of this cell, not of a nested one
                track.run.offer(getattr(result, "result", None))
            self._end(track, result)
        return [track.run for track in tracks]

    def _end(self, track: Track, result: Any) -> None:
        """End a run; a budget that was exceeded, or an error at the end, fails the cell."""
        error = error_of(result)
        try:
            problem: BaseException | None = track.stop(error)
        except (Exception, KeyboardInterrupt) as raised:
            problem = raised
        finally:
            track.run.offer(None)  # a run must not reference the user's objects
        if problem is None or (error is not None and isinstance(problem, BudgetExceeded)):
            return  # a cell that raised keeps its own error
        self.shell.showtraceback((type(problem), problem, None), exception_only=True)
        if result is not None and error is None:
            result.error_in_exec = problem  # the front end sees an error, and "run all cells" stops here


class Extension:
    """What `%load_ext memlab` puts into a shell, and takes out again."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.tracker = CellTracker(shell)
        self._replaced: list[tuple[str, str, Any]] = []

    def transform(self, lines: list[str]) -> list[str]:
        """The input transformer. It must be pure: it runs several times for each cell."""
        if not cells.is_tracked(lines):
            return lines
        return cells.armed(lines, self.shell.input_transformer_manager.transform_cell)

    # Leaves the cell to IPython's rule for `%%` when it asks whether a cell is complete: else a terminal would run the
    # first line alone.
    transform.has_side_effects = True  # type: ignore[attr-defined]

    def before_cell(self, info: Any) -> None:
        """pre_run_cell."""
        the_ledger.before_cell(info)
        self.tracker.before_cell(info)

    def after_cell(self, result: Any) -> None:
        """post_run_cell: end the runs, explain an out-of-memory error, show its traceback, then update the ledger."""
        explained, runs = None, list[Run]()
        try:
            runs = self.tracker.after_cell(result)
            error = error_of(result)
            if error is not None and (runs or the_ledger.is_on):
                explained = note_oom(error, runs[-1] if runs else None)  # of nested runs the last one covers everything
            place = None
            if explained is not None:
                with contextlib.suppress(Exception):  # a front end that shows nothing must not fail the cell
                    place = display(explained, display_id=True)
        finally:
            self._tracebacks.show()
        the_ledger.after_cell(result, runs)
        if explained is not None and place is not None:
            from memlab.api.ways_out import look_for_ways_out  # late: prediction is not loaded without it

            text = runs[-1].cell_text if runs else str(getattr(result.info, "raw_cell", "") or "")
            look_for_ways_out(explained, text, place.update)

    def _is_explained(self, error: BaseException) -> bool:
        """Whether an error's traceback waits until its explanation was shown."""
        return (the_ledger.is_on or self.tracker.is_tracking) and oom_error(error) is not None

    def _trim(self, error: BaseException) -> None:
        """Take what measures out of the traceback of a cell, in which the user looks for the line that failed."""
        without_our_frames(error, _MAGIC_FRAMES)

    def install(self) -> None:
        """Register transformer, event and magics."""
        shell = self.shell
        shell.input_transformers_cleanup.append(self.transform)
        shell.events.register("pre_run_cell", self.before_cell)
        shell.events.register("post_run_cell", self.after_cell)
        self._tracebacks = ShownTracebacks(shell, self._is_explained, self._trim)
        setattr(shell, cells.ARM, self.tracker.arm)
        setattr(shell, cells.PREDICT, self.tracker.predict)
        managed = shell.magics_manager.magics
        for magics in MAGICS:
            for kind, table in magics.magics.items():  # kind is "line" or "cell"
                self._replaced += [(kind, name, managed[kind].get(name)) for name in table]
            shell.register_magics(magics(shell))

    def remove(self) -> None:
        """Remove everything; an open run ends."""
        shell = self.shell
        close_labs()
        self.tracker.after_cell(None)
        the_ledger.close()
        self._tracebacks.remove()
        if self.transform in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(self.transform)
        shell.events.unregister("pre_run_cell", self.before_cell)
        shell.events.unregister("post_run_cell", self.after_cell)
        delattr(shell, cells.ARM)
        delattr(shell, cells.PREDICT)
        for kind, name, magic in reversed(self._replaced):
            if magic is None:
                shell.magics_manager.magics[kind].pop(name, None)
            else:
                shell.magics_manager.magics[kind][name] = magic
        for magics in MAGICS:
            shell.magics_manager.registry.pop(magics.__name__, None)


_loaded: dict[int, Extension] = {}


def load(shell: Any) -> None:
    """Install the extension in a shell, once."""
    if id(shell) not in _loaded:
        extension = _loaded[id(shell)] = Extension(shell)
        extension.install()


def unload(shell: Any) -> None:
    """Remove the extension from a shell."""
    extension = _loaded.pop(id(shell), None)
    if extension is not None:
        extension.remove()
