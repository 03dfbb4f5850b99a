"""A shortest-path search from named roots to everything they keep alive; it records from where each object was reached.

Iterative and bounded. While it lasts it keeps what it reached alive (else an id could be reused), and nothing afterwards.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from memlab.references import edges, memory
from memlab.references.edges import ATOM
from memlab.references.graphs import Nodes
from memlab.references.memory import BUFFER, GRADIENT, OPTIMIZER, PARAMETER, StorageTable, derives

MAX_OBJECTS = 4_000_000
NOT_FOLLOWED = 0
"""The holder of objects that are not followed: the namespaces of modules, which are roots of their own."""
_CLAIMS = {
    "module": (("_parameters", PARAMETER), ("_buffers", BUFFER)),
    "optimizer": (("state", OPTIMIZER), ("param_groups", PARAMETER)),
}
"""Name of an `EdgeKind` -> the attributes whose tensors are of a category."""
_ITERATE: tuple[tuple[type, Any], ...] = ((dict, edges.values_of), (list, list.__iter__), (tuple, tuple.__iter__))


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """Where the search begins: an object and its name in the notebook; lower tiers come first."""

    tier: int
    name: str
    thing: Any


class Walk:
    """`holder[id]` is the id of the object from which another was reached, or -1 - n for root n.

    `keys` has the storages of each tensor that was reached, `tensor_of` the nearest tensor of each storage, and `more`
    further holders: of tensors, and with `every_way` of every object.
    """

    def __init__(self, table: StorageTable, nodes: Nodes, every_way: bool = False, no_classes: bool = False) -> None:
        self.table, self.nodes = table, nodes
        self.objects: dict[int, Any] = {}
        self.holder: dict[int, int] = {}
        self.cost: dict[int, int] = {}
        self.roots: list[Root] = []
        self.keys: dict[int, tuple[int, ...]] = {}
        self.tensor_of: dict[int, int] = {}
        self.more: dict[int, list[int]] = {}
        self.is_complete = True
        self._every_way, self._no_classes = every_way, no_classes
        self._kinds: dict[int, edges.EdgeKind] = {}
        self._classes: list[type] = []  # kept, else an id could be reused
        self._near: dict[int, list[Any]] = {}
        self._far: dict[int, list[tuple[Any, int]]] = {}
        self._costs: list[int] = []
        self._sent: set[int] = set()
        self._offered: set[int] = set()
        self._wanted: set[int] = set()
        self._reserved: set[int] = set()

    # --- options ------------

    def avoid(self, things: Iterable[Any]) -> None:
        """Do not follow these."""
        for thing in things:
            self.objects[id(thing)] = thing
            self.holder[id(thing)] = NOT_FOLLOWED

    def reserve(self, things: list[Any]) -> None:
        """Follow these from roots only: many paths lead to them that users would never write."""
        self.avoid(things)
        self._reserved.update(map(id, things))

    def kind(self, thing: Any) -> edges.EdgeKind:
        """How an object is followed."""
        kind = type(thing)
        return self._kinds.get(id(kind)) or self._learn(kind)

    def _learn(self, kind: type) -> edges.EdgeKind:
        self._classes.append(kind)
        found = self._kinds[id(kind)] = edges.kind_of(kind, self.nodes)
        return found

    def is_named(self, keys: Iterable[int]) -> bool:
        """Whether a tensor of each of these storages was reached."""
        return all(key in self.tensor_of for key in keys)

    # --- walking ---

    def start(self, roots: Iterable[Root], tier_cost: int) -> None:
        """Add roots; tiers are `tier_cost` apart."""
        for root in roots:
            if self.kind(root.thing) is not ATOM:
                self.roots.append(root)
                # Prefer a parameter's name in its module to the variable of a loop over parameters.
                cost = root.tier * tier_cost + derives(type(root.thing), torch.nn.Parameter)
                self._send(cost, root.thing, -len(self.roots))

    def go(self, wanted: Collection[int], budget_end: float = math.inf, below: float = math.inf) -> None:
        """Search until everything below this cost is visited, all wanted storages are reached, or time is up."""
        self._wanted = {key for key in wanted if key not in self.tensor_of}
        while self._costs and self._costs[0] < below and (self._wanted or not wanted):
            cost = heapq.heappop(self._costs)
            self._sent.discard(cost)
            near = self._near.setdefault(cost, [])
            for thing, holder in self._far.pop(cost, ()):
                if id(thing) in self.holder and not (holder < 0 and id(thing) in self._reserved):
                    self._again(thing, holder, self.kind(thing))
                else:
                    self._reserved.discard(id(thing))
                    self.objects[id(thing)], self.holder[id(thing)] = thing, holder
                    self._meet_at(cost, thing)
            for count, thing in enumerate(near):  # grows meanwhile
                if not count & 255 and (time.perf_counter() > budget_end or len(self.objects) > MAX_OBJECTS):
                    self.is_complete = False
                    return
                self._visit(thing, cost)
            del self._near[cost]

    def _visit(self, holder: Any, cost: int) -> None:
        """Reach what an object references. The inner loop runs for every reference there is, hence its length."""
        known, met, objects, near, number = self._kinds, self.holder, self.objects, self._near, id(holder)
        own = known.get(id(type(holder))) or self._learn(type(holder))
        if own.is_noted:
            self._note(own.name, holder)
        for step, held in own.held(holder):
            for thing in held:
                kind = known.get(id(type(thing))) or self._learn(type(thing))
                if kind is ATOM:
                    continue
                key = id(thing)
                if key in met:
                    if kind.is_noted or self._every_way:
                        self._again(thing, number, kind)
                    continue
                way = cost + kind.entry + (0 if kind.is_dict and own.is_instance else step)
                if way <= cost + 1:
                    met[key], objects[key] = number, thing
                    if way in near and not self._every_way:
                        near[way].append(thing)
                    else:
                        self._meet_at(way, thing)
                elif kind.name != "class":
                    self._send(way, thing, number)
                elif not self._no_classes and key not in self._offered:  # only once, as every instance leads to it
                    self._offered.add(key)
                    self._send(way, thing, number)

    def _meet_at(self, cost: int, thing: Any) -> None:
        """Queue a reached object for its visit."""
        if self._every_way:
            self.cost[id(thing)] = cost
        near = self._near.get(cost)
        if near is None:
            near = self._near[cost] = []
            self._remember(cost)
        near.append(thing)

    def _send(self, cost: int, thing: Any, holder: int) -> None:
        """Reach an object later, unless a shorter path to it is found until then."""
        self._far.setdefault(cost, []).append((thing, holder))
        self._remember(cost)

    def _remember(self, cost: int) -> None:
        if cost not in self._sent:
            self._sent.add(cost)
            heapq.heappush(self._costs, cost)

    def _again(self, thing: Any, holder: int, kind: edges.EdgeKind) -> None:
        """Record another holder of a known object; not for classes, nor a view as the holder of its base."""
        number = id(thing)
        if holder in (self.holder[number], number) or kind.name == "class":
            return
        if kind.name == "tensor" and holder in self.keys and self.keys[holder] == self.table.enter(thing):
            return
        ways = self.more.setdefault(number, [])
        if holder not in ways[-8:]:
            ways.append(holder)

    # --- categories ---

    def _note(self, name: str, thing: Any) -> None:
        """Add a tensor, or the categories that a module or an optimizer gives its tensors."""
        if name in _CLAIMS:
            own = edges.instance_dict(thing) or {}
            for attribute, category in _CLAIMS[name]:
                self._claim(own.get(attribute), category)
            return
        keys = self.keys[id(thing)] = self.table.enter(thing)
        for key in keys:
            self.tensor_of.setdefault(key, id(thing))
            self._wanted.discard(key)
        holder = self.objects.get(self.holder[id(thing)])
        is_saved = holder is not None and self.kind(holder).name == "node"
        (self.table.saved if is_saved else self.table.held)(keys)
        grad = memory.gradient(thing) if name == "tensor" else None
        if grad is not None:
            self.table.enter(grad, GRADIENT)

    def _claim(self, container: Any, category: int) -> None:
        """Add the tensors in nested containers, as deep as optimizers nest their state."""
        waiting = [(container, 0)]
        while waiting:
            thing, depth = waiting.pop()
            kind = type(thing)
            if memory.is_tensor(thing):
                self.table.enter(thing, category)
            elif depth < 5:
                iterate = next((each for base, each in _ITERATE if derives(kind, base)), lambda thing: ())
                inside = list(iterate(thing))
                waiting += [(value, depth + 1) for value in inside]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Drop every reference."""
        for table in (self.objects, self.holder, self.cost, self.keys, self.more, self._near, self._far, self._kinds):
            table.clear()
        self.roots.clear()
        self._classes.clear()
