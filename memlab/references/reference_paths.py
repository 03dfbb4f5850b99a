"""The paths of a finished walk as text: the shortest path to a storage, and every other that keeps it alive."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from memlab.references import edges
from memlab.references.roots import OUTPUTS, SHELL, VARIABLES
from memlab.references.walk import Walk
from memlab.torch_internals import cell_code

MAX_PATHS = 100
MAX_STEPS = 2_000_000
"""The limit of steps in a search for every path."""
HEAD, TAIL = 12, 6
"""How many steps at the beginning and the end of a long path are shown."""
ONE_NODE, MORE_NODES = "one node", "more nodes"
_KEY = re.compile("\0([0-9]+) ([^\0]*)\0")


@dataclass(frozen=True, slots=True)
class PathText:
    """The path to one object: its first steps, how many are left out, the last ones; `role` is that of the object."""

    head: tuple[str, ...]
    hidden: int = 0
    tail: tuple[str, ...] = ()
    role: str = ""

    def then(self, text: str, role: str) -> PathText:
        """The path with one more step; a step without text does not show."""
        if not text:
            return PathText(self.head, self.hidden, self.tail, role)
        if len(self.head) < HEAD:
            return PathText((*self.head, text), 0, (), role)
        tail = (*self.tail, text)
        return PathText(self.head, self.hidden + (len(tail) > TAIL), tail[-TAIL:], role)

    def finished(self) -> str:
        """The path in one line of printable characters."""
        left_out = f" … {self.hidden:,} more … " if self.hidden else ""
        text = "".join((*self.head, left_out, *self.tail))
        return (text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)).strip()


class ReferencePaths:
    """The texts of a finished walk; the labels of each holder are made once."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._labels: dict[tuple[int, str], dict[int, edges.Label]] = {}
        self._texts: dict[int, PathText] = {}
        self._naming: set[int] = set()

    def path(self, number: int) -> str:
        """The shortest path to an object that the walk has reached."""
        chain = []
        while number > 0 and number not in self._texts:
            chain.append(number)
            number = self._walk.holder[number]
        trail, holder = self._begin(number), number
        for each in reversed(chain):
            trail = self._texts[each] = self._step(trail, holder, each)
            holder = each
        return trail.finished()

    def every_path(self, numbers: Iterable[int]) -> Iterator[str]:
        """Every path to one of these objects, shorter ones first, without cycles."""
        seen: set[str] = set()
        for head, rest in self._ways(set(numbers)):
            self.path(head)
            trail = self._begin(head)
            for holder, held in itertools.pairwise((head, *rest)):
                trail = self._step(trail, holder, held)
            text = trail.finished()
            if text not in seen:
                seen.add(text)
                yield text
            if len(seen) >= MAX_PATHS:
                return

    def _ways(self, targets: set[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(an object, the chain from it to a target): the path is the shortest one to the object, then the chain.

        The first are the shortest paths to the targets. Every other one branches off a path that was found, at an object
        with another holder.
        """
        walk, order = self._walk, itertools.count()
        waiting: list[tuple[int, int, int, tuple[int, ...]]] = []
        for number in targets:
            heapq.heappush(waiting, (walk.cost[number], next(order), number, ()))
        room = MAX_STEPS
        while waiting and room > 0:
            _, _, head, rest = heapq.heappop(waiting)
            # The shortest path up to a root, unless it passes the rest or a target.
            chain: list[int] = []
            root, closed = head, targets.union(rest)
            while root > 0 and (root not in closed or not (chain or rest)):
                chain.append(root)
                root = walk.holder[root]
            room -= len(chain) + len(rest)
            if root < 0:
                yield head, rest
            for place in self._forks(chain, rest, root):
                after = (*reversed(chain[: place + 1]), *rest)
                for holder in walk.more[chain[place]]:
                    if holder not in targets and not self._is_roundabout(holder, after):
                        room -= len(after)
                        cost = walk.cost.get(holder, 0) + len(after)
                        heapq.heappush(waiting, (cost, next(order), holder, after))

    def _forks(self, chain: list[int], rest: tuple[int, ...], root: int) -> Iterator[int]:
        """The objects on a path whose further holders are followed.

        Through what is always there (the shell, its outputs, modules) one path is enough: there are hundreds.
        """
        tier = self._walk.roots[-root - 1].tier if root < 0 else VARIABLES
        for place, number in enumerate(chain):
            is_first = place == 0 and not rest
            is_outputs = tier == OUTPUTS and place == len(chain) - 1
            if number in self._walk.more and (is_first or (tier < SHELL and not is_outputs)):
                yield place

    def _is_roundabout(self, holder: int, after: tuple[int, ...]) -> bool:
        """From a node to a tensor that it saved and on into that one's graph: the node leads there by itself."""
        names = [self._kind_name(number) for number in (holder, *after[:2])]
        if names[:2] == ["tensor", "node"]:
            return self._kind_name(self._walk.holder[holder]) == "node"
        return names == ["node", "tensor", "node"]

    def _kind_name(self, number: int) -> str:
        return self._walk.kind(self._walk.objects[number]).name if number > 0 else ""

    def _begin(self, number: int) -> PathText:
        """The text of a root, or of an object that has one already."""
        return PathText((self._walk.roots[-number - 1].name,)) if number < 0 else self._texts[number]

    def _step(self, trail: PathText, holder: int, held: int) -> PathText:
        """The path extended by one step. Of a graph only the node that holds the tensor is shown, of a traceback its cell."""
        thing = self._walk.objects[held]
        name, from_name = self._kind_name(held), self._kind_name(holder)
        text, role = ("", "") if holder < 0 else self._label(holder, held, trail.role)
        if from_name == "node":
            if name == "node":
                return trail.then("", MORE_NODES)
            between = " -> ..." if trail.role == MORE_NODES else ""
            text = f"{between} -> {edges.class_name(type(self._walk.objects[holder]))}{text}"
        elif name == "node":
            role = ONE_NODE
        elif name == "traceback" and from_name != "traceback":
            text, role = f"traceback of {_place(thing)}", ""
            if holder < 0 and self._walk.roots[-holder - 1].name == "sys.last_traceback":
                return PathText((text,))
            text = f" -> {text}"
        elif name == "frame" and from_name == "traceback":
            text = "" if thing.f_code.co_name == "<module>" else f" -> {thing.f_code.co_name}()"
        return trail.then(text, role)

    def _label(self, holder: int, held: int, role: str) -> edges.Label:
        """The label of the step; a tensor that is the key of a dict is written as its own path."""
        known = self._labels.get((holder, role))
        if known is None:
            thing = self._walk.objects[holder]
            known = self._labels[(holder, role)] = edges.labels(thing, role, self._walk.kind(thing), self._walk.holder)
        text, of = known.get(held) or edges.other(self._walk.objects[held])
        return (_KEY.sub(self._key, text) if "\0" in text else text), of

    def _key(self, found: re.Match[str]) -> str:
        """A tensor as a key: its path, or its class if it has none or the path leads back here."""
        number = int(found[1])
        if number not in self._walk.keys or number in self._naming:
            return f"<{found[2]}>"
        self._naming.add(number)
        try:
            return self.path(number)
        finally:
            self._naming.discard(number)


def _place(traceback: Any) -> str:
    """The cell in which an error was raised, else the file."""
    file = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if number := cell_code.cell_number(file):
            return f"cell {number}"
        traceback = traceback.tb_next
    return PurePath(file.replace("\\", "/")).name or "unknown code"
