"""The text of a `%%memtrack` cell: one line is replaced by one line, so that everything below keeps its line number.

Pure functions of lines, run by IPython several times per cell; nothing is executed here.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable

MAGIC = "%%memtrack"
ARM = "_memlab_arm"
"""The attribute of the shell that the first line of a tracked cell calls."""


def is_tracked(lines: list[str]) -> bool:
    """Whether a cell begins with the magic."""
    return bool(lines) and (lines[0] + " ").split(None, 1)[0] == MAGIC and lines[0].startswith(MAGIC)


def armed(lines: list[str], transform_rest: Callable[[str], str]) -> list[str]:
    """The cell with its first line replaced by a call that starts the run, and the body as it is.

    A body that begins with another cell magic is rewritten by IPython first. `from __future__` imports must stay the
    first statements of a cell, so the call then stands behind the last of them, on the same line.
    """
    call = f"get_ipython().{ARM}({lines[0].removeprefix(MAGIC).strip()!r})"
    body = lines[1:]
    if body and body[0].startswith("%%"):
        body = transform_rest("".join(body)).splitlines(keepends=True)
    place = _end_of_future_imports(body)
    if place is None:
        return [call + "\n", *body]
    row, column = place
    line = body[row]
    end = "\n" if line.endswith("\n") else ""
    rest = line[column:].lstrip(" \t;").rstrip("\n")
    body[row] = f"{line[:column]}; {call}" + (f"; {rest}" if rest and not rest.startswith("#") else "") + end
    return ["\n", *body]


def _end_of_future_imports(body: list[str]) -> tuple[int, int] | None:
    """(row, column) behind the last `from __future__` import with which a cell begins, None if there is none."""
    place = None
    begins_statement, is_future = True, False
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(body)).readline):
            if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING):
                continue
            if token.type == tokenize.NEWLINE or token.string == ";":
                if is_future:
                    place = (token.start[0] - 1, token.start[1])
                begins_statement, is_future = True, False
            elif begins_statement:
                begins_statement = False
                is_docstring = token.type == tokenize.STRING and place is None
                is_future = _is_future_import(token)
                if not is_future and not is_docstring:
                    break
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass  # a magic further down; the future imports came before it
    return _before_comment(body, place) if place else None


def _is_future_import(token: tokenize.TokenInfo) -> bool:
    return token.string == "from" and token.line[token.end[1] :].split(None, 1)[:1] == ["__future__"]


def _before_comment(body: list[str], place: tuple[int, int]) -> tuple[int, int]:
    """NEWLINE tokens stand behind a comment; the call must stand before it."""
    row, column = place
    text = body[row][:column]
    return row, len(text.split("#", 1)[0].rstrip())
