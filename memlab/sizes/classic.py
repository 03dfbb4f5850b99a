"""The classic estimate of intermediate results, and what separates it from what a forward really leaves.

It runs a model's layers one by one, adds up the elements of their outputs (not those of an in-place ReLU), times four bytes,
times two for backward. Here the outputs are those of the layers without layers below them, each the first time it is
called; for a plain Sequential that is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from memlab.sizes.storages import tensors_in
from memlab.sizes.value import Classic, Kept, Term
from memlab.sizes.watch import Made, Watch
from memlab.units import format_bytes

ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Counted:
    """One output that the classic counts, and the storages behind it that the forward made."""

    path: str
    nbytes: int
    made: tuple[Made, ...]


class ClassicCount:
    """Adds up outputs while the layers are called."""

    def __init__(self, watch: Watch) -> None:
        self.counted: list[Counted] = []
        self._watch = watch
        self._done: set[int] = set()

    def after(self, path: str, module: nn.Module, output: object) -> None:
        """One layer has put something out."""
        if not path or any(True for _ in module.children()) or id(module) in self._done:
            return
        self._done.add(id(module))
        if isinstance(module, nn.ReLU) and module.inplace:
            return
        for tensor in tensors_in(output):
            made = tuple(self._watch.made_of(tensor))
            self.counted.append(Counted(path, tensor.numel() * ELEMENT_BYTES, made))


def classic(parameter_count: int, counted: Iterable[Counted], kept: dict[int, Kept]) -> Classic:
    """The estimate, with one term for each reason why it is off; `kept` belongs to the identity of a `Made`."""
    counted = list(counted)
    total = sum(one.nbytes for one in counted)
    lost: list[Counted] = []
    again: list[Counted] = []
    first: list[tuple[Counted, set[int]]] = []
    seen: set[int] = set()
    for one in counted:
        keys = {id(made) for made in one.made if id(made) in kept}
        is_known = keys <= seen if keys else not one.made  # without one of its own it is an input, or a parameter
        if is_known:
            again.append(one)
        elif keys:
            first.append((one, keys - seen))
        else:
            lost.append(one)
        seen |= keys
    wider = sum(sum(kept[key].nbytes for key in keys) - one.nbytes for one, keys in first)
    unseen = [one for key, one in kept.items() if key not in seen]
    terms = [
        Term(-total, "backward was taken to need everything twice; gradients of activations come and go one by one"),
        Term(-sum(one.nbytes for one in lost), _lost(lost)),
        Term(-sum(one.nbytes for one in again), _again(again)),
        Term(wider, "elements are not four bytes wide, or the storage behind an output is larger than the output"),
        Term(sum(one.nbytes for one in unseen), _unseen(unseen)),
    ]
    everything = sum(one.nbytes for one in kept.values())
    return Classic(parameter_count * ELEMENT_BYTES, total, everything, tuple(term for term in terms if term.nbytes))


def _lost(outputs: list[Counted]) -> str:
    if not outputs:
        return ""
    largest = max(outputs, key=lambda one: one.nbytes)
    return f"{_number(len(outputs), 'output')} that nobody keeps, the largest of {largest.path} ({format_bytes(largest.nbytes)})"


def _again(outputs: list[Counted]) -> str:
    if not outputs:
        return ""
    largest = max(outputs, key=lambda one: one.nbytes)
    return f"{_number(len(outputs), 'output')} counted although it shares its memory with one before, the largest of {largest.path}"


def _unseen(tensors: list[Kept]) -> str:
    if not tensors:
        return ""
    largest = max(tensors, key=lambda one: one.nbytes)
    what = f"{largest.operator.removeprefix('aten.').partition('.')[0]} in {largest.layer or 'the model itself'}"
    return (
        f"{_number(len(tensors), 'tensor')} kept that no layer puts out, the largest by {what} "
        f"({largest.dtype} of {'×'.join(map(str, largest.shape)) or 'one number'}, {format_bytes(largest.nbytes)})"
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
