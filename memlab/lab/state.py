"""What is chosen in a Lab, as one plain value: what may be chosen, and a clear line for what may not.

Nothing here runs, and nothing here knows of widgets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memlab import workloads
from memlab.errors import MemlabError
from memlab.predictor.cards import Card, cards, find
from memlab.probes import cuda
from memlab.savings import Technique, techniques
from memlab.session.trial import Work, work_of
from memlab.workloads.workload import SIZES, Workload

DEVICES = ("cpu", "cuda", "card")
STEPS = (1, 1000)
FIRST = ("gpt", "laptop", "RTX 4060")
"""Workload, size and card that a Lab begins with, where there are such."""
SWITCHED = ("saving", "myth")
"""Kinds of techniques that have a toggle: the others are about time, safety or knowing."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that can be chosen. `settings` are those that differ from the size's own; `baseline` names a pinned run."""

    workload: str
    size: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    card: str = ""
    techniques: tuple[str, ...] = ()
    baseline: str = ""
    steps: int = 3
    force: bool = False
    """Measure also where the host's memory may not suffice."""

    def plain(self) -> dict[str, Any]:
        """The same as a dict of plain values, which can be changed without changing this."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {**values, "settings": dict(self.settings), "techniques": list(self.techniques)}


KEYS = tuple(one.name for one in dataclasses.fields(State))


class Choices:
    """What a Lab can choose from: the workloads that are known and the user's own, sizes, cards, techniques."""

    def __init__(self, own: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self.own = dict(own or {})
        self._cards: dict[str, Card] = {}
        for name, make in self.own.items():
            if not isinstance(name, str) or not name.strip() or not callable(make):
                raise MemlabError(
                    f"workloads is a dict of names and functions of model, optimizer, batch and loss, got {name!r:.80}."
                )

    @property
    def workloads(self) -> list[str]:
        """The names of all workloads, the user's own first."""
        return list(dict.fromkeys([*self.own, *known_workloads()]))

    @property
    def techniques(self) -> dict[str, Technique]:
        """Those with a toggle."""
        return {name: one for name, one in techniques.items() if has_toggle(one)}

    @property
    def cards(self) -> list[str]:
        """The names of all cards, those that the user brought first."""
        return list(dict.fromkeys([*self._cards, *cards]))

    @property
    def devices(self) -> tuple[str, ...]:
        """What can be chosen here."""
        return DEVICES if cuda.is_possible() else ("cpu", "card")

    def first(self) -> State:
        """What a Lab begins with."""
        names = self.workloads
        if not names:
            raise MemlabError("there is no workload: give the Lab a function of model, optimizer, batch and loss.")
        name = names[0] if self.own or FIRST[0] not in names else FIRST[0]
        card = FIRST[2] if FIRST[2] in cards else self.cards[0]
        return State(name, self._size(name), card=card)

    def _size(self, workload: str, wanted: str = FIRST[1]) -> str:
        """The size to take where none was named: none for a function of the user's own."""
        sizes = self.sizes(workload)
        return wanted if wanted in sizes else next(iter(sizes), "")

    def what(self, workload: str) -> Workload | Callable[[], Any]:
        """The workload of this name."""
        if workload in self.own:
            return self.own[workload]
        found: Workload = known_workloads()[workload]
        return found

    def idea(self, workload: str) -> str:
        """What it is, in a line."""
        what = self.what(workload)
        return what.idea if isinstance(what, Workload) else "your own function"

    def sizes(self, workload: str) -> list[str]:
        """The sizes it has."""
        what = self.what(workload)
        return [one for one in SIZES if one in what.sizes] if isinstance(what, Workload) else []

    def settings(self, workload: str, size: str) -> dict[str, Any]:
        """The settings of this size."""
        what = self.what(workload)
        return dict(what.sizes[size]) if isinstance(what, Workload) else {}

    def work(self, state: State) -> Work:
        """What is to be run."""
        what = self.what(state.workload)
        if isinstance(what, Workload):
            return work_of(what, state.size, **state.settings)
        return dataclasses.replace(work_of(what), name=state.workload)

    def on(self, state: State) -> str | Card:
        """Where it is to be run."""
        return self.card(state.card) if state.device == "card" else state.device

    def card(self, name: str) -> Card:
        """The card of this name, or of this size."""
        return self._cards[name] if name in self._cards else find(name)

    def excluded(self, chosen: Iterable[str]) -> dict[str, str]:
        """Name -> why it cannot be switched on beside those that are."""
        taken = list(chosen)
        found = {name: techniques.conflict([*taken, name]) for name in techniques if name not in taken}
        return {name: why for name, why in found.items() if why}

    # --- changes -----------------------------------------------------------------------------------------------------

    def changed(self, state: State, wanted: Any, runs: Iterable[str] = ()) -> State:
        """The state with what is wanted; one clear line where it cannot be. `runs` are the names that can be pinned."""
        if not isinstance(wanted, Mapping):
            raise MemlabError(f"a state is a dict of {', '.join(KEYS)}, got {type(wanted).__name__}.")
        for key in wanted:
            if key not in KEYS:
                raise MemlabError(f"a Lab has no {key!r:.80} to set. It has {', '.join(KEYS)}.")
        wanted = self._completed(state, dict(wanted))
        checks: dict[str, Callable[[State, Any], Any]] = {
            "workload": lambda new, one: _one_of("workload", one, self.workloads),
            "size": self._checked_size,
            "settings": self._checked_settings,
            "device": self._checked_device,
            "card": self._checked_card,
            "techniques": lambda new, one: self._checked_techniques(one),
            "baseline": lambda new, one: _one_of("baseline", one, ["", *runs]) if one else "",
            "steps": lambda new, one: _checked_steps(one),
            "force": lambda new, one: _checked_bool("force", one),
        }
        for key, check in checks.items():
            if key in wanted:
                state = dataclasses.replace(state, **{key: check(state, wanted[key])})
        return state

    def _completed(self, state: State, wanted: dict[str, Any]) -> dict[str, Any]:
        """With what follows from it: another workload or size has its own settings, a card is to be predicted for."""
        if "workload" in wanted and wanted["workload"] != state.workload:
            name = _one_of("workload", wanted["workload"], self.workloads)
            wanted.setdefault("size", self._size(name, state.size or FIRST[1]))
        if ("size" in wanted and wanted["size"] != state.size) or wanted.get("workload", state.workload) != (
            state.workload
        ):
            wanted.setdefault("settings", {})
        if wanted.get("card"):
            wanted.setdefault("device", "card")
        return wanted

    def _checked_size(self, state: State, size: Any) -> str:
        sizes = self.sizes(state.workload)
        if not sizes and size:
            raise MemlabError(f"{state.workload!r} is your own function and has no sizes, got {size!r:.80}.")
        return _one_of("size", size, sizes) if sizes else ""

    def _checked_settings(self, state: State, settings: Any) -> dict[str, Any]:
        if not isinstance(settings, Mapping):
            raise MemlabError(f"settings is a dict, got {settings!r:.80}.")
        own = self.settings(state.workload, state.size)
        for key, value in settings.items():
            if key not in own:
                known = ", ".join(own) or "none"
                raise MemlabError(f"workload {state.workload!r} has no setting {key!r:.80}. It has {known}.")
            _check_setting(key, value, own[key])
        return {key: value for key, value in settings.items() if value != own[key]}

    def _checked_device(self, state: State, device: Any) -> str:
        if device == "cuda" and "cuda" not in self.devices:
            raise MemlabError('device "cuda": there is no CUDA device here. Choose "cpu", or a card to predict for.')
        return _one_of("device", device, DEVICES)

    def _checked_card(self, state: State, card: Any) -> str:
        if isinstance(card, Card):
            self._cards[card.name] = card
            return card.name
        name = str(card) if isinstance(card, str) else ""
        if name in self._cards:
            return name
        found = find(card)
        if found.name not in cards:  # a size, as "8GiB": kept, so that its name finds it again
            self._cards[found.name] = found
        return found.name

    def _checked_techniques(self, names: Any) -> tuple[str, ...]:
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise MemlabError(f"techniques is a list of names, got {names!r:.80}.")
        chosen = tuple(dict.fromkeys(names))
        for name in chosen:
            if not has_toggle(techniques[name]):
                raise MemlabError(f"technique {name!r} is a {techniques[name].kind}: no run of the Lab would show it.")
        if why := techniques.conflict(chosen):
            raise MemlabError(f"{why}. Leave one out.")
        return chosen


def known_workloads() -> Mapping[str, Workload]:
    """Those that memlab has."""
    found: Any = workloads
    return found if isinstance(found, Mapping) or hasattr(found, "keys") else {}


def has_toggle(one: Technique) -> bool:
    """Whether switching it on changes a job."""
    return one.kind in SWITCHED and any(part is not None for part in (one.before, one.apply, one.habit))


def _one_of(what: str, value: Any, known: Iterable[str]) -> str:
    known = list(known)
    if value not in known:
        raise MemlabError(f"{what} {value!r:.80}: choose one of {', '.join(repr(one) for one in known)}.")
    return str(value)


def _check_setting(key: str, value: Any, own: Any) -> None:
    kind: Any = (int, float) if type(own) is float else type(own)
    wrong = not isinstance(value, kind) or isinstance(value, bool) != isinstance(own, bool)
    if wrong:
        raise MemlabError(
            f"setting {key!r}: give one of type {type(own).__name__}, such as {own!r}; got {value!r:.80}."
        )
    if isinstance(value, int | float) and not isinstance(value, bool) and value < min(own, 0 if own == 0 else 1e-9):
        raise MemlabError(f"setting {key!r} must be above 0, got {value!r:.80}.")


def _checked_steps(steps: Any) -> int:
    if type(steps) is not int or not STEPS[0] <= steps <= STEPS[1]:
        raise MemlabError(f"steps is a number from {STEPS[0]} to {STEPS[1]}, got {steps!r:.80}.")
    return int(steps)


def _checked_bool(what: str, value: Any) -> bool:
    if type(value) is not bool:
        raise MemlabError(f"{what} is True or False, got {value!r:.80}.")
    return value
