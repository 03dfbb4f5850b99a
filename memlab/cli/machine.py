"""`memlab cards` and `memlab doctor`: the GPUs that memlab knows, and this machine."""

from __future__ import annotations

from collections.abc import Sequence

from memlab.cli.parser import Parser


def show_cards(arguments: Sequence[str]) -> int:
    """`memlab cards`: the GPUs that runs can be predicted for."""
    parser = Parser(
        "cards",
        "[--json]",
        "List the GPUs that runs can be predicted for.",
        "  memlab cards",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.prediction.cards import cards

    print(cards.to_pandas().reset_index().to_json(orient="records") if asked.json else cards)
    return 0


def show_doctor(arguments: Sequence[str]) -> int:
    """`memlab doctor`: what memlab can see here; 1 if something is wrong."""
    parser = Parser(
        "doctor",
        "[--json]",
        "Check what memlab can see on this machine: 1 if something is wrong.",
        "  memlab doctor",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.api.doctor import doctor

    found = doctor()
    print(found.to_pandas().reset_index().to_json(orient="records") if asked.json else found)
    return 0 if found.is_well else 1
