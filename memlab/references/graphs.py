"""What autograd graphs keep alive: nodes and the tensors they saved; nothing is unpacked and no hook runs.

From PyTorch 2.13 on a node that Python has seen keeps its Python object, and freeing a long chain of such nodes overflows
the stack (see `torch_internals.graph.nodes_stay`). There the search stops, and says so, before chains get that long.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from memlab.references.memory import GRADIENT, StorageTable, gradient, is_tensor
from memlab.torch_internals import graph

MAX_ROW = 10_000
"""A quarter of what the main thread's stack can free."""
_CUT = f"what lies behind {MAX_ROW:,} nodes of a graph (PyTorch could not free that many in a row after a look at them)"
_HIDDEN = "what the graph keeps of a tensor whose view was changed in place (CopySlices)"


class LookLimit:
    """Whether graphs may be searched in this process.

    A search that was cut off has left one chain of the maximal length, which the next would lengthen from its other end. So
    graphs stay closed until a search has met none.
    """

    def __init__(self) -> None:
        self.is_closed = self.met_graph = False

    def next_search(self) -> bool:
        """Whether a new search may enter graphs."""
        self.is_closed = self.is_closed and self.met_graph
        self.met_graph = False
        return not self.is_closed


look_limit = LookLimit()
"""The instance of this process."""


class Nodes:
    """Reads nodes and what follows them, as long as no chain gets too long."""

    def __init__(self, table: StorageTable) -> None:
        self._table = table
        self._max_row = MAX_ROW if graph.nodes_stay else 1 << 60
        self._above: dict[int, int] = {}  # union-find of connected nodes
        self._sizes: dict[int, int] = {}
        self._classes: dict[int, tuple[type, Any]] = {}
        self.is_cut = not look_limit.next_search()
        if self.is_cut:
            table.not_seen(_CUT)

    def getters(self, kind: type) -> Any:
        """The getters of a class of nodes; None for any other class."""
        known = self._classes.get(id(kind))
        if known is None:
            known = self._classes[id(kind)] = (kind, graph.node_getters(kind))
        return known[1]

    def of(self, tensor: Any) -> Any:
        """The node that made a tensor, None for a leaf."""
        try:
            if graph.is_leaf(tensor):
                return None
            look_limit.met_graph = True
            return None if self.is_cut else graph.grad_fn(tensor)
        except RuntimeError:
            return None

    def saved_by(self, node: Any) -> list[tuple[str, Any]]:
        """What a node saved, as (name, tensor or what a pack hook returned)."""
        getters = self.getters(type(node))
        if graph.hides_what_it_holds(type(node)):
            self._table.not_seen(_HIDDEN)
        return [] if getters is None else list(graph.saved_by(node, getters[1]))

    def leaf_of(self, node: Any) -> Any:
        """The leaf whose gradient a node accumulates, None for other nodes."""
        leaf = (self.getters(type(node)) or (None,) * 3)[2]
        return None if leaf is None else leaf(node)

    def behind(self, node: Any) -> list[Any]:
        """The next nodes; none once a chain has become too long."""
        getters = self.getters(type(node))
        if getters is None or self.is_cut:
            return []
        found = graph.following(node, getters[0])
        for following in found:
            end = self.getters(type(following))
            if end is None or end[2] is None:  # leaves are where rows end
                self._join(id(node), id(following))
        return found

    def _join(self, one: int, other: int) -> None:
        """Connect two nodes and count those connected."""
        one, other = self._top(one), self._top(other)
        if one != other:
            self._above[other] = one
            size = self._sizes[one] = self._sizes.get(one, 1) + self._sizes.pop(other, 1)
            if size >= self._max_row and not self.is_cut:
                self.is_cut = look_limit.is_closed = True
                self._table.not_seen(_CUT)

    def _top(self, number: int) -> int:
        while (above := self._above.get(number)) is not None:
            self._above[number] = number = self._above.get(above, above)
            if number == above:
                break
        return number


def enter_graphs(table: StorageTable, nodes: Nodes, tensors: Iterable[Any], known: Container[int] = ()) -> None:
    """Add the gradients of tensors and what their graphs hold, without the nodes whose ids are `known`."""
    seen: dict[int, Any] = {}  # keeps the nodes, else an id could be reused
    for tensor in tensors:
        if (grad := gradient(tensor)) is not None:
            table.enter(grad, GRADIENT)
        waiting = [nodes.of(tensor)]
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in seen or id(node) in known:
                continue
            seen[id(node)] = node
            waiting += nodes.behind(node)
            for _, content in nodes.saved_by(node):
                if is_tensor(content):
                    table.saved(table.enter(content))
                    waiting.append(nodes.of(content))
