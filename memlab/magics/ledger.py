"""`%memledger`: what each cell left behind; on, off, and from the beginning."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from memlab.session.ledger import ledger, the_ledger

_USAGE = "%memledger shows what each cell left behind; %memledger on, off or clear"


@magics_class
class LedgerMagics(Magics):
    """The ledger of the notebook's cells."""

    @line_magic
    def memledger(self, line: str) -> Any:
        """Show what each cell took and left behind: `%memledger`; `%memledger on`, `off` or `clear`."""
        word = line.strip()
        if not word:
            return ledger()
        if word not in ("on", "off", "clear"):
            raise UsageError(f"%memledger: unknown {word[:80]!r}. {_USAGE}.")
        {"on": the_ledger.on, "off": the_ledger.off, "clear": the_ledger.clear}[word]()
        return None
