"""Labels of what FSDP, pipelines and DeepSpeed make and free inside of a step: gathered parameters, flat gradients, buffers.

Their own functions report when these exist (`torch_internals.sharded`); the labels are those of `tensor_labels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memlab.probes.marks import marker
from memlab.torch_internals import sharded
from memlab.trace.columns import Category

Pairs = Iterable[tuple[Any, int]]


class ShardedLabels:
    """Listens to these libraries between `start` and `stop`, and notes labels by two functions of `TensorLabels`.

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
        """One of them is about to do something, as FSDP with a group of parameters, or has done it."""
        source = _SOURCES.get((when, name))
        if source is not None:
            # Of a pipeline (stage, micro-batch) or (schedule, stage, targets, micro-batch).
            who = (id(subject[0]), subject[-1]) if type(subject) is tuple else id(subject)
            self._note((when, name, who), source(self, subject))

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

    def _received(self, subject: tuple[Any, int]) -> Pairs:
        path = marker.path_of(subject[0].submod)
        for tensor in sharded.received_activations(*subject):
            yield tensor, self._label(Category.ACTIVATION, path, f"received by {path}", tensor)

    def _gradients_received(self, subject: tuple[Any, int]) -> Pairs:
        path = marker.path_of(subject[0].submod)
        for tensor in sharded.received_gradients(*subject):
            yield tensor, self._label(Category.GRADIENT, path, f"gradient received by {path}", tensor)

    def _gradients_sent(self, subject: tuple[Any, int]) -> Pairs:
        path = marker.path_of(subject[0].submod)
        for tensor in sharded.gradients_to_send(*subject):
            yield tensor, self._label(Category.GRADIENT, path, f"gradient to send by {path}", tensor)

    def _targets(self, subject: tuple[Any, Any, Any, int]) -> Pairs:
        _, stage, targets, chunk = subject
        if stage.is_last and targets is not None:
            path = marker.path_of(stage.submod)
            yield targets[chunk], self._label(Category.INPUT, path, f"target of {path}", targets[chunk])

    def _losses(self, subject: tuple[Any, Any, Any, int]) -> Pairs:
        schedule, stage, _, _ = subject
        path = marker.path_of(stage.submod)
        for tensor in sharded.losses_of(schedule) if stage.is_last else ():
            yield tensor, self._label(Category.ACTIVATION, path, f"loss of {path}", tensor)

    def _zero(self, optimizer: Any) -> Pairs:
        kinds = ((Category.GRADIENT, sharded.GRADIENTS_OF_ZERO), (Category.PARAMETER, sharded.PARAMETERS_OF_ZERO))
        for category, names in kinds:
            for name, tensor in sharded.flat_buffers(optimizer, names):
                yield tensor, self._label(category, "", f"{name} of {type(optimizer).__name__}", tensor)


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
    ("before", "_PipelineStageBase.forward_one_chunk"): ShardedLabels._received,
    ("before", "_PipelineStageBase.backward_one_chunk"): ShardedLabels._gradients_received,
    ("after", "_PipelineStageBase.backward_one_chunk"): ShardedLabels._gradients_sent,
    ("before", "_PipelineSchedule._maybe_compute_loss"): ShardedLabels._targets,
    ("after", "_PipelineSchedule._maybe_compute_loss"): ShardedLabels._losses,
    ("before", "DeepSpeedZeroOptimizer._release_ipg_buffers"): ShardedLabels._zero,
    ("before", "DeepSpeedZeroOptimizer.step"): ShardedLabels._zero,
    ("before", "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue"): ShardedLabels._zero,
    ("before", "DeepSpeedZeroOptimizer_Stage3.step"): ShardedLabels._zero,
}
