"""The text of a `%%memtrack` cell: the first line is replaced by one line, so all others keep their numbers.

Pure functions of lines, run by IPython several times per cell; nothing is executed here.
"""

from __future__ import annotations

import io
import re
import textwrap
import tokenize
from collections.abc import Callable

MAGIC = "%%memtrack"
ARM = "_memlab_arm"
"""The attribute of the shell that the first line of a tracked cell calls."""
PREDICT = "_memlab_predict"
"""The attribute of the shell that a cell to be predicted is passed to."""

_CALL = re.compile(rf"""(; )?get_ipython\(\)\.{ARM}\((['"])(.*)\2\)""")
_HELP = re.compile(r"(-\S+ +)*(--help|-h)")
_PREDICTED = re.compile(r"(?<!\S)--predict(?![\w-])")


def asks_for_help(options: str) -> bool:
    """Whether the words after a magic are a question for its options.

    >>> asks_for_help(" --help "), asks_for_help("--lines -h"), asks_for_help("x - h"), asks_for_help("x --helpful")
    (True, True, False, False)
    """
    return bool(_HELP.fullmatch(options.strip()))


def is_tracked(lines: list[str]) -> bool:
    """Whether a cell begins with the magic."""
    return bool(lines) and lines[0].startswith(MAGIC) and lines[0].split(None, 1)[0] == MAGIC


def body_of(raw: str) -> str:
    """The text of a tracked cell below the magic, as typed; "" for any other cell.

    >>> body_of("\\n%%memtrack --name a\\nx = 1\\n")
    'x = 1\\n'
    """
    lines = raw.splitlines(keepends=True)
    place = next((row for row, line in enumerate(lines) if line.strip()), 0)
    return "".join(lines[place + 1 :]) if is_tracked([line.lstrip() for line in lines[place:]]) else ""


def as_written(line: str) -> str:
    """A line of a tracked cell as the user wrote it; the magic becomes a comment, so that the lines stay Python.

    >>> as_written("get_ipython()._memlab_arm('--name a')\\n")
    '# %%memtrack --name a\\n'
    """
    return _CALL.sub(lambda call: "" if call[1] else f"# {MAGIC} {call[3]}".rstrip(), line)


def armed(lines: list[str], transform_rest: Callable[[str], str]) -> list[str]:
    """The cell with its first line replaced by a call that starts the run, and the body as it is.

    A body that begins with another cell magic is rewritten by IPython first. `from __future__` imports must stay the
    first statements of a cell, so the call then follows the last of them, on the same line. A cell to be predicted runs
    in another process, which gets it as text; one whose magic asks for help does not run.
    """
    options = lines[0].removeprefix(MAGIC).strip()
    if asks_for_help(options):
        return [f"get_ipython().run_line_magic({MAGIC.lstrip('%')!r}, '--help')\n"]
    if _PREDICTED.search(options):
        return [f"get_ipython().{PREDICT}({options!r}, {''.join(lines[1:])!r})\n"]
    call = f"get_ipython().{ARM}({options!r})"
    # As IPython does to a cell, of which the call in the first line hides the body: no blank lines first, no indent.
    first = next((row for row, line in enumerate(lines[1:], 1) if line.strip()), len(lines))
    blank, body = lines[1:first], textwrap.dedent("".join(lines[first:])).splitlines(keepends=True)
    if body and body[0].startswith("%%"):
        body = transform_rest("".join(body)).splitlines(keepends=True)
    place = _end_of_future_imports(body)
    if place is None:
        return [call + "\n", *blank, *body]
    row, column = place
    body[row] = f"{body[row][:column]}; {call}{body[row][column:]}"
    return ["\n", *blank, *body]


def _end_of_future_imports(body: list[str]) -> tuple[int, int] | None:
    """(row, column) after the last `from __future__` import at the start of a cell; None if there is none."""
    place = end = None
    words: list[str] = []  # the first two of the statement
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(body)).readline):
            if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING):
                continue
            if token.type == tokenize.NEWLINE or token.string == ";":
                if words == ["from", "__future__"]:
                    place = end
                words = []
                continue
            end = (token.end[0] - 1, token.end[1])
            is_docstring = token.type == tokenize.STRING and place is None and not words
            if len(words) < 2 and not is_docstring:
                words.append(token.string)
                if words != ["from", "__future__"][: len(words)]:
                    break
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass  # a magic further down; the future imports came before it
    return place
