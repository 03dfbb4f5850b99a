"""What autograd graphs keep: their nodes, and the tensors those saved; nothing is unpacked and no hook runs.

From PyTorch 2.13 on a node that Python has looked at keeps its Python object, and a long row of such nodes ends the process
when it is freed (see `seams.graph.nodes_stay`). There looking ends, and says so, before rows get that long.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from memlab.names.memory import GRADIENT, Books, gradient, is_tensor
from memlab.seams import graph

MAX_ROW = 10_000
"""A quarter of what the stack of a main thread bears."""
_CUT = f"what lies behind {MAX_ROW:,} nodes of a graph (PyTorch could not free that many in a row after a look at them)"
_HIDDEN = "what the graph keeps of a tensor whose view was changed in place (CopySlices)"


class Account:
    """Whether graphs may be looked at in this process.

    A search that was cut has left one row as long as rows may get; the next would lengthen it from its other end. So none
    looks again before a search has met no graph at all.
    """

    def __init__(self) -> None:
        self.is_closed = self.met_graph = False

    def next_search(self) -> bool:
        """Whether the search that begins now may look."""
        self.is_closed = self.is_closed and self.met_graph
        self.met_graph = False
        return not self.is_closed


account = Account()
"""That of this process."""


class Nodes:
    """Asks nodes what follows them, as long as no row gets too long."""

    def __init__(self, books: Books, max_row: int | None = None) -> None:
        self._books = books
        self._max_row = max_row or (MAX_ROW if graph.nodes_stay else 1 << 60)
        self._above: dict[int, int] = {}  # a forest of nodes that hang together
        self._sizes: dict[int, int] = {}
        self._classes: dict[int, tuple[type, Any]] = {}
        self.is_cut = not account.next_search()
        if self.is_cut:
            books.not_seen(_CUT)

    def getters(self, kind: type) -> Any:
        """How to ask nodes of this class; None where it is no node."""
        known = self._classes.get(id(kind))
        if known is None:
            known = self._classes[id(kind)] = (kind, graph.node_getters(kind))
        return known[1]

    def of(self, tensor: Any) -> Any:
        """The node that made a tensor, None for a leaf."""
        try:
            if graph.is_leaf(tensor):
                return None
            account.met_graph = True
            return None if self.is_cut else graph.grad_fn(tensor)
        except RuntimeError:
            return None

    def saved_by(self, node: Any) -> list[tuple[str, Any]]:
        """What a node saved, as (name, tensor or whatever was packed)."""
        getters = self.getters(type(node))
        if graph.hides_what_it_holds(type(node)):
            self._books.not_seen(_HIDDEN)
        return [] if getters is None else list(graph.saved_by(node, getters[1]))

    def leaf_of(self, node: Any) -> Any:
        """The leaf whose gradient a node accumulates, None for other nodes."""
        getters = self.getters(type(node))
        return None if getters is None or getters[2] is None else getters[2](node)

    def behind(self, node: Any) -> list[Any]:
        """The nodes behind one: nothing where the row has become too long."""
        getters = self.getters(type(node))
        if getters is None or self.is_cut:
            return []
        found = [following for following, _ in getters[0](node) if following is not None]
        for following in found:
            end = self.getters(type(following))
            if end is None or end[2] is None:  # leaves are where rows end
                self._join(id(node), id(following))
        return found

    def _join(self, one: int, other: int) -> None:
        """Take note that two nodes hang together, and of how many do."""
        one, other = self._top(one), self._top(other)
        if one != other:
            self._above[other] = one
            size = self._sizes[one] = self._sizes.get(one, 1) + self._sizes.pop(other, 1)
            if size >= self._max_row and not self.is_cut:
                self.is_cut = account.is_closed = True
                self._books.not_seen(_CUT)

    def _top(self, number: int) -> int:
        while (above := self._above.get(number)) is not None:
            self._above[number] = number = self._above.get(above, above)
            if number == above:
                break
        return number


class Graphs:
    """Enters everything that graphs keep, each node once but for those whose ids are `known`."""

    def __init__(self, books: Books, nodes: Nodes, known: Container[int] = ()) -> None:
        self._books, self._nodes, self._known = books, nodes, known
        self._seen: dict[int, Any] = {}  # nodes, or their ids would be used again

    def enter(self, tensor: Any) -> None:
        """Enter what the graph behind a tensor keeps, and the tensor's gradient."""
        if (grad := gradient(tensor)) is not None:
            self._books.enter(grad, GRADIENT)
        waiting = [self._nodes.of(tensor)]
        while waiting:
            node = waiting.pop()
            if node is not None and id(node) not in self._seen and id(node) not in self._known:
                self._seen[id(node)] = node
                waiting += self._enter_node(node)

    def _enter_node(self, node: Any) -> list[Any]:
        """Enter what one node saved; the nodes behind it, also those of the tensors it saved."""
        found = self._nodes.behind(node)
        for _, content in self._nodes.saved_by(node):
            if is_tensor(content):
                self._books.saved(self._books.enter(content))
                found.append(self._nodes.of(content))
        return found
