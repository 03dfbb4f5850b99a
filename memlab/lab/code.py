"""A script that runs what a row of a Lab ran: it stands for itself, with what a reader would paste of each technique."""

from __future__ import annotations

import inspect
import pprint
import textwrap
from collections.abc import Callable
from typing import Any

from memlab.lab.state import Choices, State
from memlab.lab.table import Row
from memlab.predictor.cards import Card, cards
from memlab.savings import techniques
from memlab.units import plain


def script(choices: Choices, state: State, row: Row | None = None) -> str:
    """The script. `row` is what came of it here."""
    parts = [_head(state, row), *_own_work(choices, state), _call(choices, state), *map(_pasted, state.techniques)]
    return "\n\n".join(parts) + "\n"


def _head(state: State, row: Row | None) -> str:
    where = f"predicted for {state.card}" if state.device == "card" else f"measured on {state.device.upper()}"
    what = " ".join(filter(None, [state.workload, state.size]))
    chosen = ", ".join(state.techniques) or "no technique"
    lines = [f"# {plain(what)} with {chosen}, {plain(where)}."]
    if row is not None and row.peak_bytes:
        peak, saved, step, *_ = row.cells()
        took = [f"peak {peak}", f"saved {saved}" if saved else "", f"a step {step}" if step else ""]
        lines.append(f"# Where this script was made: {', '.join(filter(None, took))}.")
    return "\n".join([*lines, "import memlab"])


def _own_work(choices: Choices, state: State) -> list[str]:
    """The function of the user's own, as far as its text is known."""
    if state.workload not in choices.own:
        return []
    make = choices.own[state.workload]
    source = _source(make)
    name = getattr(make, "__name__", "")
    if source and name.isidentifier():
        return [f"# What it uses of its notebook has to be imported or defined here too.\n{source}".rstrip()]
    missing = f"    raise NotImplementedError({f'put the function {state.workload!r} here'!r})"
    return [f"# The text of this function is not known: paste it here.\ndef {_name(choices, state)}():\n{missing}"]


def _source(make: Callable[[], Any]) -> str:
    """The text of a function that stands for itself; "" where there is none."""
    if not inspect.isfunction(make) or make.__name__ == "<lambda>":
        return ""
    try:
        return textwrap.dedent(inspect.getsource(make))
    except (OSError, TypeError):
        return ""


def _name(choices: Choices, state: State) -> str:
    make = choices.own[state.workload]
    name = getattr(make, "__name__", "")
    return name if _source(make) and name.isidentifier() else "mine"


def _call(choices: Choices, state: State) -> str:
    """Open a Lab, set its state, run it, print what came of it."""
    wanted = state.plain()
    wanted["baseline"] = ""
    if state.device != "card":
        del wanted["card"]
    lab = "lab = memlab.Lab()"
    if state.workload in choices.own:
        lab = f"lab = memlab.Lab(workloads={{{state.workload!r}: {_name(choices, state)}}})"
    kept = {key: value for key, value in wanted.items() if value or key in ("workload", "device", "techniques")}
    body = pprint.pformat(kept, width=100, sort_dicts=False)
    card = choices.card(state.card) if state.device == "card" else None
    own_card = ""
    if card is not None and card.name not in cards:
        own_card = f"card = {_card(card)}\n"
        body = body.replace(f"'card': {state.card!r}", "'card': card")
    return f"{own_card}{lab}\nlab.state = {body}\nlab.run()\nprint(lab)"


def _card(card: Card) -> str:
    """A card that is not among the known ones, as it is made."""
    names = ("name", "total_bytes", "compute_capability", "context_bytes", "usable_bytes", "usable_high_bytes")
    return f"memlab.Card({', '.join(f'{name}={getattr(card, name)!r}' for name in names)})"


def _pasted(name: str) -> str:
    """A technique's own code, in comments: its names are those of the reader's program."""
    one = techniques[name]
    lines = [f"{name}: {one.idea}", "", *one.code.strip("\n").splitlines()]
    return "\n".join(f"# {line}".rstrip() for line in lines)
