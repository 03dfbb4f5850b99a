"""Low-rank adapters (LoRA): the weights rest, and beside each linear layer a narrow detour of two small matrices is trained."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import optimizer_of, remade
from memlab.savings.technique import Shown, Technique, changes
from memlab.workloads.job import Job

RANK = 4


class LowRank(nn.Linear):
    """A linear layer that rests, plus `up(down(x))`; as `up` begins with zeros, it begins as the layer was."""

    def __init__(self, layer: nn.Linear, rank: int = RANK) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        weight = layer.weight
        self.down = nn.Parameter(weight.new_empty(rank, layer.in_features).normal_(std=layer.in_features**-0.5))
        self.up = nn.Parameter(weight.new_zeros(layer.out_features, rank))
        self.training = layer.training

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and that of the detour."""
        return super().forward(x) + functional.linear(functional.linear(x, self.down), self.up)


def adapt(model: nn.Module, rank: int = RANK) -> list[nn.Parameter]:
    """Freeze the model and put adapters beside its linear layers; the parameters that are trained now."""
    # Layers of subclasses are used in ways of their own: that of MultiheadAttention is never called.
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and rank * (child.in_features + child.out_features) < child.weight.numel()
    ]
    if not found:
        raise DoesNotApply(f"there is no linear layer for which matrices of rank {rank} are smaller than its weight.")
    model.requires_grad_(False)
    made: dict[int, LowRank] = {}  # a layer that stands in two places has one detour
    for parent, name, child in found:
        if id(child) not in made:
            made[id(child)] = LowRank(child, rank)
        setattr(parent, name, made[id(child)])
    return [part for one in made.values() for part in (one.down, one.up)]


def _apply(job: Job) -> None:
    optimizer = optimizer_of(job, "low-rank adapters")
    if hasattr(job.model, "job_step"):
        raise DoesNotApply(f"{type(job.model).__name__} has a step of its own.")
    parts = adapt(job.model)
    for one in job.model.parameters():
        one.grad = None
    job.optimizer = remade(optimizer, [{**optimizer.param_groups[0], "params": parts}])


_FROZEN = "adapters are what is trained, in every layer; the rest is frozen by them."

TECHNIQUES = (
    Technique(
        name="low_rank",
        idea="Let the weights rest and train two narrow matrices beside each linear layer: gradients and states shrink to theirs.",
        attacks=("gradient", "optimizer"),
        kind="saving",
        stage="model",
        equality=changes("a change of low rank is learnt, by other parameters than before"),
        price="two small products more for each layer; meant for fine-tuning, not for training from nothing",
        slower=True,
        not_when="activations are the peak: they stay, as the way back to the first adapter goes through everything; the model is "
        "not made of linear layers",
        code="""
class LowRank(torch.nn.Module):
    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = torch.nn.Linear(layer.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, layer.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))

block.feed = LowRank(block.feed)          # for each linear layer; the optimizer gets what requires a gradient
""",
        references=(
            "Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, https://arxiv.org/abs/2106.09685",
        ),
        shown=Shown("mlp"),
        excludes={"freezing": _FROZEN, "feature_extraction": _FROZEN},
        apply=_apply,
    ),
)
