"""`%memwho [EXPR]`: who holds memory now, or every path that keeps one tensor alive."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand

from memlab.errors import MemlabError
from memlab.session.who import Who, who


@magics_class
class WhoMagics(Magics):
    """Who holds memory, by the notebook's own names."""

    @line_magic
    @no_var_expand
    @needs_local_scope
    def memwho(self, line: str, local_ns: dict[str, Any] | None = None) -> Who:
        """Who holds memory now: `%memwho`; what keeps a tensor alive: `%memwho EXPR`; one device: `%memwho -d cuda:0`."""
        device, expression = _split(line)
        shell: Any = self.shell
        found, problem = _ask(expression, device, shell.user_ns, local_ns)
        if found is None:  # here, where no variable holds the value: the traceback keeps this frame
            raise UsageError(f"%memwho: {problem}")
        return found


def _split(line: str) -> tuple[str | None, str]:
    """The device that was asked for, and the expression."""
    words = line.split(maxsplit=2)
    if words[:1] not in (["-d"], ["--device"]):
        return None, line.strip()
    if len(words) < 2:
        raise UsageError("%memwho: -d needs a device, for example -d cuda:0.")
    return words[1], words[2] if len(words) > 2 else ""


def _ask(
    expression: str, device: str | None, names: dict[str, Any], local: dict[str, Any] | None
) -> tuple[Who | None, str]:
    """The answer, or what is wrong in one line."""
    try:
        if not expression:
            return who(device=device), ""
        # In a function the names are those of its frame; at the top they are the notebook's own, and not a copy.
        value = eval(expression, {**names, **local} if local is not None and local is not names else names)
        if value is None:
            return None, f"{expression[:80]} is None."
        return who(value, device, name=expression), ""
    except MemlabError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{expression[:80]!r} failed: {type(error).__name__}: {str(error)[:200]}"
