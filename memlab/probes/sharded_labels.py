"""Labels of what FSDP makes and frees inside of a step: gathered parameters, whole gradients, the buffers of collectives.

FSDP1's and FSDP2's own functions report when these exist (`torch_internals.sharded`); the labels are those of `tensor_labels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
        source = _SOURCES.get((when, name))
        if source is not None:
            self._note((when, name, id(subject)), source(self, subject))

    def _gathering(self, group: Any) -> Iterator[tuple[Any, int]]:
        buffer = sharded.gathered(group)
        if buffer is not None:
            path = _path(group)
            yield buffer, self._label(Category.TEMPORARY, path, f"all-gather buffer of {path}", buffer)

    def _gathered(self, group: Any) -> Iterator[tuple[Any, int]]:
        for module, name, tensor in sharded.whole_parameters(group):
            path = marker.path_of(module)
            yield tensor, self._label(Category.PARAMETER, path, f"{path}.{name}, gathered", tensor)

    def _reducing(self, group: Any) -> Iterator[tuple[Any, int]]:
        for module, name, tensor in sharded.whole_gradients(group):
            path = marker.path_of(module)
            yield tensor, self._label(Category.GRADIENT, path, f"grad of {path}.{name}, before reduce-scatter", tensor)

    def _reduced(self, group: Any) -> Iterator[tuple[Any, int]]:
        path, buffer = _path(group), sharded.being_reduced(group)
        if buffer is not None:
            yield buffer, self._label(Category.GRADIENT, path, f"reduce-scatter buffer of {path}", buffer)
        for tensor in sharded.reduced_gradients(group):  # views of one flat buffer
            yield tensor, self._label(Category.GRADIENT, path, f"gradient shards of {path}", tensor)

    def _flat(self, handle: Any) -> Iterator[tuple[Any, int]]:
        path = marker.path_of(sharded.module_of(handle))
        for tensor in sharded.whole_flat_parameter(handle):
            yield tensor, self._label(Category.PARAMETER, path, f"{path}._flat_param, gathered", tensor)

    def _flat_gradients(self, handle: Any) -> Iterator[tuple[Any, int]]:
        path = marker.path_of(sharded.module_of(handle))
        for tensor in sharded.flat_gradients(handle):
            yield tensor, self._label(Category.GRADIENT, path, f"grad of {path}._flat_param", tensor)


def _path(group: Any) -> str:
    """The path of the module that a group of parameters belongs to; of several the first."""
    return marker.path_of(sharded.modules_of(group)[0])


_SOURCES: dict[tuple[str, str], Callable[[ShardedLabels, Any], Pairs]] = {
    ("after", "FSDPParamGroup.unshard"): ShardedLabels._gathering,
    ("after", "FSDPParamGroup.wait_for_unshard"): ShardedLabels._gathered,
    ("before", "FSDPParamGroup.post_backward"): ShardedLabels._reducing,
    ("after", "FSDPParamGroup.post_backward"): ShardedLabels._reduced,
    ("after", "FlatParamHandle.unshard"): ShardedLabels._flat,
    ("before", "_reduce_grad"): ShardedLabels._flat_gradients,
    ("after", "_reduce_grad"): ShardedLabels._flat_gradients,
}
