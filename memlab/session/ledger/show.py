"""`memlab.ledger()`: what the cells of this notebook left behind, as a value that shows itself."""

from __future__ import annotations

from typing import Any

from memlab.analysis.growth import Accounts, Entry, Growth
from memlab.session.ledger.book import Ledger
from memlab.views.ledger import LedgerTable, ledger_table

the_ledger = Ledger()
"""The ledger of this process; the extension tells it of the cells."""


class LedgerReport:
    """The ledger as it was when it was asked: `print` it, let a notebook show it, or take `.to_pandas()`."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.table: LedgerTable = ledger_table(accounts)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """One for each cell, the oldest first."""
        return self.accounts.entries

    @property
    def growths(self) -> tuple[Growth, ...]:
        """The cells that grow when they are run again."""
        return self.accounts.growths

    @property
    def text(self) -> str:
        """The ledger in words."""
        return self.table.text()

    @property
    def html(self) -> str:
        """The ledger as a small HTML table."""
        return self.table.html()

    def to_pandas(self) -> Any:
        """One row per cell and device, sizes in bytes; `accounts.left_to_pandas()` has one per storage."""
        return self.accounts.to_pandas()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def ledger() -> LedgerReport:
    """What each cell of this notebook took and left behind, by name, and which cells grow when they are run again."""
    return LedgerReport(the_ledger.accounts())
