"""Where Python and IPython keep the error of a cell that failed, and the values that cells returned.

Seen in CPython 3.11 to 3.13, IPython 9.18 and ipykernel 7.4, which adds copies of texts alone. Values are compared by
identity and classes only are asked, so that no code of the user's runs.
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType, TracebackType
from typing import Any

_LAST = ("last_type", "last_value", "last_traceback", "last_exc")
_PDB = "__pdb_convenience_variables"
"""What pdb writes into the globals of the frame it shows (3.12 and later): `_frame` is that frame."""
_UNDERSCORES = ("_", "__", "___")
_NOTHING = ""


def running_shell() -> Any:
    """The running IPython shell, or None; IPython is not imported for it."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def last_error() -> BaseException | None:
    """The error of the last cell that failed, as `%debug` would show it; None where none is kept."""
    found = vars(sys).get("last_exc") or vars(sys).get("last_value")
    return found if issubclass(type(found), BaseException) else None


def kept_errors(shell: Any) -> list[BaseException]:
    """The errors that Python and IPython keep: of the last cell, of the result of the last execution, of syntax."""
    result = _attribute(shell, "last_execution_result")
    kept = [
        vars(sys).get("last_exc"),
        vars(sys).get("last_value"),
        _attribute(result, "error_in_exec"),
        _attribute(result, "error_before_exec"),
        _attribute(_attribute(shell, "SyntaxTB"), "last_syntax_error"),
    ]
    return [error for error in kept if issubclass(type(error), BaseException)]


def kept_tracebacks(shell: Any) -> list[TracebackType]:
    """Tracebacks that are kept beside the errors: by Python, by what formats errors, and by the debugger."""
    formatter = _attribute(shell, "InteractiveTB")
    kept = [vars(sys).get("last_traceback"), _attribute(formatter, "tb")]
    return [found for found in kept if type(found) is TracebackType]


def forget_errors(shell: Any) -> None:
    """Let Python, IPython and its debugger forget the last error: as in a session in which nothing has failed.

    `%debug` and `%tb` then say that there is nothing to show.
    """
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    formatter = _attribute(shell, "InteractiveTB")
    if _attribute(formatter, "tb") is not None:
        formatter.tb = None
    debugger = _attribute(formatter, "pdb")
    if debugger is not None:
        _forget_frames(debugger)
        formatter.pdb = None  # made anew by the next %debug
    syntax = _attribute(shell, "SyntaxTB")
    if _attribute(syntax, "last_syntax_error") is not None:
        syntax.last_syntax_error = None
    result = _attribute(shell, "last_execution_result")
    if _attribute(result, "error_in_exec") is not None or _attribute(result, "error_before_exec") is not None:
        shell.last_execution_result = _emptied(result)


def _emptied(result: Any) -> Any:
    """A new result of the same execution without error and value; IPython asks the last one for its `result`."""
    new = type(result)(result.info)
    new.execution_count = result.execution_count
    return new


def _forget_frames(debugger: Any) -> None:
    """What `pdb` leaves behind when it was closed, or ended by an error."""
    with contextlib.suppress(AttributeError):
        frames = [debugger.curframe, *(frame for frame, _ in debugger.stack)]
        for frame in frames:
            forget_pdb_variables(frame)


def forget_pdb_variables(frame: FrameType | None) -> None:
    """Remove the variable in a frame's globals in which pdb keeps that frame."""
    if frame is not None:
        frame.f_globals.pop(_PDB, None)


def outputs(shell: Any) -> dict[str, Any]:
    """Name -> value of what cells returned, under every name that IPython gives it: `Out[7]`, `_7`, `_`, `__`, `___`.

    What the user has bound to such a name is not among them.
    """
    space, hook, cache = shell.user_ns, _attribute(shell, "displayhook"), _cache(shell)
    named = {f"Out[{number}]": value for number, value in cache.items()}
    named |= {f"_{number}": value for number, value in cache.items() if space.get(f"_{number}") is value}
    returned = {name: _attribute(hook, name) for name in _UNDERSCORES}
    return named | {
        name: value for name, value in returned.items() if space.get(name) is value and type(value) is not str
    }


def forget_output(shell: Any, value: Any) -> list[str]:
    """Remove a returned value from `Out`, `_7`, `_`, `__`, `___` and the last result; the names it was known by."""
    names = [name for name, known in outputs(shell).items() if known is value]
    # `user_ns_hidden` has every name that IPython itself put into the namespace, with its value.
    space, hidden, cache = shell.user_ns, shell.user_ns_hidden, _cache(shell)
    for name in names:
        if name.startswith("Out["):
            del cache[int(name[4:-1])]
        elif name in _UNDERSCORES:  # "" is what is there before the first output
            setattr(shell.displayhook, name, _NOTHING)
            space[name] = hidden[name] = _NOTHING
        else:
            space.pop(name, None)
            hidden.pop(name, None)
    for name in [name for name, kept in hidden.items() if kept is value and name.startswith("_")]:
        del hidden[name]
    if _attribute(_attribute(shell, "last_execution_result"), "result") is value:
        shell.last_execution_result = _emptied(shell.last_execution_result)
    return names


def _cache(shell: Any) -> dict[Any, Any]:
    cache = _attribute(shell, "user_ns", {}).get("_oh")
    return cache if type(cache) is dict else {}


def _attribute(thing: Any, name: str, default: Any = None) -> Any:
    return getattr(thing, name, default)
