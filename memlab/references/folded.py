"""Folds similar storages into one row: `losses[…]` for the entries of a list, `net.*.weight` for the layers of a model.

It works on the text of paths. Outputs (`Out[7]`) are not folded, since each belongs to a cell. Layers are folded if their
tensors have one shape, and so are tensors of one path, as those that a graph keeps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memlab.references.live_storages import Storage

FEW = 3
"""Up to this many entries of a list are shown one by one."""
ANY = "[…]"
_ENTRY = re.compile(r"\[\d+\]")
_LAYER = re.compile(r"(?<=\.)\d+(?=[.\]]|$)")
_OUTPUT = re.compile(r"(?:Out|_oh)\[")


@dataclass(frozen=True, slots=True)
class Fold:
    """Storages under one path, in which `[…]` and `*` replace the indices; the largest first."""

    path: str
    storages: tuple[Storage, ...]

    @property
    def nbytes(self) -> int:
        """The sum of their bytes."""
        return sum(one.nbytes for one in self.storages)

    def common(self, name: str) -> object:
        """The common value of a field, "various" if it differs."""
        first = getattr(self.storages[0], name)
        return first if all(getattr(one, name) == first for one in self.storages) else "various"


def folded(storages: Iterable[Storage]) -> list[Fold]:
    """Rows for these storages, the largest first."""
    groups: dict[tuple[object, ...], list[Storage]] = {}
    for one in storages:
        pattern = pattern_of(one.path)
        shape = len(one.shape or ()) if ANY in pattern else one.shape
        groups.setdefault((pattern, one.category, one.dtype, one.device, shape), []).append(one)
    rows = []
    for group in groups.values():
        few = len(group) <= FEW
        rows += [Fold(one.path, (one,)) for one in group] if few else [Fold(pattern_of(group[0].path), tuple(group))]
    return sorted(rows, key=lambda row: -row.nbytes)


def pattern_of(path: str) -> str:
    """A path without the indices of list entries and layers; of what the graphs of a list keep, only whose graphs they are.

    >>> pattern_of("losses[17]"), pattern_of("log['x'][2].grad_fn -> MulBackward0 -> saved self"), pattern_of("Out[3]")
    ('losses[…]', "log['x'][…].grad_fn -> ...", 'Out[3]')
    >>> pattern_of("opt.state[net.3.fc.weight]['exp_avg']")
    "opt.state[net.*.fc.weight]['exp_avg']"
    """
    own, graph, _ = path.partition(".grad_fn -> ")
    pattern = _LAYER.sub("*", own if _OUTPUT.match(own) else _ENTRY.sub(ANY, own))
    if graph and ANY in pattern:
        return f"{pattern}.grad_fn -> ..."
    return pattern + path[len(own) :]
