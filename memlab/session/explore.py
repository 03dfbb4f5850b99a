"""`run.explore()`: a widget to zoom into, fed from a pyramid of the run's timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.analysis.pyramid import Pyramid
from memlab.analysis.timeline import timeline
from memlab.errors import MemlabError
from memlab.session.show import RunReport
from memlab.trace.trace import CPU

if TYPE_CHECKING:
    from memlab.session.run import Run


def explore(run: Run) -> Any:
    """Open the explorer of a run; the report stays below it, and closing the explorer leaves the static figure."""
    from IPython.display import display

    from memlab.views.explorer import Explorer

    finished = RunReport(run)
    windows = Windows(run)
    explorer = Explorer(windows, windows.span_s, finished.title)
    handle = display(explorer, display_id=True)
    display(finished.table_bundle(), raw=True)
    explorer._on_close = lambda: handle.update(finished.figure_bundle(), raw=True) if handle is not None else None
    return explorer


class Windows:
    """Detail of a run for any stretch of time: each series as times, lowest and highest values."""

    def __init__(self, run: Run) -> None:
        if not run.devices:
            raise MemlabError(f"run {run.name!r} used no device of those it measured: there is nothing to explore.")
        device = run.devices[0].device.index
        kinds = ("allocated",) if device == CPU else ("allocated", "reserved")
        self._pyramids = {of: Pyramid(timeline(run.trace, device, of)) for of in kinds}
        self.span_s = max(run.summary.duration_s, 1e-6)

    def __call__(self, begin_s: float, end_s: float, bins: int) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The detail between two times, at most `bins` steps of each series."""
        detail = {}
        for of, pyramid in self._pyramids.items():
            times, low, high = pyramid.window(begin_s * 1e9, end_s * 1e9, bins)
            detail[of] = (times / 1e9, low.astype("f8"), high.astype("f8"))
        return detail
