"""Cells for tests of the ledger: code that runs in a notebook's namespace, with the ledger told of it as a shell does."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memlab.analysis.growth import Entry, LevelAfterRun
from memlab.api import ledger as cell_ledger
from memlab.api.ledger import Ledger


class Cells:
    """A notebook of its own: `run` executes code as its next cell. `close` leaves nothing of it."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.module = types.ModuleType("__main__")
        self.names = vars(self.module)
        self.number = 0
        self._before = sys.modules["__main__"]
        sys.modules["__main__"] = self.module
        self.run("import torch; from torch import nn")
        self.ledger.clear()

    def close(self) -> None:
        self.ledger.off()
        self.names.clear()
        sys.modules["__main__"] = self._before

    def run(self, code: str, *, told: str = "result", runs: Sequence[Any] = ()) -> Any:
        """Run a cell; `told` is what the ledger gets at its end: the "result", or "nothing"."""
        self.number += 1
        info = SimpleNamespace(raw_cell=code)
        self.ledger.before_cell(info)
        error = None
        try:
            exec(compile(code, f"<cell {self.number}>", "exec"), self.names)
        except BaseException as raised:
            error = raised
        result = SimpleNamespace(
            info=info, error_in_exec=error, error_before_exec=None, success=error is None, execution_count=self.number
        )
        self.ledger.after_cell(result if told == "result" else None, runs)
        return error

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, as the ledger has them when it is asked."""
        return self.ledger.accounts().entries

    @property
    def last(self) -> Entry:
        """The latest entry."""
        return self.entries[-1]

    def flags(self) -> list[tuple[str, int]]:
        """(name, bytes in each run) of what grows."""
        return [(growth.name, growth.bytes_per_run) for growth in self.ledger.accounts().growths]


def take_your_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers have all the time they want: a busy machine must not decide what is seen."""
    monkeypatch.setattr(cell_ledger, "NAMES_S", 60.0)
    monkeypatch.setattr(cell_ledger, "LOOK_S", 60.0)


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cells]:
    """A notebook of its own, whose ledger is in no hurry."""
    take_your_time(monkeypatch)
    notebook = Cells()
    yield notebook
    notebook.close()
    gc.collect()


def level(entry: Entry, device: str = "cpu") -> LevelAfterRun:
    """The level of one device."""
    return next(one for one in entry.levels if one.device == device)


def paths(entry: Entry) -> dict[str, int]:
    """What a cell left, by path."""
    return {one.path: one.nbytes for one in entry.left}
