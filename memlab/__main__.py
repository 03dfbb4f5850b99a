"""`python -m memlab COMMAND`, or `memlab COMMAND`: what is run once per machine, outside notebooks."""

from __future__ import annotations

import sys

USAGE = """memlab calibrate    measure this machine's GPU, once, for predictions
memlab cards        the GPUs that runs can be predicted for
memlab doctor       check what memlab can see on this machine
memlab simulate     run a command, or a Jupyter kernel, on a simulated GPU (--help tells more)"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if command == "calibrate":
        from memlab.prediction.calibration import main as calibrate

        return calibrate(rest)
    if command == "cards" and not rest:
        from memlab.prediction.cards import cards

        print(cards)
        return 0
    if command == "doctor" and not rest:
        from memlab.api.doctor import doctor

        found = doctor()
        print(found)
        return 0 if found.is_well else 1
    if command == "simulate":
        from memlab.simulated_gpu.command import main as simulate

        return simulate(rest)
    is_help = command in ("-h", "--help", "")
    wrong = "" if is_help else f"memlab: there is no command {' '.join((command, *rest))[:80]!r}.\n"
    print(f"{wrong}{USAGE}", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main())
