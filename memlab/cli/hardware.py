"""`memlab cards`, `calibrate` and `doctor`: the GPUs that memlab knows, and this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from memlab.cli.parser import Parser


def show_cards(arguments: Sequence[str]) -> int:
    """`memlab cards`: the GPUs that runs can be predicted for."""
    parser = Parser("cards", "[--json]", "List the GPUs that runs can be predicted for.", "  memlab cards")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.prediction.cards import cards

    print(cards.to_pandas().reset_index().to_json(orient="records") if asked.json else cards)
    return 0


def show_doctor(arguments: Sequence[str]) -> int:
    """`memlab doctor`: what memlab can see here; 1 if something is wrong."""
    what = "Check what memlab can see on this machine: 1 if something is wrong."
    parser = Parser("doctor", "[--json]", what, "  memlab doctor")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.api.doctor import doctor

    found = doctor()
    print(found.to_pandas().reset_index().to_json(orient="records") if asked.json else found)
    return 0 if found.is_well else 1


def calibrate(arguments: Sequence[str]) -> int:
    """`memlab calibrate [DEVICE]`: measure a GPU of this machine once, for predictions."""
    what = "Measure the context of a GPU of this machine, once; predictions for it use the result from then on."
    parser = Parser("calibrate", "[--json] [DEVICE]", what, "  memlab calibrate\n  memlab calibrate 1")
    number = "the number of the GPU (default: 0)"
    parser.add_argument("device", metavar="DEVICE", nargs="?", type=int, default=0, help=number)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    asked = parser.parse_args(arguments)
    from memlab.prediction.calibration import calibrate as measured
    from memlab.prediction.calibration_file import path

    with parser.refusing(1):
        found = measured(asked.device)
        print(json.dumps(dataclasses.asdict(found)) if asked.json else f"{found}\nkept in {path()}")
    return 0
