"""What each cell of a notebook left behind: `ledger()` shows it, `the_ledger` is told of the cells."""

from memlab.session.ledger.book import Ledger
from memlab.session.ledger.show import LedgerReport, ledger, the_ledger

__all__ = ["Ledger", "LedgerReport", "ledger", "the_ledger"]
