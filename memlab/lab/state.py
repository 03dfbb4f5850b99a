"""The choices in a Lab: what is chosen, what is available, and errors for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memlab.api.predict import first_rank
from memlab.api.provenance import provenance_here
from memlab.api.workload_run import WORLD_SIZE, Work, work_of
from memlab.errors import MemlabError
from memlab.prediction.cards import Card, cards, find
from memlab.prediction.torch_versions import RELEASES, checked_version
from memlab.probes import cuda
from memlab.saving_techniques import techniques
from memlab.workloads import SIZES, Workload, workloads

DEVICES = ("cpu", "cuda", "card")
MAX_STEPS, MAX_WORLD_SIZE = 1000, 1 << 20
FIRST_WORKLOAD, FIRST_SIZE, FIRST_CARD = "gpt", "laptop", "RTX 4060"


@dataclass(frozen=True, slots=True)
class LabState:
    """The state of a Lab. `settings` are those that differ from the size's own; `baseline` names a pinned run.

    `force` measures even if the host's memory may not be enough; `world_size` GPUs are shared by techniques for several.
    `torch_version` is the PyTorch that predictions are for, such as "2.14"; "" is the one that runs here.
    """

    workload: str
    size: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    card: str = ""
    techniques: tuple[str, ...] = ()
    baseline: str = ""
    steps: int = 3
    force: bool = False
    world_size: int = WORLD_SIZE
    torch_version: str = ""

    def plain(self) -> dict[str, Any]:
        """The same as a dict, a copy."""
        values = {key: getattr(self, key) for key in KEYS}
        return {**values, "settings": dict(self.settings), "techniques": list(self.techniques)}

    @property
    def is_sharded(self) -> bool:
        """Whether a technique for several GPUs is chosen."""
        return any(techniques[one].shards for one in self.techniques)

    @property
    def place(self) -> str:
        """The GPU that is predicted for, with the PyTorch if it is not this one, else the device that is measured."""
        return self.predicted_place if self.device == "card" else self.device

    @property
    def predicted_place(self) -> str:
        """The GPU that predictions are for, with the PyTorch if it is not the one that runs here."""
        return self.card + (f" with PyTorch {self.torch_version}" if self.torch_version else "")

    @property
    def where(self) -> str:
        """Whether a run is measured or predicted, and where."""
        if self.device == "card":
            return f"predicted for {self.predicted_place}"
        return f"{provenance_here([self.device])} on {self.device.upper()}"

    def is_comparable(self, other: LabState) -> bool:
        """Whether their peaks are comparable: the same workload, size and device."""
        return (self.workload, self.size, self.place) == (other.workload, other.size, other.place)


KEYS = tuple(one.name for one in dataclasses.fields(LabState))


class LabChoices:
    """What a Lab can choose from: workloads, sizes, GPUs, techniques."""

    def __init__(self, own: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self.own = dict(own or {})
        self._own_cards: dict[str, Card] = {}
        for name, make in self.own.items():
            if not isinstance(name, str) or not name.strip() or not callable(make):
                raise MemlabError(
                    f"workloads is a dict of names and functions of model, optimizer, batch and loss, got {name!r:.80}."
                )

    @property
    def workloads(self) -> list[str]:
        """The names of all workloads, the user's own first."""
        return list(dict.fromkeys([*self.own, *workloads]))

    @property
    def cards(self) -> list[str]:
        """The names of all GPUs, the user's own first."""
        return list(dict.fromkeys([*self._own_cards, *cards]))

    @property
    def devices(self) -> tuple[str, ...]:
        """What can be chosen on this machine."""
        return DEVICES if cuda.is_possible() else ("cpu", "card")

    def versions(self, chosen: str = "") -> list[tuple[str, str]]:
        """The releases of PyTorch that predictions can be for, and the chosen one, each as a text and its value."""
        here = torch.__version__
        others = [one for one in RELEASES if checked_version(one) != here]
        return [
            (f"{here}, which runs here", ""),
            *((one, one) for one in dict.fromkeys(filter(None, [*others, chosen]))),
        ]

    def first(self) -> LabState:
        """The state that a Lab begins with."""
        names = self.workloads
        if not names:
            raise MemlabError("there is no workload: give the Lab a function of model, optimizer, batch and loss.")
        name = names[0] if self.own or FIRST_WORKLOAD not in names else FIRST_WORKLOAD
        device = "cuda" if "cuda" in self.devices else "cpu"
        return LabState(
            name, self._size(name), device=device, card=FIRST_CARD if FIRST_CARD in cards else self.cards[0]
        )

    def workload(self, name: str) -> Workload | Callable[[], Any]:
        """The workload or user function of this name."""
        return self.own[name] if name in self.own else workloads[name]

    what = workload  # the earlier name

    def idea(self, name: str) -> str:
        """A description of a workload, in one line."""
        what = self.workload(name)
        return what.idea if isinstance(what, Workload) else "your own function"

    def sizes(self, name: str) -> list[str]:
        """The sizes of a workload; none for a user's function."""
        what = self.workload(name)
        return [size for size in SIZES if size in what.sizes] if isinstance(what, Workload) else []

    def settings(self, name: str, size: str) -> dict[str, Any]:
        """The settings of a workload at this size."""
        what = self.workload(name)
        return dict(what.sizes[size]) if isinstance(what, Workload) else {}

    def work(self, state: LabState) -> Work:
        """The work to run."""
        what = self.workload(state.workload)
        if isinstance(what, Workload):
            return work_of(what, state.size, **state.settings)
        return dataclasses.replace(work_of(what), name=state.workload)

    def on(self, state: LabState) -> str | Card:
        """The device to measure on, or the GPU to predict for."""
        return self.card(state.card) if state.device == "card" else state.device

    def card(self, name: str) -> Card:
        """The GPU of this name, or of this size."""
        return self._own_cards[name] if name in self._own_cards else find(name)

    def excluded(self, state: LabState) -> dict[str, str]:
        """Technique -> why it cannot be chosen on this device, or combined with the chosen ones."""
        taken, found = state.techniques, {}
        for name, one in techniques.items():
            only = one.only_predicted if state.device != "card" else ""
            if name not in taken and (why := only or techniques.conflict([*taken, name])):
                found[name] = why
        return found

    def changed(self, state: LabState, wanted: Any, runs: Iterable[str] = ()) -> LabState:
        """The state with these changes; `runs` are the names that can be pinned."""
        if not isinstance(wanted, Mapping):
            raise MemlabError(f"a state is a dict of {', '.join(KEYS)}, got {type(wanted).__name__}.")
        for key in wanted:
            if key not in KEYS:
                raise MemlabError(f"a Lab has no {key!r:.80} to set. It has {', '.join(KEYS)}.")
        wanted = dict(wanted)
        # Another workload or size has its own settings; naming a GPU implies a prediction.
        is_other = wanted.get("workload", state.workload) != state.workload
        if is_other:
            name = _one_of("workload", wanted["workload"], self.workloads)
            wanted.setdefault("size", self._size(name, state.size or FIRST_SIZE))
        if is_other or wanted.get("size", state.size) != state.size:
            wanted.setdefault("settings", {})
        if wanted.get("card"):
            wanted.setdefault("device", "card")
        for key in KEYS:  # in this order: sizes depend on the workload, settings on the size
            if key in wanted:
                change: dict[str, Any] = {key: self._checked(state, key, wanted[key], runs)}
                state = dataclasses.replace(state, **change)
        return state

    def _size(self, workload: str, wanted: str = FIRST_SIZE) -> str:
        sizes = self.sizes(workload)
        return wanted if wanted in sizes else next(iter(sizes), "")

    def _checked(self, state: LabState, key: str, value: Any, runs: Iterable[str]) -> Any:
        """The value of this key, or a MemlabError that names what can be chosen."""
        sizes = self.sizes(state.workload)
        match key:
            case "size" if not sizes and value:
                raise MemlabError(f"{state.workload!r} is your own function and has no sizes, got {value!r:.80}.")
            case "device" if value == "cuda" and "cuda" not in self.devices:
                raise MemlabError('device "cuda": there is no CUDA device here. Choose "cpu", or a GPU to predict for.')
            case "steps" if type(value) is not int or not 1 <= value <= MAX_STEPS:
                raise MemlabError(f"steps is a number from 1 to {MAX_STEPS}, got {value!r:.80}.")
            case "world_size":
                return first_rank(value, None).world_size
            case "torch_version":
                version = checked_version(value or None)
                return "" if version == torch.__version__ else version
            case "force" if type(value) is not bool:
                raise MemlabError(f"force is True or False, got {value!r:.80}.")
            case "workload" | "size" | "device" | "baseline":
                known = {
                    "workload": self.workloads, "size": sizes or [""], "device": DEVICES, "baseline": ["", *runs]
                }  # fmt: skip
                return _one_of(key, value or "" if key == "baseline" else value, known[key])
            case "settings":
                return self._checked_settings(state, value)
            case "card":
                return self._checked_card(value)
            case "techniques":
                return _checked_techniques(value)
        return value

    def _checked_settings(self, state: LabState, settings: Any) -> dict[str, Any]:
        if not isinstance(settings, Mapping):
            raise MemlabError(f"settings is a dict, got {settings!r:.80}.")
        own = self.settings(state.workload, state.size)
        for key, value in settings.items():
            if key not in own:
                known = ", ".join(own) or "none"
                raise MemlabError(f"workload {state.workload!r} has no setting {key!r:.80}. It has {known}.")
            kind: Any = (int, float) if type(own[key]) is float else type(own[key])
            if not isinstance(value, kind) or isinstance(value, bool) != isinstance(own[key], bool):
                wanted = f"one of type {type(own[key]).__name__}, such as {own[key]!r}"
                raise MemlabError(f"setting {key!r}: give {wanted}; got {value!r:.80}.")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and value < min(own[key], 0 if own[key] == 0 else 1e-9):
                raise MemlabError(f"setting {key!r} must be above 0, got {value!r:.80}.")
        return {key: value for key, value in settings.items() if value != own[key]}

    def _checked_card(self, card: Any) -> str:
        if isinstance(card, str) and card in self._own_cards:
            return card
        chosen = card if isinstance(card, Card) else find(card)
        # Also a size such as "8GiB", so that its name can be looked up again.
        if isinstance(card, Card) or chosen.name not in cards:
            self._own_cards[chosen.name] = chosen
        return chosen.name


def _one_of(what: str, value: Any, known: Iterable[str]) -> str:
    known = list(known)
    if value not in known:
        raise MemlabError(f"{what} {value!r:.80}: choose one of {', '.join(repr(one) for one in known)}.")
    return str(value)


def _checked_techniques(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise MemlabError(f"techniques is a list of names, got {names!r:.80}.")
    chosen = tuple(dict.fromkeys(names))
    techniques.ordered(chosen)  # raises for unknown names, and for two that exclude each other
    return chosen
