"""A switch for each technique: what it is, why it cannot be switched on now, and its price while it has the focus.

Plain check boxes in one list with a filter, as ipywidgets' accordion cannot be opened by keyboard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from memlab.lab.parts import clickable, flowing
from memlab.savings import Technique

ALL, CHOSEN = "all", "chosen"
STYLE = """
.memlab-lab .memlab-toggles { max-height: 300px; overflow: auto; border: 1px solid rgba(117, 121, 130, 0.4); padding: 4px 8px }
.memlab-lab .memlab-about { display: none }
.memlab-lab .memlab-toggle:focus-within .memlab-about, .memlab-lab .memlab-toggle:hover .memlab-about { display: block }
.memlab-lab .memlab-toggle { flex: 0 0 auto; line-height: 1.45 }
.memlab-lab .memlab-toggle .widget-html-content { line-height: 1.45; white-space: normal }
.memlab-lab .memlab-toggle input[type=checkbox] { outline-offset: 2px }
"""


class Toggles:
    """The switches, in one box with a filter and a choice of what they attack."""

    def __init__(self, techniques: Mapping[str, Technique], changed: Callable[[str, bool], None]) -> None:
        self._techniques = techniques
        self._changed = changed
        self._chosen: tuple[str, ...] = ()
        self._why: dict[str, str] = {}
        groups = groups_of(techniques)
        self.filter = clickable(
            widgets.Text(description="Filter", placeholder="part of a name or idea", continuous_update=True)
        )
        self.group = clickable(widgets.Dropdown(description="Attacks", options=[ALL, CHOSEN, *attacked(techniques)]))
        self.count = widgets.HTML()
        self._boxes: dict[str, Any] = {}
        self._texts: dict[str, Any] = {}
        self._rows: dict[str, Any] = {}
        self._heads: dict[str, Any] = {}
        children = []
        for group, names in groups.items():
            self._heads[group] = widgets.HTML(f"<b>Attacks: {escape(group)}</b>")
            for name in names:
                self._add(name, techniques[name])
            children += [self._heads[group], *(self._rows[name] for name in names)]
        self._list = widgets.VBox(children)
        self._list.add_class("memlab-toggles")
        self.box = widgets.VBox([flowing(self.filter, self.group, self.count), self._list])
        self.filter.observe(lambda _: self._sift(), "value")
        self.group.observe(lambda _: self._sift(), "value")
        self._sift()

    def _add(self, name: str, one: Technique) -> None:
        layout = widgets.Layout(width="auto", min_width="230px")
        # The name twice would be read twice: the check box has it, the text beside has the idea.
        box = self._boxes[name] = clickable(widgets.Checkbox(description=name, indent=False, layout=layout))
        box.tooltip = one.idea
        text = self._texts[name] = widgets.HTML(_told(one, ""), layout=widgets.Layout(flex="1 1 300px", min_width="0"))
        row = self._rows[name] = widgets.HBox([box, text], layout=widgets.Layout(flex_flow="row wrap", width="100%"))
        row.add_class("memlab-toggle")
        box.observe(lambda change: self._changed(name, bool(change["new"])), "value")

    def show(self, chosen: Iterable[str], why: Mapping[str, str]) -> None:
        """Set the switches; `why` says which cannot be switched on."""
        self._chosen = tuple(chosen)
        for name, box in self._boxes.items():
            box.value, box.disabled = name in self._chosen, name in why
            if why.get(name) != self._why.get(name):
                self._texts[name].value = _told(self._techniques[name], why.get(name, ""))
        self._why = dict(why)
        self._sift()

    def _sift(self) -> None:
        wanted, group = self.filter.value.casefold().split(), self.group.value
        shown = set()
        for name, one in self._techniques.items():
            text = f"{name} {one.idea} {' '.join(one.attacks)} {one.kind}".casefold()
            fits = group == ALL or group in one.attacks or (group == CHOSEN and name in self._chosen)
            if fits and all(word in text for word in wanted):
                shown.add(name)
            _display(self._rows[name], "flex" if name in shown else "none")
        for head, of_group in groups_of(self._techniques).items():
            _display(self._heads[head], "block" if shown & set(of_group) else "none")
        names = f": {', '.join(self._chosen)}" if self._chosen else ""
        total = len(self._techniques)
        listed = f"{len(shown)} of {total} techniques listed" if len(shown) < total else f"{total} techniques"
        self.count.value = f"<div role='status'>{escape(f'{listed}, {len(self._chosen)} chosen{names}')}</div>"


def groups_of(techniques: Mapping[str, Technique]) -> dict[str, list[str]]:
    """What is attacked first of all -> names of those that attack it."""
    groups: dict[str, list[str]] = {}
    for name, one in techniques.items():
        groups.setdefault(one.attacks[0] if one.attacks else "none", []).append(name)
    return groups


def attacked(techniques: Mapping[str, Technique]) -> list[str]:
    """Everything that one of them attacks."""
    return list(dict.fromkeys(group for one in techniques.values() for group in one.attacks))


def _display(widget: Any, how: str) -> None:
    if widget.layout.display != how:
        widget.layout.display = how


def _told(one: Technique, why: str) -> str:
    """What a reader sees beside a switch."""
    myth = "<b>Myth.</b> " if one.kind == "myth" else ""
    cannot = f"<div><b>Cannot be added now:</b> {escape(why)}</div>" if why else ""
    facts = {"Results": str(one.equality), "Price": one.price, "Not when": one.not_when}
    about = "".join(f"<div>{key}: {escape(text)}</div>" for key, text in facts.items() if text)
    return f"<div>{myth}{escape(one.idea)}</div>{cannot}<div class='memlab-about'>{about}</div>"
