"""`%memfit`: a run on all cards that are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from memlab.errors import MemlabError
from memlab.session.run import Run
from memlab.session.runs import runs

if TYPE_CHECKING:
    from memlab.session.fit import FitTable


@magics_class
class FitMagics(Magics):
    """Which cards a run fits on."""

    @line_magic
    @no_var_expand
    def memfit(self, line: str) -> FitTable:
        """A run against the cards: `%memfit`, `%memfit RUN`, `%memfit RUN RTX 4060, A100 80GB`."""
        from memlab.session.fit import fit  # late: without it nothing of the predictor is loaded

        try:
            run, cards = _parsed(line)
            return fit(run, cards)
        except MemlabError as error:
            raise UsageError(f"%memfit: {error}") from None


def _parsed(line: str) -> tuple[Run | None, list[str] | None]:
    """The run and the cards: the longest beginning of the line that is the name of a run, and the rest at its commas."""
    text = line.strip()
    named = sorted((name for name in runs if text == name or text.startswith(f"{name} ")), key=len)
    run = runs[named[-1]] if named else None
    rest = [one.strip() for one in text.removeprefix(named[-1] if named else "").split(",") if one.strip()]
    for one in rest:
        _known(one, bool(named))
    return run, rest or None


def _known(card: str, after_run: bool) -> None:
    from memlab.predictor.cards import find

    try:
        find(card)
    except MemlabError as error:
        known = (
            "" if after_run else f" Nor is there a run of that name; known: {', '.join(list(runs)[-5:]) or 'none yet'}."
        )
        raise MemlabError(f"{error}{known}") from None
