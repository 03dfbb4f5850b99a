"""The four rules of ShuffleNetV2 on memory access: at equal FLOPs, fewer bytes to keep and to move.

The widths are such that both designs of a block have equal FLOPs, as in the paper's tables. Limits: a design rule cannot
be applied to an existing network: these replace the demo blocks of this module, and refuse any other model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import Parallel
from memlab.saving_techniques.patching import rebuild
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads.job import Job, Parts


def _point(width: int, out: int, groups: int = 1) -> nn.Module:
    """A 1 x 1 convolution with its ReLU."""
    return nn.Sequential(nn.Conv2d(width, out, 1, groups=groups, bias=False), nn.ReLU())


class Shortcut(nn.Module):
    """A body with a shortcut around it, and a ReLU on their sum."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """The body's output plus the input."""
        return torch.relu(self.body(x) + x)


Design = tuple[int, Callable[[], nn.Module]]
"""The width of a network, and a function that makes one of its blocks."""
DESIGNS: Mapping[str, tuple[Design, Design]] = {  # rule: the usual design, the better one
    "equal_channels": (
        (32, lambda: nn.Sequential(_point(32, 512), _point(512, 32))),
        (128, lambda: nn.Sequential(_point(128, 128), _point(128, 128))),
    ),
    "fewer_groups": ((256, lambda: _point(256, 256, groups=4)), (128, lambda: _point(128, 128))),
    "fewer_branches": ((64, lambda: Parallel(_point(64, 64) for _ in range(4))), (128, lambda: _point(128, 128))),
    "fewer_elementwise": (
        (128, lambda: Shortcut(nn.Sequential(_point(128, 128), _point(128, 128)))),
        (128, lambda: nn.Sequential(*(nn.Conv2d(128, 128, 1, bias=False) for _ in range(2)))),
    ),
}
BLOCKS = 6


class Designed(nn.Sequential):
    """A small classifier of six blocks, which follow or break the rule."""

    def __init__(self, rule: str, better: bool = False) -> None:
        width, block = DESIGNS[rule][better]
        blocks = [block() for _ in range(BLOCKS)]
        super().__init__(nn.Conv2d(3, width, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8))
        self.rule, self.better = rule, better


def against(rule: str) -> Parts:
    """A training step of blocks that break the rule."""
    model = Designed(rule)
    batch = torch.randn(4, 3, 32, 32), torch.randint(8, (4,))
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, nn.functional.cross_entropy


def _redesign(rule: str, job: Job) -> None:
    model = job.model
    if not isinstance(model, Designed) or model.rule != rule:
        raise DoesNotApply(
            f"it is a rule for designing a network: memlab does not redesign a {type(model).__name__:.80}."
        )
    if model.better:
        raise DoesNotApply("the network follows this rule already.")
    with job.device:
        job.model = Designed(rule, better=True).train(model.training)
    if job.optimizer is not None:
        job.optimizer = rebuild(job.optimizer, [{"params": list(job.model.parameters())}])


TECHNIQUES = tuple(
    described(rule, Demo(functools.partial(against, rule)), functools.partial(_redesign, rule)) for rule in DESIGNS
)
