"""From a walk to texts: the path that leads to a storage, and every other path that keeps it alive."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from memlab.names import labels
from memlab.names.starts import OUTPUTS, SHELL, VARIABLES
from memlab.names.walk import Walk

MAX_PATHS = 100
MAX_STEPS = 2_000_000
"""So many steps are gone in the search for every path."""
HEAD, TAIL = 12, 6
"""Of a long path so many steps at its begin and its end are shown."""

CellNumber = Callable[[str], int | None]
"""File name of compiled code -> the number of the notebook's cell it came from."""


@dataclass(frozen=True, slots=True)
class Trail:
    """A path as far as one object: the first steps, how many are left out, the last ones; `role` is how to read on."""

    head: tuple[str, ...]
    hidden: int = 0
    tail: tuple[str, ...] = ()
    role: str = ""

    def then(self, text: str, role: str) -> Trail:
        """One step further; a step without a text is none."""
        if not text:
            return Trail(self.head, self.hidden, self.tail, role)
        if len(self.head) < HEAD:
            return Trail((*self.head, text), 0, (), role)
        tail = (*self.tail, text)
        return Trail(self.head, self.hidden + (len(tail) > TAIL), tail[-TAIL:], role)

    def __str__(self) -> str:
        left_out = f" … {self.hidden:,} more … " if self.hidden else ""
        return "".join((*self.head, left_out, *self.tail))


