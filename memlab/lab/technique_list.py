"""A check box for each technique: what it is, its price, and why it cannot be switched on.

Plain check boxes in one list with a filter, as ipywidgets' accordion cannot be opened by keyboard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ipywidgets
from ipywidgets import Layout

from memlab.lab.widgets import clickable, flowing, prose
from memlab.saving_techniques import Technique

ALL, CHOSEN = "all", "chosen"
STYLE = """
.memlab-lab .memlab-toggles { max-height: 300px; overflow: auto; border: 1px solid rgba(117, 121, 130, 0.4); padding: 4px 8px }
.memlab-lab .memlab-about { display: none }
.memlab-lab .memlab-toggle:focus-within .memlab-about, .memlab-lab .memlab-toggle:hover .memlab-about { display: block }
.memlab-lab .memlab-toggle { flex: 0 0 auto; line-height: 1.45 }
.memlab-lab .memlab-toggle .widget-html-content { line-height: 1.45; white-space: normal }
.memlab-lab .memlab-toggle input[type=checkbox] { outline-offset: 2px }
"""


class TechniqueList:
    """The check boxes below a filter and a choice of what they attack."""

    def __init__(self, techniques: Mapping[str, Technique], changed: Callable[[str, bool], None]) -> None:
        self._techniques, self._changed = techniques, changed
        self._chosen: tuple[str, ...] = ()
        self._rows: dict[str, Any] = {}  # each has a check box and a text
        self._groups: dict[str, list[str]] = {}  # first category attacked -> technique names
        for name, one in techniques.items():
            self._groups.setdefault(one.attacks[0] if one.attacks else "none", []).append(name)
            self._rows[name] = self._row(name, one)
        attacked = dict.fromkeys(group for one in techniques.values() for group in one.attacks)
        self.filter = clickable(ipywidgets.Text(description="Filter", placeholder="part of a name or idea"))
        self.group = clickable(ipywidgets.Dropdown(description="Attacks", options=[ALL, CHOSEN, *attacked]))
        self._count = ipywidgets.HTML()
        self._heads = {group: ipywidgets.HTML(f"<b>Attacks: {prose(group)}</b>") for group in self._groups}
        listed = []
        for group, names in self._groups.items():
            listed += [self._heads[group], *(self._rows[name] for name in names)]
        box = ipywidgets.VBox(listed)
        box.add_class("memlab-toggles")
        self.box = ipywidgets.VBox([flowing(self.filter, self.group, self._count), box])
        for control in (self.filter, self.group):
            control.observe(lambda _: self._sift(), "value")
        self._sift()

    def _row(self, name: str, one: Technique) -> Any:
        # The check box has the name and the text next to it the idea: a repeated name would be read twice.
        box = clickable(ipywidgets.Checkbox(description=name, indent=False))
        box.layout.min_width, box.tooltip = "230px", one.idea
        box.observe(lambda change: self._changed(name, bool(change["new"])), "value")
        row = flowing(box, ipywidgets.HTML(_about(one, ""), layout=Layout(flex="1 1 300px", min_width="0")))
        row.add_class("memlab-toggle")
        return row

    def show(self, chosen: Iterable[str], why: Mapping[str, str]) -> None:
        """Set the check boxes; `why` says which cannot be switched on."""
        self._chosen = tuple(chosen)
        for name, row in self._rows.items():
            box, text = row.children
            box.value, box.disabled = name in self._chosen, name in why
            text.value = _about(self._techniques[name], why.get(name, ""))  # the same text again is not sent
        self._sift()

    def _sift(self) -> None:
        """Show the techniques that match the filter and the group."""
        words, group = self.filter.value.casefold().split(), self.group.value
        shown = set()
        for name, one in self._techniques.items():
            text = f"{name} {one.idea} {' '.join(one.attacks)} {one.kind}".casefold()
            is_in_group = group == ALL or group in one.attacks or (group == CHOSEN and name in self._chosen)
            if is_in_group and all(word in text for word in words):
                shown.add(name)
            self._rows[name].layout.display = "flex" if name in shown else "none"
        for head, names in self._groups.items():
            self._heads[head].layout.display = "block" if shown & set(names) else "none"
        total = len(self._techniques)
        listed = f"{len(shown)} of {total} techniques listed" if len(shown) < total else f"{total} techniques"
        chosen = f": {', '.join(self._chosen)}" if self._chosen else ""
        self._count.value = f"<div role='status'>{listed}, {len(self._chosen)} chosen{chosen}</div>"


def _about(one: Technique, why: str) -> str:
    """The text next to a check box."""
    myth = "<b>Myth.</b> " if one.kind == "myth" else ""
    cannot = f"<div><b>Cannot be added now:</b> {prose(why)}</div>" if why else ""
    facts = {"Results": str(one.equality), "Price": one.price, "Not when": one.not_when}
    about = "".join(f"<div>{key}: {prose(text)}</div>" for key, text in facts.items() if text)
    return f"<div>{myth}{prose(one.idea)}</div>{cannot}<div class='memlab-about'>{about}</div>"
