"""A walk from named roots to everything they keep alive, the nearest first; it remembers from where each object was reached.

Iterative and bounded; while it goes on it keeps what it met alive (or numbers of objects would be used again), and nothing
after its block.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Self

from memlab.names import kinds, memory
from memlab.names.graphs import Nodes
from memlab.names.kinds import ATOM
from memlab.names.memory import BUFFER, GRADIENT, OPTIMIZER, PARAMETER, Books

MAX_OBJECTS = 4_000_000
NOT_FOLLOWED = 0
"""The holder of what is in the books but leads nowhere: the namespaces of modules, where other walks begin."""


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """Where a walk begins: an object and what the notebook calls it; roots of a lower tier go before all others."""

    tier: int
    name: str
    thing: Any


class Walk:
    """`holder[id]` is the id of the object from which another was reached, or -1 - n for root n.

    `keys` has the storages behind each tensor that was reached, `tensor_of` the nearest tensor of each storage, and
    `more` further holders: of tensors, and of everything where `every_way` was asked for.
    """

    def __init__(self, books: Books, nodes: Nodes, every_way: bool = False, no_classes: bool = False) -> None:
        self.books, self.nodes = books, nodes
        self.objects: dict[int, Any] = {}
        self.holder: dict[int, int] = {}
        self.cost: dict[int, int] = {}
        self.roots: list[Root] = []
        self.keys: dict[int, tuple[int, ...]] = {}
        self.tensor_of: dict[int, int] = {}
        self.more: dict[int, list[int]] = {}
        self.is_complete = True
        self._every_way, self._no_classes = every_way, no_classes
        self._kinds: dict[int, kinds.Kind] = {}
        self._classes: list[type] = []  # or the number of one would be used again
        self._near: dict[int, list[Any]] = {}
        self._far: dict[int, list[tuple[Any, int]]] = {}
        self._costs: list[int] = []
        self._sent: set[int] = set()
        self._offered: set[int] = set()
        self._wanted: set[int] = set()
        self._reserved: set[int] = set()
        self._budget_end = math.inf

    # --- what is where ------------------------------------------------------------------------------------------------

    def avoid(self, things: Iterable[Any]) -> None:
        """Do not go into these."""
        for thing in things:
            self.objects[id(thing)] = thing
            self.holder[id(thing)] = NOT_FOLLOWED

    def reserve(self, things: Iterable[Any]) -> None:
        """Go into these from roots alone: many ways lead to them that nobody thinks of."""
        self.avoid(things := list(things))
        self._reserved.update(map(id, things))

    def kind(self, thing: Any) -> kinds.Kind:
        """The Kind of an object."""
        kind = type(thing)
        return self._kinds.get(id(kind)) or self._learn(kind)

    def _learn(self, kind: type) -> kinds.Kind:
        self._classes.append(kind)
        found = self._kinds[id(kind)] = kinds.kind_of(kind, self.nodes)
        return found

    def is_named(self, keys: Iterable[int]) -> bool:
        """Whether all these storages have been reached."""
        return all(key in self.tensor_of for key in keys)

    # --- walking ------------------------------------------------------------------------------------------------------

    def start(self, roots: Iterable[Root], tier_cost: int) -> None:
        """Put these roots where the walk will begin; tiers lie `tier_cost` apart."""
        for root in roots:
            kind = self.kind(root.thing)
            if kind is not ATOM:
                self.roots.append(root)
                # A parameter is called by its module, not by the variable that a loop over parameters left behind.
                cost = root.tier * tier_cost + memory.is_parameter(root.thing)
                self._send(cost, root.thing, -len(self.roots))

    def go(self, wanted: Collection[int], budget_end: float = math.inf, below: float = math.inf) -> None:
        """Walk until all below this cost is visited, the wanted storages are all named, or the time is over."""
        self._budget_end, self._wanted = budget_end, {key for key in wanted if key not in self.tensor_of}
        while self._costs and self._costs[0] < below and (self._wanted or not wanted):
            cost = heapq.heappop(self._costs)
            self._sent.discard(cost)
            if not self._at(cost):
                return

    def _at(self, cost: int) -> bool:
        """Visit all that is as far as this; False where time or room is over."""
        near = self._near.setdefault(cost, [])
        for thing, holder in self._far.pop(cost, ()):
            if id(thing) in self.holder and not (holder < 0 and id(thing) in self._reserved):
                self._again(thing, holder, self.kind(thing))
            else:
                self._reserved.discard(id(thing))
                self.objects[id(thing)], self.holder[id(thing)] = thing, holder
                self._meet_at(cost, thing)
        for count, thing in enumerate(near):  # grows meanwhile
            if not count & 255 and (time.perf_counter() > self._budget_end or len(self.objects) > MAX_OBJECTS):
                self.is_complete = False
                return False
            self._visit(thing, cost)
        del self._near[cost]
        return True

    def _visit(self, holder: Any, cost: int) -> None:
        """Meet what an object holds. The inner loop runs for every reference there is, hence its length."""
        known, met, objects, number = self._kinds, self.holder, self.objects, id(holder)
        own = known.get(id(type(holder))) or self._learn(type(holder))
        if own.is_noted:
            self._note(own.name, holder)
        for step, held in own.held(holder):
            for thing in held:
                kind = known.get(id(type(thing))) or self._learn(type(thing))
                if kind is ATOM:
                    continue
                if id(thing) in met:
                    if kind.is_noted or self._every_way:
                        self._again(thing, number, kind)
                    continue
                way = kind.entry + (0 if kind.is_dict and own.is_instance else step)
                if way > 1:
                    self._send_once(cost + way, thing, number, kind)
                else:
                    met[id(thing)], objects[id(thing)] = number, thing
                    self._meet_at(cost + way, thing)

    def _meet_at(self, cost: int, thing: Any) -> None:
        """Something was met; it is visited in its turn."""
        if self._every_way:
            self.cost[id(thing)] = cost
        near = self._near.get(cost)
        if near is None:
            near = self._near[cost] = []
            self._remember(cost)
        near.append(thing)

    def _send_once(self, cost: int, thing: Any, holder: int, kind: kinds.Kind) -> None:
        """The same as `_send`; a class only once, as every instance leads to it."""
        if kind.name == "class":
            if self._no_classes or id(thing) in self._offered:
                return
            self._offered.add(id(thing))
        self._send(cost, thing, holder)

    def _send(self, cost: int, thing: Any, holder: int) -> None:
        """Something is met later, unless a nearer way to it is found until then."""
        self._far.setdefault(cost, []).append((thing, holder))
        self._remember(cost)

    def _remember(self, cost: int) -> None:
        if cost not in self._sent:
            self._sent.add(cost)
            heapq.heappush(self._costs, cost)

    def _again(self, thing: Any, holder: int, kind: kinds.Kind) -> None:
        """Another way to something that was met before; to a class nobody asks for them, and a view is none to its base."""
        number = id(thing)
        if holder in (self.holder[number], number) or kind.name == "class":
            return
        if kind.name == "tensor" and holder in self.keys and self.keys[holder] == self.books.enter(thing):
            return
        ways = self.more.setdefault(number, [])
        if holder not in ways[-8:]:
            ways.append(holder)

    # --- categories ---------------------------------------------------------------------------------------------------

    def _note(self, name: str, thing: Any) -> None:
        """Enter tensors, and what modules and optimizers say of theirs."""
        if name in ("tensor", "storage"):
            self._enter(thing)
        elif name == "module":
            own = kinds.instance_dict(thing) or {}
            self._claim(own.get("_parameters"), PARAMETER)
            self._claim(own.get("_buffers"), BUFFER)
        else:
            own = kinds.instance_dict(thing) or {}
            self._claim(own.get("state"), OPTIMIZER)
            self._claim(own.get("param_groups"), PARAMETER)

    def _enter(self, tensor: Any) -> None:
        keys = self.keys[id(tensor)] = self.books.enter(tensor)
        for key in keys:
            self.tensor_of.setdefault(key, id(tensor))
            self._wanted.discard(key)
        holder = self.objects.get(self.holder[id(tensor)])
        if holder is not None and self.kind(holder).name == "node":
            self.books.saved(keys)
        else:
            self.books.held(keys)
        grad = memory.gradient(tensor) if self.kind(tensor).name == "tensor" else None
        if grad is not None:
            self.books.enter(grad, GRADIENT)

    def _claim(self, container: Any, category: int) -> None:
        """Enter the tensors in a container of containers, to a depth that optimizers use."""
        waiting = [(container, 0)]
        while waiting:
            thing, depth = waiting.pop()
            if memory.is_tensor(thing):
                self.books.enter(thing, category)
            elif depth < 5 and self.kind(thing).name in ("dict", "container", "instance") and thing is not None:
                waiting += [(value, depth + 1) for value in _inside(thing)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of everything."""
        for table in (self.objects, self.holder, self.cost, self.keys, self.more, self._near, self._far, self._kinds):
            table.clear()
        self.roots.clear()
        self._classes.clear()


def _inside(thing: Any) -> list[Any]:
    """The values of a dict, list or tuple; of anything else nothing."""
    if kinds.is_dict(thing):
        return kinds.values_of(thing)
    if any(base is list for base in kinds.mro_of(type(thing))):
        return list(list.__iter__(thing))
    if any(base is tuple for base in kinds.mro_of(type(thing))):
        return list(tuple.__iter__(thing))
    return []
