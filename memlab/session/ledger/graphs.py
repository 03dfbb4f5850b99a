"""What graphs keep that were made since the last look: their nodes, each once, and the tensors those saved.

Nodes are known by the numbers that autograd gives them, so that only new ones are walked. From PyTorch 2.13 on a node that
Python has looked at keeps its Python object, and 40,000 of them in a row end the process when they are freed (see
`seams.graph.nodes_stay`): so it is known how deep the row below each node is, and looking ends long before.

Limits: nodes that other threads made may not be found, and what CopySlices hides is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from memlab.names import memory
from memlab.names.graphs import account
from memlab.seams import graph, sequence

BUDGET_S = 0.05
"""How long one walk may take."""
MAX_DEPTH = 10_000
"""A quarter of what the stack of a main thread bears."""
_MAX_KNOWN = 200_000
_TOO_MANY = "what graphs keep: too many nodes for a quick look"
_TOO_DEEP = (
    f"what graphs keep: after {MAX_DEPTH:,} nodes in a row PyTorch could not free more of them that were looked at"
)
_HIDDEN = "what a graph keeps of a tensor whose view was changed in place"


class Graphs:
    """Walks new nodes. `unseen` says in words what the last walk left out, "" if nothing."""

    def __init__(self) -> None:
        self.unseen = ""
        self._number = 0
        self._depth: dict[int, int] = {}
        self._deepest = 0
        self._searches = 0
        self._getters: dict[int, Any] = {}

    def walk(self, tensors: Sequence[Any], enter: Callable[[Any], None]) -> None:
        """Hand `enter` what the new nodes behind these tensors (that are no leaves) have saved."""
        if not tensors:
            self._depth.clear()
            self._deepest = self._searches = 0
        elif graph.nodes_stay and (self._deepest >= MAX_DEPTH or account.is_closed):
            self.unseen = _TOO_DEEP
            return
        elif graph.nodes_stay and len(tensors) > MAX_DEPTH - self._deepest:
            self.unseen = _TOO_MANY  # each of them might be the next in the row
            return
        nodes = [node for tensor in tensors if (node := node_of(tensor)) is not None]
        starts = [sequence.number_of(node) for node in nodes]
        self.unseen, self._getters = "", {}
        following, rest = self._follow(nodes, enter)
        self._take_depths(following, rest)
        self._deepest = max((self._depth.get(number, self._deepest) for number in starts), default=0)
        self._number = sequence.next_number()

    def may_search(self) -> bool:
        """Whether a search for names may look at graphs now: where not all of them was walked, it does so once."""
        if self.unseen not in (_TOO_MANY, _TOO_DEEP) or not graph.nodes_stay:
            return True
        self._searches += 1
        return self._searches == 1

    def _follow(self, nodes: list[Any], enter: Callable[[Any], None]) -> tuple[dict[int, list[int]], list[int]]:
        """The numbers of the new nodes, each with those of the nodes behind it; and those that were not come to."""
        found: dict[int, list[int]] = {}
        most = MAX_DEPTH - self._deepest if graph.nodes_stay else 1 << 60
        until = time.thread_time() + BUDGET_S
        while nodes:
            node = nodes.pop()
            number = sequence.number_of(node)
            if number in found or not self._number <= number < sequence.LEAF:
                continue
            if len(found) >= most or (not len(found) & 63 and time.thread_time() > until):
                self.unseen = _TOO_MANY
                return found, [number, *map(sequence.number_of, nodes)]
            behind = self._behind(node, enter)
            found[number] = [sequence.number_of(other) for other in behind]
            nodes += behind
        return found, []

    def _behind(self, node: Any, enter: Callable[[Any], None]) -> list[Any]:
        """The nodes behind one, also behind the tensors it saved, which are entered."""
        kind = type(node)
        if id(kind) not in self._getters:
            self._getters[id(kind)] = graph.node_getters(kind)
        if graph.hides_what_it_holds(kind):
            self.unseen = self.unseen or _HIDDEN
        if self._getters[id(kind)] is None:
            return []
        following, saving, _ = self._getters[id(kind)]
        found = [other for other, _ in following(node) if other is not None]
        for _, content in graph.saved_by(node, saving):
            if memory.is_tensor(content):
                enter(content)
                found.append(node_of(content))
        return [other for other in found if other is not None]

    def _take_depths(self, following: dict[int, list[int]], rest: list[int]) -> None:
        """How many nodes that were looked at lie in a row below each; of what was not come to it is taken to be the most."""
        depth, deepest = self._depth, self._deepest
        for number in rest:
            depth.setdefault(number, deepest)
        for number in sorted(following):  # a node is made after those behind it
            below = (depth.get(other, deepest) for other in following[number] if other != sequence.LEAF)
            depth[number] = 1 + max(below, default=0)
        if len(depth) > _MAX_KNOWN:
            for number in sorted(depth)[: -_MAX_KNOWN // 2]:
                del depth[number]


def node_of(tensor: Any) -> Any:
    """The node of the graph that made a tensor, None for a leaf."""
    try:
        return graph.grad_fn(tensor)
    except RuntimeError:
        return None
