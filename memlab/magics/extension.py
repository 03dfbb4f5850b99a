"""What `%load_ext memlab` puts into a shell, and takes out again.

A tracked cell is not wrapped: its first line becomes a call that starts a run, and the end of the cell's execution ends it.
So the last value, `;`, `await`, nested magics, errors and interrupts are what they are without the magic. Where a front
end does not use IPython's input transformers, an ordinary cell magic of the same name serves.
"""

from __future__ import annotations

import contextlib
from typing import Any

from IPython.core.magic import Magics
from IPython.display import display

from memlab import cells
from memlab.magics.cell import CellTracker
from memlab.magics.compare import CompareMagics
from memlab.magics.fit import FitMagics
from memlab.magics.lab import LabMagics, close_labs
from memlab.magics.ledger import LedgerMagics
from memlab.magics.oom import OomMagics
from memlab.magics.track import TrackMagics
from memlab.magics.who import WhoMagics
from memlab.session.executions import error_of
from memlab.session.ledger import the_ledger
from memlab.session.oom import note_oom
from memlab.session.run import Run

MAGICS: tuple[type[Magics], ...] = (
    TrackMagics,
    WhoMagics,
    LedgerMagics,
    OomMagics,
    FitMagics,
    LabMagics,
    CompareMagics,
)
"""Every class of magics that the extension installs."""


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
        """post_run_cell: end the runs, explain an out-of-memory while its frames are there, then close the books."""
        runs = self.tracker.after_cell(result)
        if runs or the_ledger.is_on:
            _explain(error_of(result), runs[-1] if runs else None)  # of runs within runs the last has seen all
        the_ledger.after_cell(result, runs)

    def install(self) -> None:
        """Register transformer, event and magics."""
        shell = self.shell
        shell.input_transformers_cleanup.append(self.transform)
        shell.events.register("pre_run_cell", self.before_cell)
        shell.events.register("post_run_cell", self.after_cell)
        setattr(shell, cells.ARM, self.tracker.arm)
        setattr(shell, cells.PREDICT, self.tracker.predict)
        managed = shell.magics_manager.magics
        for magics in MAGICS:
            self._replaced += [(kind, name, managed[kind].get(name)) for kind, name in _names(magics)]
            shell.register_magics(magics(shell))

    def remove(self) -> None:
        """Take everything out; a run that is still open ends."""
        shell = self.shell
        close_labs()
        self.tracker.close()
        the_ledger.close()
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


def _names(magics: type[Magics]) -> list[tuple[str, str]]:
    """(kind, name) of each magic of a class; kind is "line" or "cell"."""
    return [(kind, name) for kind, table in magics.magics.items() for name in table]


def _explain(error: BaseException | None, run: Run | None) -> None:
    """Show below the cell why it ran out of memory, if it did."""
    explained = note_oom(error, run) if error is not None else None
    if explained is not None:
        with contextlib.suppress(Exception):  # a front end that shows nothing must not fail the cell
            display(explained)


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
