"""`%%memtrack` and `%memtrack`: parse, call, show; nothing else.

A tracked cell is not wrapped: its first line becomes a call that starts a run, and the end of the cell's execution ends it.
So the last value, `;`, `await`, nested magics, errors and interrupts are what they are without the magic. Where a front
end does not use IPython's input transformers, an ordinary cell magic of the same name serves.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import shlex
import threading
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class, needs_local_scope, no_var_expand, output_can_be_silenced

from memlab import cells
from memlab.errors import BudgetExceeded, MemlabError
from memlab.session.track import Options, Track, options

_NOT_YET = {
    "--lines": "line listings",
    "--function": "line listings",
    "--shapes": "shapes on CUDA",
    "--predict": "prediction",
}


class _Parser(argparse.ArgumentParser):
    """argparse that refuses in one line and never exits the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%memtrack: {message}. Options: {_usage()}")


def _usage() -> str:
    return "[--name N] [--device D] [--budget 2GiB] [--save FILE] [--rate HZ] [--ring ENTRIES] [--no-live] [--quiet]"


def _parser() -> _Parser:
    parser = _Parser(prog="%memtrack", add_help=False, allow_abbrev=False)
    for name in ("--name", "--device", "--budget", "--save", "--predict"):
        parser.add_argument(name)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--ring", type=int)
    parser.add_argument("-f", "--function", action="append")
    for name in ("--no-live", "--quiet", "--lines", "--shapes"):
        parser.add_argument(name, action="store_true")
    return parser


def parse(line: str) -> Options:
    """The options of a magic's line; anything wrong is a UsageError, before anything runs."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%memtrack: {error} in {line[:80]!r}.") from None
    asked, rest = _parser().parse_known_args(words)
    if rest:
        raise UsageError(f"%memtrack: unknown {' '.join(rest)[:80]!r}. Options: {_usage()}")
    for option, what in _NOT_YET.items():
        if getattr(asked, option.strip("-")) not in (None, False):
            raise UsageError(f"%memtrack: {option} ({what}) is not in this version of memlab.")
    return _options(asked)


def _options(asked: argparse.Namespace) -> Options:
    ring = {} if asked.ring is None else {"entries": asked.ring}
    try:
        return options(
            asked.name,
            device=asked.device,
            budget=asked.budget,
            save=asked.save,
            rate_hz=asked.rate,
            live=not asked.no_live,
            show=not asked.quiet,
            **ring,
        )
    except MemlabError as error:
        raise UsageError(f"%memtrack: {error}") from None


@dataclasses.dataclass(slots=True)
class _Cell:
    """A cell that is being executed, and the tracks that it has opened."""

    info: Any
    tracks: list[Track] = dataclasses.field(default_factory=list)


class CellTracker(threading.local):
    """Starts a run when a tracked cell begins, and ends it when exactly that cell has ended.

    Cells run inside of cells (%%capture, run_cell), so there is a stack of them; and one in each thread (subshells).
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._cells: list[_Cell] = []

    def before_cell(self, info: Any) -> None:
        """pre_run_cell: remember which execution this is; the call in the cell's first line cannot know."""
        self._cells.append(_Cell(info))

    def arm(self, line: str) -> None:
        """The call in the first line of a tracked cell."""
        track = Track(parse(line))
        if not self._cells:
            raise UsageError("%memtrack: this cell runs silently, so nobody tells its end; use memlab.track() in it.")
        try:
            track.start()
        except MemlabError as error:
            raise UsageError(f"%memtrack: {error}") from None
        self._cells[-1].tracks.append(track)

    def after_cell(self, result: Any) -> None:
        """post_run_cell: end the runs of the cell, and those inside of it whose end was never told."""
        depth = self._depth_of(result)
        ended, self._cells[depth:] = self._cells[depth:], []
        for cell in reversed(ended):
            for track in reversed(cell.tracks):
                self._end(track, result)

    def _depth_of(self, result: Any) -> int:
        """Where in the stack the cell lies that gave this result.

        On some interrupts IPython makes a new info of the same text, and ipykernel has no result at all: then everything
        has ended. A result of no cell in the stack ends nothing (empty cells begin without a word).
        """
        if result is None:
            return 0
        for depth in reversed(range(len(self._cells))):
            if self._cells[depth].info is result.info:
                return depth
        for depth in reversed(range(len(self._cells))):
            if not result.success and self._cells[depth].info.raw_cell == result.info.raw_cell:
                return depth
        return len(self._cells)

    def _end(self, track: Track, result: Any) -> None:
        """End a run; where its budget was exceeded, or what was asked of it failed, the cell fails."""
        error = _error_of(result)
        try:
            problem: BaseException | None = track.stop(error)
        except (Exception, KeyboardInterrupt) as raised:
            problem = raised
        if problem is None or (error is not None and isinstance(problem, BudgetExceeded)):
            return  # a cell that raised has its own error to tell
        self.shell.showtraceback((type(problem), problem, None), exception_only=True)
        if result is not None and error is None:
            result.error_in_exec = problem  # the front end is told, and whoever runs all cells stops here

    def close(self) -> None:
        """End what is still open, from the inside out."""
        self.after_cell(None)


