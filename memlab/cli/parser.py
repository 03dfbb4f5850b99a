"""The parser of a command: one-line errors, and help that ends with examples."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import NoReturn

from memlab.errors import MemlabError
from memlab.scripts.script import Script

FITS, DOES_NOT_FIT, WRONG_USAGE, UNKNOWN = 0, 1, 2, 3
"""Exit statuses; 3: there is no answer, or it is too close to call."""


class Parser(argparse.ArgumentParser):
    """The parser of `memlab COMMAND`."""

    def __init__(self, command: str, usage: str, description: str, examples: str) -> None:
        super().__init__(
            f"memlab {command}", usage=f"memlab {command} {usage}", description=description, epilog=f"examples:\n{examples}",
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """One line, as everywhere in memlab."""
        if message.endswith("expected one argument"):  # none came, or one that looks like an option
            message += " (one that begins with '-' is written after '=')"
        self.exit(WRONG_USAGE, f"{self.prog}: {message}. {self.prog} --help shows how it is used.\n")

    @contextlib.contextmanager
    def refusing(self, status: int = WRONG_USAGE) -> Iterator[None]:
        """Errors of memlab end the command with one line and this exit status."""
        try:
            yield
        except MemlabError as error:
            self.exit(status, f"{self.prog}: {error}\n")

    def add_prediction(self) -> None:
        """The options of every prediction: for which PyTorch, and how long it may take."""
        of = "the PyTorch that will run there, 2.10 to 2.15 (default: the one that runs here)"
        self.add_argument("--torch", metavar="VERSION", type=given, help=of)
        self.add_argument("--limit", metavar="SECONDS", type=_seconds, help="give up after so long")

    def add_script(self) -> None:
        """The last arguments: a script or `-m MODULE`, and what it gets."""
        add = functools.partial(self.add_argument, nargs=argparse.REMAINDER)
        add("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
        add("script", metavar="SCRIPT [ARGS...]", help="the script and its arguments")

    def script_of(self, asked: argparse.Namespace) -> Script:
        """The script that was named; wrong usage if there is none."""
        words = asked.module if asked.module is not None else asked.script
        if not words:
            self.error("which script? Name one, or -m MODULE")
        if words[0] == "-":
            self.error("a script is a file; '-', which is stdin, is none")
        if words[0].startswith("-"):
            self.error(f"unknown option {words[0]!r:.80}; options stand before the script")
        return Script(words[0], tuple(words[1:]), is_module=asked.module is not None)


def status_of(answers: Iterable[str]) -> int:
    """The exit status of predictions, "yes", "no" or "close": whether it fits with any of these cards, jobs or sizes."""
    found = set(answers)
    return FITS if "yes" in found else UNKNOWN if "close" in found else DOES_NOT_FIT


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (found := float(text)) > 0:
            return found
    raise argparse.ArgumentTypeError(f"it is a number of seconds above 0, got {text!r:.80}")


def given(text: str) -> str:
    """The type of an argument that names something: an empty one, as of a variable that is not set, names nothing."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text
