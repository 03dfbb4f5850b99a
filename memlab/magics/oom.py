"""`%memoom` and `%memoom release`: the last out-of-memory explained, and letting go of what it still holds."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from memlab.errors import MemlabError
from memlab.session.oom import explain_oom, release

_USAGE = "%memoom explains the last out-of-memory; %memoom release [--keep-outputs] lets go of what it still holds"


@magics_class
class OomMagics(Magics):
    """What to do when a cell ran out of memory."""

    @line_magic
    def memoom(self, line: str) -> Any:
        """Explain the last out-of-memory: `%memoom`; let go of what its cell still holds: `%memoom release`."""
        words = line.split()
        if words[:1] == ["release"] and words[1:] in ([], ["--keep-outputs"]):
            return release(outputs=not words[1:])
        if words:
            raise UsageError(f"%memoom: unknown {line.strip()[:80]!r}. {_USAGE}.")
        try:
            return explain_oom()
        except MemlabError as error:
            raise UsageError(f"%memoom: {error}") from None
