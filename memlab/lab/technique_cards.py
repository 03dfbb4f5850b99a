"""A card for each technique: a check box, a bar of what it would save here, its idea, and its price under the pointer or focus.

Plain check boxes with a filter, as ipywidgets' accordion cannot be opened by keyboard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

import ipywidgets
from ipywidgets import Layout

from memlab.lab.estimates import Estimate
from memlab.lab.widgets import clickable, flowing, prose
from memlab.saving_techniques import Technique

ALL, CHOSEN = "all", "chosen"


class TechniqueCards:
    """The cards below a filter and a choice of what they attack."""

    def __init__(self, techniques: Mapping[str, Technique], changed: Callable[[str, bool], None]) -> None:
        self._techniques, self._changed = techniques, changed
        self._chosen: tuple[str, ...] = ()
        self.cards = {name: self._card(name, one) for name, one in techniques.items()}
        attacked = dict.fromkeys(group for one in techniques.values() for group in one.attacks)
        self.filter = clickable(ipywidgets.Text(description="Filter", placeholder="part of a name or idea"), "210px")
        self.group = clickable(ipywidgets.Dropdown(description="Attacks", options=[ALL, CHOSEN, *attacked]))
        self._count = ipywidgets.HTML()
        self.cells = ipywidgets.VBox(list(self.cards.values()))
        self.cells.add_class("memlab-cards")
        self.box = ipywidgets.VBox([flowing(self.filter, self.group, self._count), self.cells])
        for control in (self.filter, self.group):
            control.observe(lambda _: self._sift(), "value")
        self._sift()

    def _card(self, name: str, one: Technique) -> Any:
        # The check box has the name and the text below it the idea: a repeated name would be read twice.
        box = clickable(ipywidgets.Checkbox(description=name, indent=False), "100%")
        box.tooltip = one.idea
        box.observe(lambda change: self._changed(name, bool(change["new"])), "value")
        card = ipywidgets.VBox([box, ipywidgets.HTML(layout=Layout(width="auto"))])
        card.add_class("memlab-card")
        return card

    def show(self, chosen: Iterable[str], why: Mapping[str, str], estimates: Mapping[str, Estimate | None]) -> None:
        """Set the check boxes and bars; `why` says which cannot be switched on."""
        self._chosen = tuple(chosen)
        for name, card in self.cards.items():
            box, text = card.children
            box.value, box.disabled = name in self._chosen, name in why
            # The same text again is not sent.
            text.value = _about(self._techniques[name], why.get(name, ""), estimates.get(name))
        self._sift()

    def rank(self, estimates: Mapping[str, Estimate | None]) -> None:
        """What saves most first, what does not apply last; called when all are known, as cards move."""

        def place(name: str) -> tuple[bool, bool, bool, float]:
            one = estimates[name] or Estimate(why="not known")
            return not one.applies, bool(one.why), one.of_pattern, -one.share

        ranked = tuple(self.cards[name] for name in sorted(self.cards, key=place))
        if self.cells.children != ranked:
            self.cells.children = ranked

    def _sift(self) -> None:
        """Show the techniques that match the filter and the group."""
        words, group = self.filter.value.casefold().split(), self.group.value
        shown = 0
        for name, one in self._techniques.items():
            text = f"{name} {one.idea} {' '.join(one.attacks)} {one.kind}".casefold()
            is_in_group = group == ALL or group in one.attacks or (group == CHOSEN and name in self._chosen)
            is_shown = is_in_group and all(word in text for word in words)
            self.cards[name].layout.display = "flex" if is_shown else "none"
            shown += is_shown
        total = len(self._techniques)
        listed = f"{shown} of {total} techniques listed" if shown < total else f"{total} techniques"
        chosen = f": {', '.join(self._chosen)}" if self._chosen else ""
        self._count.value = f"<div role='status'>{listed}, {len(self._chosen)} chosen{chosen}</div>"


def _about(one: Technique, why: str, estimate: Estimate | None) -> str:
    """The text below a check box."""
    myth = "<b>Myth.</b> " if one.kind == "myth" else ""
    cannot = f"<div><b>Cannot be added now:</b> {prose(why)}</div>" if why else ""
    facts = {"Attacks": ", ".join(one.attacks), "Results": str(one.equality)}
    facts |= {key: text for key, text in (("Price", one.price), ("Not when", one.not_when)) if text}
    about = "".join(f"<div>{key}: {prose(text)}</div>" for key, text in facts.items())
    title = escape("\n".join([one.idea, *(f"{key}: {text}" for key, text in facts.items())]).replace("`", ""))
    idea = f"<div class='memlab-idea'>{myth}{prose(one.idea)}</div>"
    # What it would save, as a share of the peak; empty until it is known.
    share = 0.0 if estimate is None or estimate.why else max(-1.0, min(estimate.share, 1.0))
    kind = " class='memlab-costs'" if share < 0 else ""
    bar = f"<div class='memlab-share' aria-hidden='true'><div{kind} style='width:{100 * abs(share):.0f}%'></div></div>"
    saves = f"<div>{prose(estimate.text) if estimate is not None else '…'}</div>"
    return f"<div title='{title}'>{bar}{saves}{cannot}{idea}<div class='memlab-about'>{about}</div></div>"