def _error_of(result: Any) -> BaseException | None:
    if result is None:
        return None
    return result.error_in_exec or result.error_before_exec


@magics_class
class MemlabMagics(Magics):
    """The magics as ordinary ones: the line form, and the cell form where no transformer ran."""

    @no_var_expand
    @needs_local_scope
    @output_can_be_silenced
    def memtrack(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        """Measure the memory of a cell or of one statement: `%%memtrack [options]`, `%memtrack statement`."""
        if cell is not None:
            return self._run(Track(parse(line)), cell, local_ns)
        if not line.strip():
            raise UsageError("%memtrack needs a statement, or put %%memtrack on the first line of a cell.")
        wanted, statement = _split(line)
        return self._run(Track(parse(wanted)), statement, local_ns)

    def _run(self, track: Track, code: str, local_ns: dict[str, Any] | None) -> Any:
        """Run code as the shell would; the value of a last expression is the value of the magic."""
        shell: Any = self.shell
        source = shell.transform_cell(code)
        place = shell.compile.cache(source)  # so that tracebacks show the code, as they do for cells
        tree = shell.compile.ast_parse(source, filename=place)
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        # In a function the names are those of its frame; at the top they are the notebook's own, and not a copy.
        is_inside = local_ns is not None and local_ns is not shell.user_ns
        names = {**shell.user_ns, **local_ns} if is_inside and local_ns else shell.user_ns
        with track:
            if tree.body:
                exec(compile(tree, place, "exec"), shell.user_ns, local_ns)
            return eval(compile(last, place, "eval"), names) if last is not None else None


_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")


def _split(line: str) -> tuple[str, str]:
    """Divide a line into the options before and the statement: options begin with a dash, their values follow."""
    takes_value = {"--name", "--device", "--budget", "--save", "--rate", "--ring", "--predict", "-f", "--function"}
    rest, wanted = line.strip(), []
    while rest.startswith("-") and (word := _WORD.match(rest)):
        rest = rest[word.end() :].lstrip()
        if word[0] == "--":
            break
        wanted.append(word[0])
        if word[0] in takes_value and (value := _WORD.match(rest)):
            wanted.append(value[0])
            rest = rest[value.end() :].lstrip()
    return " ".join(wanted), rest


class Extension:
    """What `%load_ext memlab` puts into a shell, and takes out again."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.tracker = CellTracker(shell)

    def transform(self, lines: list[str]) -> list[str]:
        """The input transformer. It must be pure: it runs several times for each cell."""
        if not cells.is_tracked(lines):
            return lines
        return cells.armed(lines, self.shell.input_transformer_manager.transform_cell)

    # Leaves the cell to IPython's rule for `%%` when it asks whether a cell is complete: else a terminal would run the
    # first line alone.
    transform.has_side_effects = True  # type: ignore[attr-defined]

    def install(self) -> None:
        """Register transformer, event and magics."""
        shell = self.shell
        shell.input_transformers_cleanup.append(self.transform)
        shell.events.register("pre_run_cell", self.tracker.before_cell)
        shell.events.register("post_run_cell", self.tracker.after_cell)
        setattr(shell, cells.ARM, self.tracker.arm)
        magics = MemlabMagics(shell)
        self.replaced = {kind: shell.magics_manager.magics[kind].get("memtrack") for kind in ("line", "cell")}
        shell.register_magic_function(magics.memtrack, "line_cell", "memtrack")

    def remove(self) -> None:
        """Take everything out; a run that is still open ends."""
        shell = self.shell
        self.tracker.close()
        if self.transform in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(self.transform)
        shell.events.unregister("pre_run_cell", self.tracker.before_cell)
        shell.events.unregister("post_run_cell", self.tracker.after_cell)
        delattr(shell, cells.ARM)
        for kind, magic in self.replaced.items():
            if magic is None:
                shell.magics_manager.magics[kind].pop("memtrack", None)
            else:
                shell.magics_manager.magics[kind]["memtrack"] = magic


_loaded: dict[int, Extension] = {}


def load(shell: Any) -> None:
    """Install the extension in a shell, once."""
    if id(shell) not in _loaded:
        extension = _loaded[id(shell)] = Extension(shell)
        extension.install()


def unload(shell: Any) -> None:
    """Remove the extension from a shell."""
    extension = _loaded.pop(id(shell), None)
    if extension is not None:
        extension.remove()
