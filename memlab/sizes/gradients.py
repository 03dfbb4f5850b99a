"""Which tensors get a gradient, and how large: read from the autograd graph that a forward left.

Limits: every output counts as part of the loss. What a function of the user's own computes in its backward is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memlab.sizes.storages import nbytes
from memlab.sizes.watch import Seen

_SPARSE_NODES = ("EmbeddingBackward", "EmbeddingBagBackward")
_RECOMPUTES = "CheckpointFunctionBackward"


@dataclass(slots=True)
class Reached:
    """The leaves of a graph, by identity, with the names of the nodes that send them a gradient."""

    senders: dict[int, set[str]] = field(default_factory=dict)
    recomputes: bool = False


def reached(outputs: Iterable[Tensor]) -> Reached:
    """Walk the graph behind the outputs; no saved tensor is touched."""
    found = Reached()
    nodes: dict[int, Any] = {}  # held, or another node could get the number of one that has gone
    todo: list[Any] = []
    for output in outputs:
        if output.requires_grad and output.grad_fn is None:
            found.senders.setdefault(id(output), set())
        todo.append(output.grad_fn)
    while todo:
        node = todo.pop()
        if node is None or id(node) in nodes:
            continue
        nodes[id(node)] = node
        name = node.name()
        found.recomputes |= _RECOMPUTES in name
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                found.senders.setdefault(id(leaf), set()).add(name)
        todo += [following for following, _ in node.next_functions]
    return found


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one leaf; of a sparse one the rows that this input names."""

    nbytes: int
    rows: int = 0

    @property
    def is_sparse(self) -> bool:
        """Whether only the rows that were looked up are in it."""
        return self.rows > 0


def gradient(leaf: Tensor, of: Tensor, graph: Reached, seen: Seen) -> Gradient | None:
    """The gradient that backward will give to `leaf`, which stands for `of`; None where it gives none."""
    key = leaf.untyped_storage()._cdata if leaf.layout == torch.strided else 0
    senders = graph.senders.get(id(leaf), graph.senders.get(id(of)))  # a forward may reach the real one by other ways
    if not leaf.requires_grad or (senders is None and not (graph.recomputes and key in seen.read)):
        return None
    rows = seen.sparse_rows.get(key, 0)
    if rows and senders and all(name.startswith(_SPARSE_NODES) for name in senders):
        row_bytes = leaf.element_size() * (leaf.numel() // max(leaf.shape[0], 1))
        return Gradient(rows * (torch.int64.itemsize + row_bytes), rows)
    return Gradient(of.numel() * of.element_size() if of.layout == torch.strided else nbytes(of))