class Trails:
    """The texts of a finished walk; labels are asked once for each holder."""

    def __init__(self, walk: Walk, cell_number: CellNumber = lambda file: None) -> None:
        self._walk = walk
        self._cell_number = cell_number
        self._labels: dict[tuple[int, str], dict[int, labels.Label]] = {}
        self._trails: dict[int, Trail] = {}
        self._naming: set[int] = set()

    def path(self, number: int) -> str:
        """The nearest path to an object that the walk has met."""
        chain = []
        while number > 0 and number not in self._trails:
            chain.append(number)
            number = self._walk.holder[number]
        trail = self._root(number) if number < 0 else self._trails[number]
        holder = number
        for each in reversed(chain):
            trail = self._trails[each] = self._step(trail, holder, each)
            holder = each
        return finished(str(trail))

    def every_path(self, numbers: Iterable[int]) -> Iterator[str]:
        """Every way to one of these objects, nearer ones first, without circles."""
        seen: set[str] = set()
        for head, rest in self._ways(set(numbers)):
            self.path(head)
            text = self._along(head, rest)
            if text not in seen:
                seen.add(text)
                yield text
            if len(seen) >= MAX_PATHS:
                return

    def _ways(self, targets: set[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(an object, the chain from it to a target): the nearest way leads to the object.

        The first ways are the nearest ones to the targets. Each other one leaves one that was found at some object, to
        which a further holder leads.
        """
        order = itertools.count()
        waiting: list[tuple[int, int, int, tuple[int, ...]]] = []
        for number in targets:
            heapq.heappush(waiting, (self._walk.cost[number], next(order), number, ()))
        room = MAX_STEPS
        while waiting and room > 0:
            _, _, head, rest = heapq.heappop(waiting)
            chain, root = self._up(head, rest, targets)
            room -= len(chain) + len(rest)
            if root < 0:
                yield head, rest
            for place in self._forks(chain, rest, root):
                after = (*reversed(chain[: place + 1]), *rest)
                for holder in self._walk.more[chain[place]]:
                    if holder not in targets and not self._is_roundabout(holder, after):
                        room -= len(after)
                        cost = self._walk.cost.get(holder, 0) + len(after)
                        heapq.heappush(waiting, (cost, next(order), holder, after))

    def _up(self, head: int, rest: tuple[int, ...], targets: set[int]) -> tuple[list[int], int]:
        """The nearest way upwards from an object, and its root (or where it ends: not through the rest, nor a target)."""
        chain: list[int] = []
        closed = targets.union(rest)
        while head > 0 and (head not in closed or not (chain or rest)):
            chain.append(head)
            head = self._walk.holder[head]
        return chain, head

    def _forks(self, chain: list[int], rest: tuple[int, ...], root: int) -> Iterator[int]:
        """Where on a way further holders are worth telling.

        Only one way leads through what is always there, as the shell, its outputs and modules: they have hundreds.
        """
        tier = self._walk.roots[-root - 1].tier if root < 0 else VARIABLES
        is_users = tier < SHELL
        for place, number in enumerate(chain):
            is_first = place == 0 and not rest
            is_outputs = tier == OUTPUTS and place == len(chain) - 1
            if number in self._walk.more and (is_first or (is_users and not is_outputs)):
                yield place

    def _is_roundabout(self, holder: int, after: tuple[int, ...]) -> bool:
        """From a node to a tensor that it saved and on into that one's graph: the node leads there by itself."""
        names = [self._kind_name(number) for number in (holder, *after[:2])]
        if names[:2] == ["tensor", "node"]:
            return self._kind_name(self._walk.holder[holder]) == "node"
        return names == ["node", "tensor", "node"]

    def _along(self, head: int, rest: tuple[int, ...]) -> str:
        """The text of the nearest way to an object and on along a chain."""
        trail = self._root(head) if head < 0 else self._trails[head]
        for holder, held in itertools.pairwise((head, *rest)):
            trail = self._step(trail, holder, held)
        return finished(str(trail))

    def _root(self, number: int) -> Trail:
        return Trail((self._walk.roots[-number - 1].name,))

    def _step(self, trail: Trail, holder: int, held: int) -> Trail:
        """The trail to what a holder holds."""
        thing = self._walk.objects[held]
        name, from_name = self._walk.kind(thing).name, self._kind_name(holder)
        text, role = ("", "") if holder < 0 else self._label(holder, held, trail.role)
        if from_name == "node":
            return self._from_node(trail, holder, thing, (text, role))
        if name == "node":
            role = ONE_NODE
        elif name == "traceback" and from_name != "traceback":
            return self._to_traceback(trail, holder, thing)
        elif name == "frame" and from_name == "traceback":
            text = "" if thing.f_code.co_name == "<module>" else f" -> {thing.f_code.co_name}()"
        return trail.then(text, role)

    def _kind_name(self, number: int) -> str:
        return self._walk.kind(self._walk.objects[number]).name if number > 0 else ""

    def _label(self, holder: int, held: int, role: str) -> labels.Label:
        """How a holder calls what it holds; the keys of a dict that are tensors are called by their own paths."""
        known = self._labels.get((holder, role))
        if known is None:
            thing = self._walk.objects[holder]
            known = self._labels[(holder, role)] = labels.labels(
                thing, role, self._walk.kind(thing).name, self._walk.holder
            )
        text, of = known.get(held) or labels.other(self._walk.objects[held])
        return (_KEY.sub(lambda found: self._key(int(found[1]), found[2]), text) if "\0" in text else text), of

    def _key(self, number: int, kind: str) -> str:
        """A tensor as a key: its path, or its class where it has none, or one that leads here."""
        if number not in self._walk.keys or number in self._naming:
            return f"<{kind}>"
        self._naming.add(number)
        try:
            return self.path(number)
        finally:
            self._naming.discard(number)

    def _from_node(self, trail: Trail, node: int, held: Any, label: labels.Label) -> Trail:
        """Of a graph only the node that keeps the tensor shows."""
        if self._walk.kind(held).name == "node":
            return trail.then("", MORE_NODES)
        name = labels.class_name(type(self._walk.objects[node]))
        between = " -> ..." if trail.role == MORE_NODES else ""
        return trail.then(f"{between} -> {name}{label[0]}", label[1])

    def _to_traceback(self, trail: Trail, holder: int, traceback: Any) -> Trail:
        """A traceback, with the cell it tells of."""
        text = f"traceback of {self._place(traceback)}"
        is_last = holder < 0 and self._walk.roots[-holder - 1].name == "sys.last_traceback"
        return Trail((text,)) if is_last else trail.then(f" -> {text}", "")

    def _place(self, traceback: Any) -> str:
        """The cell in which an error came up, else the file."""
        file, entry = "", traceback
        while entry is not None:
            file = entry.tb_frame.f_code.co_filename
            if (number := self._cell_number(file)) is not None:
                return f"cell {number}"
            entry = entry.tb_next
        return PurePath(file.replace("\\", "/")).name or "unknown code"


ONE_NODE, MORE_NODES = "one node", "more nodes"
_KEY = re.compile("\0([0-9]+) ([^\0]*)\0")


def finished(text: str) -> str:
    """A path in one line of printable characters."""
    clean = text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)
    return clean.strip()
