"""A script that repeats a run of the Lab, with the code of each technique to paste."""

from __future__ import annotations

import inspect
import pprint
import textwrap

from memlab.lab.run_table import LabRun
from memlab.lab.state import LabChoices, LabState
from memlab.prediction.cards import cards
from memlab.saving_techniques import techniques
from memlab.units import format_seconds, plain


def script(choices: LabChoices, state: LabState, row: LabRun | None = None) -> str:
    """The script. `row` is its result here."""
    what = " ".join(filter(None, [state.workload, state.size]))
    chosen = ", ".join(techniques.said(state.techniques, state.world_size)) or "no technique"
    head = [f"# {plain(what)} with {chosen}, {plain(state.where)}."]
    if row is not None and row.peak_bytes:
        saved = f", saved {row.saved_bytes}" if row.saved_bytes else ""
        step = f", a step {format_seconds(row.step_s)}" if row.step_s is not None else ""
        head.append(f"# Where this script was made: peak {row.peak_bytes}{saved}{step}.")
    function, source = _own_function(choices, state)
    parts = ["\n".join([*head, "import memlab"]), source, _call(choices, state, function)]
    for name in state.techniques:
        one = techniques[name]  # its code is a comment: its names are those of the reader's program
        lines = [f"{name}: {one.idea}", "", *one.code_over(state.world_size).splitlines()]
        parts.append("\n".join(f"# {line}".rstrip() for line in lines))
    return "\n\n".join(filter(None, parts)) + "\n"


def _own_function(choices: LabChoices, state: LabState) -> tuple[str, str]:
    """The name and the text of the user's own function; nothing for a workload of memlab."""
    if state.workload not in choices.own:
        return "", ""
    make = choices.own[state.workload]
    if inspect.isfunction(make) and make.__name__.isidentifier():  # a lambda has "<lambda>"
        try:
            source = textwrap.dedent(inspect.getsource(make)).rstrip()
            return make.__name__, f"# Import or define here what it uses of its notebook.\n{source}"
        except (OSError, TypeError):
            pass
    missing = f"    raise NotImplementedError({f'put the function {state.workload!r} here'!r})"
    return "mine", f"# The text of this function is not known: paste it here.\ndef mine():\n{missing}"


def _call(choices: LabChoices, state: LabState, function: str) -> str:
    """Open a Lab, set its state, run it, print the result."""
    wanted = {**state.plain(), "baseline": "", "world_size": state.world_size if state.is_sharded else 0}
    if state.device != "card":
        del wanted["card"], wanted["torch_version"]
    shown = {key: value for key, value in wanted.items() if value or key in ("workload", "device", "techniques")}
    body = pprint.pformat(shown, width=100, sort_dicts=False)
    lab = f"memlab.Lab(workloads={{{state.workload!r}: {function}}})" if function else "memlab.Lab()"
    made, card = "", choices.card(state.card)
    if state.device == "card" and card.name not in cards:  # a GPU that is not in the catalog
        names = ("name", "total_bytes", "compute_capability", "usable_bytes", "usable_high_bytes", "multiprocessors")
        values = {name: getattr(card, name) for name in (*names, "plausible_multiprocessors")}
        values["context_bytes"] = tuple(card.context_bytes)
        made = f"card = memlab.Card({', '.join(f'{name}={value!r}' for name, value in values.items())})\n"
        body = body.replace(f"'card': {state.card!r}", "'card': card")
    return f"{made}lab = {lab}\nlab.state = {body}\nlab.run()\nprint(lab)"
