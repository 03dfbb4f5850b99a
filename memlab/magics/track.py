"""`%%memtrack` and `%memtrack`: the options, and the magics as ordinary ones."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
    output_can_be_silenced,
)

from memlab import cells
from memlab.api.track import Options, Track
from memlab.magics.line_magics import usage_errors


class _Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors that never exits the kernel; `with_value` has the options that take one."""

    def __init__(self, **settings: Any) -> None:
        self.with_value: set[str] = set()
        super().__init__(**settings)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        action = super().add_argument(*names, **settings)
        if action.nargs != 0:
            self.with_value.update(action.option_strings)
        return action

    def error(self, message: str) -> NoReturn:
        options = " ".join(self.format_usage().split()).removeprefix("usage: %memtrack ")
        raise UsageError(f"%memtrack: {message}. Options: {options}")


def make_parser() -> _Parser:
    """The options of `%%memtrack`."""
    # Otherwise argparse asks the terminal, which a notebook is not.
    width = functools.partial(argparse.HelpFormatter, width=110)
    parser = _Parser(prog="%memtrack", add_help=False, allow_abbrev=False, formatter_class=width)
    add = parser.add_argument
    add("--name", metavar="N", help="the name of the run in memlab.runs")
    add("--device", metavar="D", help="cpu, cuda, cuda:1, mps or xpu; without it, whatever the cell uses")
    add("--lines", action="store_true", help="what each line of the cell and of the notebook's functions held")
    add("-f", "--function", metavar="FUNCTION", action="append", help="the lines of this function too; may be repeated")
    add("--shapes", action="store_true", help="the shape of what was allocated; slower")
    add("--budget", metavar="SIZE", help="fail above it: 2GiB, 500MB")
    add("--save", metavar="FILE", help="write the run to a file; memlab.load(FILE) reads it")
    add("--rate", metavar="HZ", type=float, default=10.0, help="how often to sample, at most 20")
    add("--ring", metavar="ENTRIES", type=int, help="so many of CUDA's events are kept until they are read")
    add("--no-live", action="store_true", help="no curve while the cell runs")
    add("--quiet", action="store_true", help="no report")
    add("--predict", metavar="CARD", help="run nothing here: predict the cell for that GPU")
    add("--assume", metavar="KEY=VALUE", action="append", help="with --predict: the value to assume for this key")
    add("--torch", metavar="VERSION", help="with --predict: the PyTorch that will run there, 2.10 to 2.15")
    add("--devices", metavar="N", type=int, help="with --predict: so many of that GPU, as cuda:0, cuda:1, ...")
    add("--raises-oom", action="store_true", help="with --predict: raise where memory would run out")
    return parser


def asked_of(line: str) -> argparse.Namespace:
    """Parse the words of a magic's line; UsageError before anything runs."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%memtrack: {error} in {line[:80]!r}.") from None
    parser = make_parser()
    asked, rest = parser.parse_known_args(words)
    if rest:
        parser.error(f"unknown {' '.join(rest)[:80]!r}")
    if asked.predict is None:
        refused: dict[str, Any] = {"--raises-oom": asked.raises_oom, "--assume": asked.assume, "--torch": asked.torch}
        refused["--devices"], why = asked.devices, "goes with --predict CARD."
    else:  # it has a card instead of a device, and no sampler
        refused = {"--device": asked.device, "--ring": asked.ring, "-f": asked.function}
        refused |= {"--lines": asked.lines, "--shapes": asked.shapes}
        why = "does not go with --predict, which measures nothing. Leave it out."
    for name, value in refused.items():
        if value is not None and value is not False:
            raise UsageError(f"%memtrack: {name} {why}")
    return asked


def parse(line: str) -> Options:
    """The options of a track; UsageError before anything runs."""
    asked = asked_of(line)
    if asked.predict is not None:
        raise UsageError("%memtrack: --predict has to stand in the cell's first line, as %%memtrack --predict CARD.")
    return options_of(asked)


def options_of(asked: argparse.Namespace) -> Options:
    """The options of a track, from the words of a magic's line."""
    ring = {} if asked.ring is None else {"entries": asked.ring}
    same: dict[str, Any] = {name: getattr(asked, name) for name in ("device", "budget", "save", "lines", "shapes")}
    same |= {"live": not asked.no_live, "show": not asked.quiet, "rate_hz": asked.rate}
    with usage_errors("memtrack"):
        return Options(asked.name, functions=asked.function or (), **same, **ring)


@magics_class
class TrackMagics(Magics):
    """The magics as ordinary ones: the line form, and the cell form where no transformer ran."""

    @line_cell_magic
    @no_var_expand
    @needs_local_scope
    @output_can_be_silenced
    def memtrack(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        """Measure the memory of a cell or of one statement: `%%memtrack [options]`, `%memtrack statement`."""
        if cell is None and not line.strip():
            raise UsageError("%memtrack needs a statement, or put %%memtrack on the first line of a cell.")
        options, code = (line, cell) if cell is not None else split_line(line)
        if cells.asks_for_help(options):
            print(inspect.getdoc(TrackMagics.memtrack))
            return None
        asked = asked_of(options)
        if asked.predict is None:
            return self._run(Track(options_of(asked)), code, local_ns)
        from memlab.magics.predict_cell import predict_cell  # late: without it nothing of prediction is loaded

        predict_cell(self.shell, asked, options_of(asked), options, code, local_ns)
        return None

    def _run(self, track: Track, code: str, local_ns: dict[str, Any] | None) -> Any:
        """Run code as the shell would; the value of a last expression is the value of the magic."""
        shell: Any = self.shell
        source = shell.transform_cell(code)
        place = shell.compile.cache(source)  # so that tracebacks show the code, as they do for cells
        tree = shell.compile.ast_parse(source, filename=place)
        track.code = ast.Module([*tree.body], [])
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        # In a function use the names of its frame; at top level the notebook's own dict, not a copy.
        is_inside = local_ns is not None and local_ns is not shell.user_ns
        names = {**shell.user_ns, **local_ns} if is_inside and local_ns else shell.user_ns
        track.run.cell_text = "" if is_inside else code
        with track:
            if tree.body:
                exec(compile(tree, place, "exec"), shell.user_ns, local_ns)
            value = eval(compile(last, place, "eval"), names) if last is not None else None
            track.run.offer(value)
            return value


# `%%memtrack?` shows the options too; -OO removes docstrings.
_options = make_parser().format_help().partition("options:")[2].rstrip()
TrackMagics.memtrack.__doc__ = f"{TrackMagics.memtrack.__doc__ or ''}\n\nOptions:{_options}"

_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def split_line(line: str) -> tuple[str, str]:
    """The options of a line, which begin with a dash, and the statement after them."""
    rest, wanted, takes_value = line.strip(), list[str](), make_parser().with_value
    while rest.startswith("-") and (word := _WORD.match(rest)):
        rest = rest[word.end() :].lstrip()
        if word[0] == "--":
            break
        wanted.append(word[0])
        if word[0] in takes_value and (value := _WORD.match(rest)):
            wanted.append(value[0])
            rest = rest[value.end() :].lstrip()
    return " ".join(wanted), rest
