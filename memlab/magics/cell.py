"""Which cell is being executed, and what begins and ends with it.

Cells run inside of cells (%%capture, run_cell), so there is a stack of them; and one in each thread (subshells).
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from IPython.core.error import UsageError

from memlab import cells
from memlab.errors import BudgetExceeded, MemlabError
from memlab.magics.track import asked_of, options_of, parse
from memlab.session.executions import depth_of, error_of
from memlab.session.run import Run
from memlab.session.track import Track


@dataclasses.dataclass(slots=True)
class _Cell:
    """A cell that is being executed, and the tracks that it has opened."""

    info: Any
    tracks: list[Track] = dataclasses.field(default_factory=list)


class CellTracker(threading.local):
    """Starts a run when a tracked cell begins, and ends it when exactly that cell has ended.

    Cells run inside of cells (%%capture, run_cell), so there is a stack of them; and one in each thread (subshells).
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._cells: list[_Cell] = []

    def before_cell(self, info: Any) -> None:
        """pre_run_cell: remember which execution this is; the call in the cell's first line cannot know."""
        self._cells.append(_Cell(info))

    def arm(self, line: str) -> None:
        """The call in the first line of a tracked cell."""
        track = Track(parse(line))
        if not self._cells:
            raise UsageError("%memtrack: this cell runs silently, so nobody tells its end; use memlab.track() in it.")
        try:
            track.start()
        except MemlabError as error:
            raise UsageError(f"%memtrack: {error}") from None
        track.run.again = cells.body_of(self._cells[-1].info.raw_cell)
        self._cells[-1].tracks.append(track)

    def predict(self, line: str, body: str) -> None:
        """The call that stands for a cell that is to be predicted."""
        from memlab.magics.predict import predict_cell  # late: without it nothing of the predictor is loaded

        asked = asked_of(line)
        predict_cell(self.shell, asked, options_of(asked), line, body)

    def after_cell(self, result: Any) -> list[Run]:
        """post_run_cell: end the runs of the cell, and those inside of it whose end was never told; give them back."""
        depth = depth_of([cell.info for cell in self._cells], result)
        ended, self._cells[depth:] = self._cells[depth:], []
        tracks = [track for cell in reversed(ended) for track in reversed(cell.tracks)]
        for track in tracks:
            if track in ended[0].tracks:  # the value is that of this cell, not of one inside of it
                track.run.offer(getattr(result, "result", None))
            self._end(track, result)
        return [track.run for track in tracks]

    def _end(self, track: Track, result: Any) -> None:
        """End a run; where its budget was exceeded, or what was asked of it failed, the cell fails."""
        error = error_of(result)
        try:
            problem: BaseException | None = track.stop(error)
        except (Exception, KeyboardInterrupt) as raised:
            problem = raised
        finally:
            track.run.offer(None)  # a run never refers to what is the user's
        if problem is None or (error is not None and isinstance(problem, BudgetExceeded)):
            return  # a cell that raised has its own error to tell
        self.shell.showtraceback((type(problem), problem, None), exception_only=True)
        if result is not None and error is None:
            result.error_in_exec = problem  # the front end is told, and whoever runs all cells stops here

    def close(self) -> None:
        """End what is still open, from the inside out."""
        self.after_cell(None)
