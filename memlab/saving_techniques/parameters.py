"""Fewer parameters, or fewer trained ones: only the last layer, low-rank adapters, tied embeddings, no unused layers.

To train only the last layer, the rest needs no gradient (freezing), or does not even record a graph (feature extraction).
The last layer is the last module that has parameters of its own. If the others are only left out of the optimizer, autograd
still saves activations and computes gradients for all of them. BatchNorm still updates its running statistics in a frozen
part, unless that is set to eval().
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.saving_techniques.batches import cut
from memlab.saving_techniques.demos import vocabulary_stack
from memlab.saving_techniques.patching import evaluating, keep_parameters_of, only_plain_step, optimizer_of, rebuild
from memlab.saving_techniques.technique import Demo, described
from memlab.torch_internals.graph import nodes_behind
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import tensors_in

# --- the last layer alone ---


def head_of(model: nn.Module) -> nn.Module:
    """The last module with its own parameters; refused if it is the only one."""
    layers = [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]
    if len(layers) < 2:
        raise DoesNotApply(f"{type(model).__name__} has {len(layers)} layers with parameters: there is none to freeze.")
    return layers[-1]


def _trained_head(job: Job, what: str = "freezing") -> nn.Module:
    optimizer_of(job, what)
    only_plain_step(job)
    head = head_of(job.model)
    if not any(one.requires_grad for one in head.parameters()):
        raise DoesNotApply("the last layer is frozen: with the rest frozen too, nothing would be trained.")
    return head


def _leave_out(job: Job) -> None:
    """Only leave the others out of the optimizer."""
    try:
        keep_parameters_of(_trained_head(job), job.optimizer)
    except DoesNotApply:
        return


def _freeze(job: Job) -> None:
    """Freeze all parameters but the last layer's, and remove them from the optimizer."""
    head = _trained_head(job)
    kept = {id(one) for one in head.parameters()}
    for one in job.model.parameters():
        if id(one) not in kept:
            one.requires_grad_(False)
            one.grad = None
    keep_parameters_of(head, job.optimizer)


def _extract(job: Job) -> None:
    """Record nothing from the start of forward to the last layer."""
    head = _trained_head(job, "feature extraction")
    own, inside = {id(one) for one in head.parameters()}, set(head.modules())
    for name, module in job.model.named_modules():  # where a shared weight is trained too, nothing would be recorded
        if module not in inside and own & {id(one) for one in module.parameters(recurse=False)}:
            raise DoesNotApply(f"the last layer, which is trained, shares its weight with {name}, before it.")
    _freeze(job)
    forward = job.forward

    def record(module: nn.Module, inputs: Any) -> None:
        torch.set_grad_enabled(True)

    def extracted(*inputs: Any) -> Any:
        hook = head.register_forward_pre_hook(record)
        try:
            with torch.no_grad():
                return forward(*inputs)
        finally:
            hook.remove()

    job.forward = extracted


# --- low-rank adapters ---

RANK = 4


class LowRank(nn.Linear):
    """A frozen linear layer plus `up(down(x))`; `up` starts with zeros, so the output is unchanged at first."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Parameter(layer.weight.new_empty(RANK, layer.in_features).normal_(std=layer.in_features**-0.5))
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, RANK))
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output plus that of the bypass."""
        return super().forward(x) + functional.linear(functional.linear(x, self.down), self.up)


def adapt(model: nn.Module) -> list[nn.Parameter]:
    """Freeze the model and give its linear layers adapters; returns the parameters that are trained now."""
    # Subclasses of Linear have their own uses: that of MultiheadAttention is never called.
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and RANK * (child.in_features + child.out_features) < child.weight.numel()
    ]
    if not layers:
        raise DoesNotApply(f"there is no linear layer for which matrices of rank {RANK} are smaller than its weight.")
    model.requires_grad_(False)
    adapted = {child: LowRank(child) for child in dict.fromkeys(child for _, _, child in layers)}
    for parent, name, child in layers:  # a layer that is used in two places has one bypass
        setattr(parent, name, adapted[child])
    return [part for one in adapted.values() for part in (one.down, one.up)]


