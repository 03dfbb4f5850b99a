"""Where Python and IPython keep the error of a cell that failed, and the values that cells returned.

Seen in CPython 3.11 to 3.13, IPython 9.18 and ipykernel 7.4, which adds copies of texts alone. Values are compared by
identity and classes only are asked, so that no code of the user's runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from types import CodeType, FrameType, TracebackType
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


def kept_errors(shell: Any) -> list[BaseException]:
    """The errors that Python and IPython keep: of the last cell, of the result of the last execution, of syntax."""
    result = _part(shell, "last_execution_result")
    kept = [
        vars(sys).get("last_exc"),
        vars(sys).get("last_value"),
        _part(result, "error_in_exec"),
        _part(result, "error_before_exec"),
        _part(shell, "SyntaxTB", "last_syntax_error"),
    ]
    return [error for error in kept if issubclass(type(error), BaseException)]


def kept_tracebacks(shell: Any) -> list[TracebackType]:
    """Tracebacks that are kept beside the errors: by Python, by what formats errors, and by the debugger."""
    kept = [vars(sys).get("last_traceback"), _part(shell, "InteractiveTB", "tb")]
    return [found for found in kept if type(found) is TracebackType]


def leave_out(error: BaseException, codes: Collection[CodeType]) -> None:
    """Take the frames of this code out of the traceback of an error; its first frame stays."""
    place = error.__traceback__
    while place is not None:
        while place.tb_next is not None and place.tb_next.tb_frame.f_code in codes:
            place.tb_next = place.tb_next.tb_next
        place = place.tb_next


def forget_errors(shell: Any) -> None:
    """Let Python, IPython and its debugger forget the last error: as in a session in which nothing has failed.

    `%debug` and `%tb` then say that there is nothing to show.
    """
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    if (debugger := _part(shell, "InteractiveTB", "pdb")) is not None:
        with contextlib.suppress(AttributeError):  # it was closed, or ended by an error
            for frame in [debugger.curframe, *(frame for frame, _ in debugger.stack)]:
                forget_pdb_variables(frame)
    # The debugger is made anew by the next %debug.
    for holder, name in (("InteractiveTB", "tb"), ("InteractiveTB", "pdb"), ("SyntaxTB", "last_syntax_error")):
        if _part(shell, holder, name) is not None:
            setattr(_part(shell, holder), name, None)
    result = _part(shell, "last_execution_result")
    if _part(result, "error_in_exec") is not None or _part(result, "error_before_exec") is not None:
        _empty_last_result(shell)


def _empty_last_result(shell: Any) -> None:
    """Put a new result of the same execution, without error and value; IPython asks the last one for its `result`."""
    result = shell.last_execution_result
    new = shell.last_execution_result = type(result)(result.info)
    new.execution_count = result.execution_count


def forget_pdb_variables(frame: FrameType | None) -> None:
    """Remove the variable in a frame's globals in which pdb keeps that frame."""
    if frame is not None:
        frame.f_globals.pop(_PDB, None)


def outputs(shell: Any) -> dict[str, Any]:
    """Name -> value of what cells returned, under every name that IPython gives it: `Out[7]`, `_7`, `_`, `__`, `___`.

    What the user has bound to such a name is not among them.
    """
    space, cache = shell.user_ns, _cache(shell)
    named = {f"Out[{number}]": value for number, value in cache.items()}
    named |= {f"_{number}": value for number, value in cache.items() if space.get(f"_{number}") is value}
    for name in _UNDERSCORES:
        value = _part(shell, "displayhook", name)
        if space.get(name) is value and type(value) is not str:
            named[name] = value
    return named


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
    if _part(shell, "last_execution_result", "result") is value:
        _empty_last_result(shell)
    return names


def _cache(shell: Any) -> dict[Any, Any]:
    cache = (_part(shell, "user_ns") or {}).get("_oh")
    return cache if type(cache) is dict else {}


def _part(thing: Any, *names: str) -> Any:
    """An attribute of an attribute; None where one of them is not there."""
    for name in names:
        thing = getattr(thing, name, None)
    return thing
