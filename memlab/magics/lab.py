"""`%memlab`: the Lab, with a workload and techniques named on the line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from memlab.errors import MemlabError

if TYPE_CHECKING:
    from memlab.lab import Lab


@magics_class
class LabMagics(Magics):
    """The Lab, where a workload is tried with techniques."""

    @line_magic
    @no_var_expand
    def memlab(self, line: str) -> Lab:
        """The Lab: `%memlab`, `%memlab gpt`, `%memlab gpt checkpoint,autocast_bf16`, `%memlab my_function`."""
        from memlab.lab import Lab  # late: without it nothing of widgets is loaded

        words = line.replace(",", " ").split()
        more: dict[str, Any] = {"techniques": words[1:]} if words[1:] else {}
        try:
            return Lab(self._workload(words[0]), **more) if words else Lab()
        except MemlabError as error:
            raise UsageError(f"%memlab: {error}") from None

    def _workload(self, word: str) -> Any:
        """The name of a workload, or the notebook's function of that name."""
        from memlab.lab.state import known_workloads

        own = self.shell.user_ns.get(word) if self.shell is not None else None
        return own if word not in known_workloads() and callable(own) else word


def close_labs() -> None:
    """Close every Lab that is shown; nothing is loaded for it."""
    view = sys.modules.get("memlab.lab.view")
    if view is not None:
        view.close_all()