def _adapt(job: Job) -> None:
    optimizer = optimizer_of(job, "low-rank adapters")
    only_plain_step(job)
    parts = adapt(job.model)
    job.model.zero_grad()
    job.optimizer = rebuild(optimizer, [{**optimizer.param_groups[0], "params": parts}])


# --- one table for both ends ---


def _tie(job: Job) -> None:
    """The first embedding and the last linear layer with weights of the same shape, (vocabulary, width)."""
    heads = [one for one in job.model.modules() if isinstance(one, nn.Linear)][::-1]
    for table in [one for one in job.model.modules() if isinstance(one, nn.Embedding)]:
        for head in heads:
            if head.weight is table.weight:
                raise DoesNotApply("the embedding and the output layer share their weight already.")
            if head.weight.shape == table.weight.shape and head.weight.dtype == table.weight.dtype:
                head.weight = table.weight
                keep_parameters_of(job.model, job.optimizer)
                return
    raise DoesNotApply("there is no embedding with an output layer of the same shape, (vocabulary, width).")


def untied() -> Parts:
    """Two tables, and Adam: eight of them with gradients and states."""
    model, _, batch, loss = vocabulary_stack(4000, 64, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, loss


# --- none unused ---


def unused_in(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, nn.Module]:
    """Path -> outermost module whose parameters are not used in a forward.

    Tried with one example, in evaluation mode: neither called, nor reached by the graph of the output. A layer that is used
    only in training, or only for some inputs, looks unused.
    """
    called: set[int] = set()
    hooks = [one.register_forward_pre_hook(lambda module, _: called.add(id(module))) for one in model.modules()]
    frozen = [one for one in model.parameters() if not one.requires_grad and one.is_floating_point()]
    try:
        for one in frozen:  # else the graph would not reach it
            one.requires_grad_(True)
        with evaluating(model), torch.enable_grad():
            ends = nodes_behind(*tensors_in(model(*(cut(one, 0, 1) for one in inputs))))
            reached = {id(node.variable) for node in ends if hasattr(node, "variable")}
    finally:
        for one in frozen:
            one.requires_grad_(False)
        for hook in hooks:
            hook.remove()
    unused: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        used = any(id(one) in called for one in module.modules()) or any(id(one) in reached for one in parameters)
        if parameters and not used and not any(path.startswith(f"{outer}.") for outer in unused):
            unused[path] = module
    return unused


def _remove_unused(job: Job) -> None:
    only_plain_step(job)
    try:
        unused = unused_in(job.model, job.batch[:-1] if job.trains else job.batch)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DoesNotApply(f"the model could not be tried with one example: {error}") from error
    if not unused:
        raise DoesNotApply("every layer with parameters is used.")
    for path in unused:
        job.model.set_submodule(path, nn.Identity())  # the others keep their places in a list
    keep_parameters_of(job.model, job.optimizer)
    job.notes.append(f"never used, and left out: {', '.join(unused)}")


class Heads(nn.ModuleList):
    """Two deep heads, for two tasks, only one of which is trained."""

    def forward(self, x: Tensor) -> Tensor:
        """The output of the first head."""
        return self[0](x)


def several_heads() -> Parts:
    """One of two heads is never used; the peak is at the start, with both heads initialized."""
    model = Heads(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, (torch.randn(8, 256), torch.randn(8, 256)), nn.MSELoss()


TECHNIQUES = (
    described("freezing", Demo("resnet50"), _freeze, baseline_pattern=_leave_out),
    described("feature_extraction", Demo("resnet50"), _extract, baseline_pattern=_leave_out),
    described("low_rank", Demo("mlp"), _adapt),
    described("unused_layers", Demo(several_heads), _remove_unused),
    described("weight_tying", Demo(untied), _tie),
)
