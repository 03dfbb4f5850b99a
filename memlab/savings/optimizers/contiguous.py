"""All parameters in one buffer, and all gradients in another: the step is one operation on one long vector.

It was a trick for speed, before foreach and fused did the same. It saves no bytes: the gradients cannot be let go, and where the
formula has intermediates they are as long as the buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import optimizer_of, remade
from memlab.savings.technique import Technique, close
from memlab.workloads.job import Job

_BY_NUMBER = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop),
)
"""The formulas that treat each number alone, so that it does not matter to which parameter it belongs."""


def _apply(job: Job) -> None:
    optimizer = optimizer_of(job, "one buffer for all parameters")
    if type(optimizer) not in _BY_NUMBER:
        raise DoesNotApply(f"{type(optimizer).__name__} looks at each parameter as a whole, not at single numbers.")
    lists = [[one for one in dict.fromkeys(group["params"]) if one.requires_grad] for group in optimizer.param_groups]
    kinds = {(one.dtype, one.device) for params in lists for one in params}
    if len(kinds) != 1:
        raise DoesNotApply(f"the parameters are of {len(kinds)} dtypes or devices; one buffer holds one.")
    buffers = [(flattened(params), params) for params in lists if params]
    groups = [group for group, params in zip(optimizer.param_groups, lists, strict=True) if params]
    job.optimizer = remade(
        optimizer,
        [{**group, "params": [flat]} for group, (flat, _) in zip(groups, buffers, strict=True)],
    )

    def clear() -> None:
        for flat, params in buffers:
            _zero(flat, params)

    job.clear = clear


def flattened(params: list[Tensor]) -> nn.Parameter:
    """One parameter that has the numbers of all; afterwards they are views of it."""
    with torch.no_grad():
        flat = nn.Parameter(torch.cat([one.detach().reshape(-1) for one in params]))
        start = 0
        for one in params:
            one.data = flat.data[start : start + one.numel()].view_as(one)
            start += one.numel()
    return flat


def _zero(flat: nn.Parameter, params: list[Tensor]) -> None:
    """Zero all gradients at once; and make them views of one buffer where they are not."""
    if flat.grad is None:
        flat.grad = torch.zeros_like(flat)
    else:
        flat.grad.zero_()
    start = 0
    for one in params:
        one.grad = flat.grad[start : start + one.numel()].view_as(one)
        start += one.numel()


TECHNIQUES = (
    Technique(
        name="contiguous_parameters",
        idea="Keep all parameters in one buffer and all gradients in another, so that the step is one long operation.",
        attacks=("none",),
        kind="practice",
        stage="optimizer",
        equality=close(
            1e-6,
            "where every parameter gets a gradient: one without is a row of zeros here, which weight decay and momentum still move",
        ),
        price="gradients live from the first step on, through every forward; an intermediate of the formula is as long as all "
        "parameters; while it is set up the parameters are there twice",
        not_when="memory is what is short: it costs some; fused=True is as fast and costs nothing",
        code="""
flat = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
flat.grad = torch.zeros_like(flat)
start = 0
for p in model.parameters():
    p.data = flat.data[start:start + p.numel()].view_as(p)
    p.grad = flat.grad[start:start + p.numel()].view_as(p)
    start += p.numel()
optimizer = torch.optim.AdamW([flat], lr=1e-3)      # and flat.grad.zero_() in the place of zero_grad()
""",
        references=(
            "Jung, contiguous_pytorch_params, 2020, https://github.com/PhilJd/contiguous_pytorch_params",
            "PyTorch documentation, torch.optim, 2026, https://docs.pytorch.org/docs/stable/optim.html",
        ),
        tips=("C14",),
        excludes={
            "set_to_none": "gradients that live in one buffer are zeroed; they cannot be let go.",
            "step_in_backward": "it lets go of each gradient, and one buffer lets go of none.",
            "adafactor": "it needs each matrix whole.",
        },
        apply=_apply,
    ),
)
