"""Labels of what FSDP makes and frees inside of a step: gathered parameters, whole gradients, the buffers of collectives.

FSDP1's and FSDP2's own functions report when these exist (`torch_internals.sharded`); the labels are those of `tensor_labels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memlab.probes.marks import marker
from memlab.torch_internals import sharded
from memlab.trace.columns import Category

Pairs = Iterable[tuple[Any, int]]


class ShardedLabels:
    """Listens to FSDP between `start` and `stop`, and notes labels by two functions of `TensorLabels`.

    `label(category, module, name, tensor)` gives the number of a label, `note(source, pairs)` logs tensors with theirs.
    """

    def __init__(self, label: Callable[..., int], note: Callable[[Any, Pairs], None]) -> None:
        self._label, self._note = label, note
        self._wrapped: sharded.Wrapped | None = None

    def start(self) -> None:
        """Listen to what is loaded by now; called again, to what has been loaded since."""
        if self._wrapped is None:
            self._wrapped = sharded.Wrapped(
                lambda name, subject: marker.tell("sharding", "before", name, subject),
                lambda name, subject: marker.tell("sharding", "after", name, subject),
            )
        self._wrapped.install()

    def stop(self) -> None:
        """Stop listening."""
        if self._wrapped is not None:
            self._wrapped.restore()
            self._wrapped = None

    def note(self, when: str, name: str, subject: Any) -> None:
        """FSDP is about to do something with a group of parameters, or has done it."""
        rows = _SOURCES.get((when, name))
        if rows is not None:
            self._note((when, name, id(subject)), self._labelled(rows, subject))

    def _labelled(self, rows: Iterable[Row], subject: Any) -> Iterator[tuple[Any, int]]:
        for parts, category, text in rows:
            for module, name, tensor in parts(subject):
                path = marker.path_of(module)
                yield tensor, self._label(category, path, text.format(path=path, name=name), tensor)


Parts = Callable[[Any], Iterable[tuple[torch.nn.Module, str, Any]]]
Row = tuple[Parts, Category, str]
"""What gives (module, name, tensor) of a group or a handle, and how those are labelled."""


def _of_module(module_of: Callable[[Any], torch.nn.Module], read: Callable[[Any], Iterable[Any]]) -> Parts:
    """Tensors that belong to a module and none of its parameters; None are left out."""
    return lambda subject: [(module_of(subject), "", one) for one in read(subject) if one is not None]


_of_group = functools.partial(_of_module, lambda group: sharded.modules_of(group)[0])
_of_handle = functools.partial(_of_module, sharded.module_of)
_FLAT_GRADIENTS: Row = _of_handle(sharded.flat_gradients), Category.GRADIENT, "grad of {path}._flat_param"
_SOURCES: dict[tuple[str, str], tuple[Row, ...]] = {
    ("after", "FSDPParamGroup.unshard"): (
        (_of_group(lambda group: [sharded.gathered(group)]), Category.TEMPORARY, "all-gather buffer of {path}"),
    ),
    ("after", "FSDPParamGroup.wait_for_unshard"): (
        (sharded.whole_parameters, Category.PARAMETER, "{path}.{name}, gathered"),
    ),
    ("before", "FSDPParamGroup.post_backward"): (
        (sharded.whole_gradients, Category.GRADIENT, "grad of {path}.{name}, before reduce-scatter"),
    ),
    ("after", "FSDPParamGroup.post_backward"): (
        (_of_group(lambda group: [sharded.being_reduced(group)]), Category.GRADIENT, "reduce-scatter buffer of {path}"),
        (
            _of_group(sharded.reduced_gradients),
            Category.GRADIENT,
            "gradient shards of {path}",
        ),  # views of one flat buffer
    ),
    ("after", "FlatParamHandle.unshard"): (
        (_of_handle(sharded.whole_flat_parameter), Category.PARAMETER, "{path}._flat_param, gathered"),
    ),
    ("before", "_reduce_grad"): (_FLAT_GRADIENTS,),
    ("after", "_reduce_grad"): (_FLAT_GRADIENTS,),
}
