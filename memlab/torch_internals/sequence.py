"""The numbers that autograd gives its nodes in the order of their making, thread by thread; seen in 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

from memlab.torch_internals.private_names import private

LEAF = (1 << 64) - 1
"""The number of nodes that gather gradients; they are made once for each leaf."""


next_number: Any = private("torch.autograd._get_sequence_nr")
"""() -> the number that the next node of this thread will get."""


def number_of(node: Any) -> int:
    """The number of a node, of the thread that made it; `_sequence_nr` of its class, LEAF where there is none."""
    try:
        return int(node._sequence_nr())
    except (AttributeError, RuntimeError):
        return LEAF
