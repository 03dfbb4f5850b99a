"""The four rules of ShuffleNetV2 on memory access: at equal products, fewer bytes to keep and to move.

The widths are such that both drawings of a block have the same number of multiplications, as in the paper's tables. Limits: no
rule of design can be applied to a finished network: these redraw blocks made here to show them, and say so for any other model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.technique import Shown, Technique, changes
from memlab.workloads.job import Job, Parts

_PAPER = "Ma et al., ShuffleNet V2, 2018, https://arxiv.org/abs/1807.11164"


def _point(width: int, out: int, groups: int = 1) -> nn.Module:
    """A 1 x 1 convolution with its ReLU."""
    return nn.Sequential(nn.Conv2d(width, out, 1, groups=groups, bias=False), nn.ReLU())


class Parallel(nn.Module):
    """Branches on one input, added up."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the branches."""
        total = self.branches[0](x)
        for branch in self.branches[1:]:
            total = total + branch(x)
        return total


class Shortcut(nn.Module):
    """A body beside the input itself, and a ReLU on their sum."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """The body's output and the input."""
        return torch.relu(self.body(x) + x)


Draw = Callable[[], nn.Module]
DRAWINGS: Mapping[str, tuple[int, Draw, int, Draw]] = {
    # rule: (width of the usual block, the block, width of the better one, the block)
    "equal_channels": (
        *(32, lambda: nn.Sequential(_point(32, 512), _point(512, 32))),
        *(128, lambda: nn.Sequential(_point(128, 128), _point(128, 128))),
    ),
    "fewer_groups": (256, lambda: _point(256, 256, groups=4), 128, lambda: _point(128, 128)),
    "fewer_branches": (64, lambda: Parallel([_point(64, 64) for _ in range(4)]), 128, lambda: _point(128, 128)),
    "fewer_elementwise": (
        *(128, lambda: Shortcut(nn.Sequential(_point(128, 128), _point(128, 128)))),
        *(128, lambda: nn.Sequential(*(nn.Conv2d(128, 128, 1, bias=False) for _ in range(2)))),
    ),
}
BLOCKS = 6


class Drawn(nn.Sequential):
    """A small classifier of six blocks, drawn as the rule says or as it warns of."""

    def __init__(self, rule: str, better: bool = False) -> None:
        width, draw = DRAWINGS[rule][2:] if better else DRAWINGS[rule][:2]
        blocks = [draw() for _ in range(BLOCKS)]
        super().__init__(nn.Conv2d(3, width, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8))
        self.rule, self.better = rule, better


def drawn(rule: str) -> Parts:
    """A training step of blocks that break the rule."""
    model = Drawn(rule)
    batch = torch.randn(4, 3, 32, 32), torch.randint(8, (4,))
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, nn.functional.cross_entropy


def _redraw(job: Job, rule: str) -> None:
    if not isinstance(job.model, Drawn) or job.model.rule != rule:
        raise DoesNotApply(f"it is a rule for who draws a network: memlab does not redraw the {_named(job.model)}.")
    if job.model.better:
        raise DoesNotApply("the network is drawn by this rule already.")
    with job.device:
        job.model = Drawn(rule, better=True).train(job.model.training)
    if job.trains:
        job.new_optimizer()


def _named(model: nn.Module) -> str:
    return f"model {type(model).__name__!r:.80}"


def _rule(name: str, idea: str, price: str, not_when: str, code: str) -> Technique:
    return Technique(
        name=name,
        idea=idea,
        attacks=("activation", "temporary"),
        kind="saving",
        stage="model",
        equality=changes("it is another network of the same cost"),
        price=price,
        not_when=not_when,
        code=code,
        references=(_PAPER,),
        shown=Shown(functools.partial(drawn, name)),
        tips=("G1",),
        excludes={other: "each redraws the whole network" for other in DRAWINGS if other != name},
        apply=functools.partial(_redraw, rule=name),
    )


TECHNIQUES = (
    _rule(
        "equal_channels",
        "Rule 1: a 1 x 1 convolution with as many channels in as out moves the fewest bytes for its products.",
        "It must be drawn before training; accuracy is another network's.",
        "Weights are what is large; expansion (as in MobileNetV2) buys accuracy you want.",
        "block = torch.nn.Sequential(torch.nn.Conv2d(128, 128, 1), torch.nn.Conv2d(128, 128, 1))\n"
        "# of the same products, with more than twice the bytes: Conv2d(32, 512, 1), Conv2d(512, 32, 1)",
    ),
    _rule(
        "fewer_groups",
        "Rule 2: groups make products cheap, so that channels are added, and bytes grow with the channels.",
        "Fewer channels for the same products.",
        "Groups are used to make the network smaller and channels are not added.",
        "layer = torch.nn.Conv2d(128, 128, 1)\n# of the same products, with twice the bytes: Conv2d(256, 256, 1, groups=4)",
    ),
    _rule(
        "fewer_branches",
        "Rule 3: one wide convolution keeps and moves less than several narrow ones of the same products.",
        "Branches of several shapes see more than one wide one; see repvgg_merge for branches in training alone.",
        "Branches are linear: then they can be merged for inference anyway.",
        "layer = torch.nn.Conv2d(128, 128, 1)\n# of the same products: four branches Conv2d(64, 64, 1) with ReLU, added up",
    ),
    _rule(
        "fewer_elementwise",
        "Rule 4: ReLU and additions cost hardly a product, and move and keep as many bytes as a convolution does.",
        "What they are there for: depth needs nonlinearities and short cuts.",
        "A ReLU right before a convolution keeps nothing of its own, as both keep one tensor; that before an addition does.",
        "x = conv2(conv1(x))      # in place of relu(relu(conv2(relu(conv1(x)))) + x); torch.compile fuses what must stay",
    ),
)
