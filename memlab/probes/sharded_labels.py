"""Labels of what FSDP, pipelines and DeepSpeed make and free inside of a step: gathered parameters, flat gradients, buffers.

Their own functions report when these exist (`torch_internals.sharded`); the labels are those of `tensor_labels`.
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
        rows = _SOURCES.get((when, name))
        if rows is not None:
            who = (id(subject[0]), subject[-1]) if type(subject) is tuple else id(subject)
            self._note((when, name, who), self._labeled(rows, subject))

    def _labeled(self, rows: Iterable[Row], subject: Any) -> Iterator[tuple[Any, int]]:
        for parts, category, text in rows:
            for module, name, tensor in parts(subject):
                path = marker.path_of(module) if module is not None else ""
                yield tensor, self._label(category, path, text.format(path=path, name=name), tensor)


Parts = Callable[[Any], Iterable[tuple[torch.nn.Module | None, str, Any]]]
Row = tuple[Parts, Category, str]
"""What gives (module, name, tensor) of a group, a handle, a stage or an optimizer, and how those are labeled."""


def _of_module(module_of: Callable[[Any], torch.nn.Module], read: Callable[[Any], Iterable[Any]]) -> Parts:
    """Tensors that belong to a module and none of its parameters; None are left out."""
    return lambda subject: [(module_of(subject), "", one) for one in read(subject) if one is not None]


_of_group = functools.partial(_of_module, lambda group: sharded.modules_of(group)[0])
_of_handle = functools.partial(_of_module, sharded.module_of)
_of_stage = functools.partial(_of_module, lambda subject: subject[0].submod)
_of_schedule = functools.partial(_of_module, lambda subject: subject[1].submod)


def _target(subject: tuple[Any, Any, Any, int]) -> list[Any]:
    _, stage, targets, chunk = subject
    return [targets[chunk]] if stage.is_last and targets is not None else []


def _losses(subject: tuple[Any, Any, Any, int]) -> Iterable[Any]:
    schedule, stage, _, _ = subject
    return sharded.losses_of(schedule) if stage.is_last else ()


def _of_zero(names: Iterable[str]) -> Parts:
    """The flat buffers of an optimizer of DeepSpeed, which belong to no module."""
    return lambda optimizer: [
        (None, f"{name} of {type(optimizer).__name__}", one) for name, one in sharded.flat_buffers(optimizer, names)
    ]


_FLAT_GRADIENTS: Row = _of_handle(sharded.flat_gradients), Category.GRADIENT, "grad of {path}._flat_param"
_ZERO: tuple[Row, ...] = (
    (_of_zero(sharded.GRADIENTS_OF_ZERO), Category.GRADIENT, "{name}"),
    (_of_zero(sharded.PARAMETERS_OF_ZERO), Category.PARAMETER, "{name}"),
)
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
        # Views of one flat buffer.
        (_of_group(sharded.reduced_gradients), Category.GRADIENT, "gradient shards of {path}"),
    ),
    ("after", "FlatParamHandle.unshard"): (
        (_of_handle(sharded.whole_flat_parameter), Category.PARAMETER, "{path}._flat_param, gathered"),
    ),
    ("before", "_reduce_grad"): (_FLAT_GRADIENTS,),
    ("after", "_reduce_grad"): (_FLAT_GRADIENTS,),
    # Of a pipeline the subject is (stage, micro-batch), or (schedule, stage, targets, micro-batch).
    ("before", "_PipelineStageBase.forward_one_chunk"): (
        (_of_stage(lambda subject: sharded.received_activations(*subject)), Category.ACTIVATION, "received by {path}"),
    ),
    ("before", "_PipelineStageBase.backward_one_chunk"): (
        (
            _of_stage(lambda subject: sharded.received_gradients(*subject)),
            Category.GRADIENT,
            "gradient received by {path}",
        ),
    ),
    ("after", "_PipelineStageBase.backward_one_chunk"): (
        (
            _of_stage(lambda subject: sharded.gradients_to_send(*subject)),
            Category.GRADIENT,
            "gradient to send by {path}",
        ),
    ),
    ("before", "_PipelineSchedule._maybe_compute_loss"): ((_of_schedule(_target), Category.INPUT, "target of {path}"),),
    ("after", "_PipelineSchedule._maybe_compute_loss"): (
        (_of_schedule(_losses), Category.ACTIVATION, "loss of {path}"),
    ),
    ("before", "DeepSpeedZeroOptimizer._release_ipg_buffers"): _ZERO,
    ("before", "DeepSpeedZeroOptimizer.step"): _ZERO,
    ("before", "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue"): _ZERO,
    ("before", "DeepSpeedZeroOptimizer_Stage3.step"): _ZERO,
}
