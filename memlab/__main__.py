"""`python -m memlab COMMAND`, or `memlab COMMAND`: what is run outside notebooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

PIPE_CLOSED = 141
"""The exit status of a command that SIGPIPE ends, as a shell gives it."""
USAGE = """memlab run          measure a script while it runs
memlab predict      what a script would take on a GPU, without one
memlab show         the report of a saved run
memlab compare      two saved runs
memlab fit          the GPUs on which a saved run would fit
memlab check        a saved run against a baseline, for CI
memlab simulate     run a command, or a Jupyter kernel, on a simulated GPU
memlab cards        the GPUs that runs can be predicted for
memlab calibrate    measure this machine's GPU, once, for predictions
memlab progress     what you, or a class, have done of the course
memlab doctor       check what memlab can see on this machine
memlab --version    the version of memlab

memlab COMMAND --help tells more of each."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command == "--version":
        from memlab import __version__

        print(f"memlab {__version__}")
        return 0
    work = _command(command)
    if work is not None:
        return work(rest) if command in ("run", "simulate") else _printing(work, rest)
    is_help = command in ("-h", "--help", "")
    wrong = "" if is_help else f"memlab: there is no command {' '.join((command, *rest))[:80]!r}.\n"
    print(f"{wrong}{USAGE}", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


def _printing(work: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """A command whose output is its answer, also to a reader that has read enough (`memlab show runs | head`)."""
    try:
        status = work(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # What is left would be written, and fail, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except ImportError as problem:
        if "torch" in sys.modules:
            raise
        reason = (str(problem).splitlines() or [""])[0]
        print(f"memlab: PyTorch cannot be imported ({reason[:300]}): install it again.", file=sys.stderr)
        return 1


def _command(name: str) -> Callable[[Sequence[str]], int] | None:
    """The command of a name; only its own imports are made, and none of them imports torch before a script does."""
    match name:
        case "run":
            from memlab.cli.run import main as run

            return run
        case "predict":
            from memlab.cli.predict import main as predict

            return predict
        case "show" | "compare" | "fit" | "check" | "progress":
            from memlab.cli import files

            command: Callable[[Sequence[str]], int] = getattr(files, name)
            return command
        case "simulate":
            from memlab.cli.simulate import main as simulate

            return simulate
        case "calibrate":
            from memlab.cli.hardware import calibrate

            return calibrate
        case "cards":
            from memlab.cli.hardware import show_cards

            return show_cards
        case "doctor":
            from memlab.cli.hardware import show_doctor

            return show_doctor
    return None


if __name__ == "__main__":
    sys.exit(main())
