"""`%memcompare A B`: two runs on one axis, with bytes, seconds and whether their results agree."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from memlab.errors import MemlabError
from memlab.session.runs import runs

if TYPE_CHECKING:
    from memlab.session.compare import Comparison


@magics_class
class CompareMagics(Magics):
    """Two runs side by side."""

    @line_magic
    @no_var_expand
    def memcompare(self, line: str) -> Comparison:
        """The second run against the first: `%memcompare A B`, names, files or `last`; `%memcompare` alone: the last two."""
        from memlab.session.compare import compare  # late: it needs the registry of techniques

        try:
            return compare(*_asked(line))
        except MemlabError as error:
            raise UsageError(f"%memcompare: {error}") from None


def _asked(line: str) -> tuple[str, str]:
    """The two that are meant: two words, or words that are names where the line is cut in one place."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise MemlabError(f"{error} in {line[:80]!r}.") from None
    if not words:
        return _latest()
    if len(words) == 1:
        return words[0], "last"
    cuts = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    found = [cut for cut in cuts if all(_is_known(name) for name in cut)]
    if found or len(words) == 2:
        return (found or cuts)[0]
    known = ", ".join(map(repr, list(runs)[-5:])) or "none yet"
    raise MemlabError(f"{line.strip()[:80]!r} does not name two runs: %memcompare A B. Known: {known}.")


def _is_known(name: str) -> bool:
    from memlab.session.compare import is_run

    return is_run(name)


def _latest() -> tuple[str, str]:
    names = list(runs)[-2:]
    if len(names) < 2:
        raise MemlabError(f"two runs are needed and there {'is one' if names else 'is none'}: %memcompare A B.")
    return names[0], names[1]
