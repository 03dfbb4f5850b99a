"""Branches that are merged into one convolution for inference: RepVGG's and ACNet's.

Every branch is a convolution with BatchNorm, or a BatchNorm alone; each is linear, so that their sum is one convolution.
Modules of others are merged where they say how: `switch_to_deploy` (RepVGG, ACNet), `reparameterize` (timm, MobileOne).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings.inference.grad import only_inference
from memlab.savings.outside import on_models
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job, Parts

_OTHERS = ("switch_to_deploy", "reparameterize")


class Branches(nn.Module):
    """Convolutions of several shapes on one input, each with BatchNorm, added up; the largest is `size` x `size`."""

    def __init__(self, width: int, out: int, shapes: Sequence[tuple[int, int]], identity: bool = False) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, out, shape, padding=(shape[0] // 2, shape[1] // 2), bias=False), nn.BatchNorm2d(out)
            )
            for shape in shapes
        )
        if identity and width == out:
            self.branches.append(nn.BatchNorm2d(out))
        self.width, self.out, self.size = width, out, max(max(one) for one in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all branches."""
        total = self.branches[0](x)
        for branch in self.branches[1:]:
            total = total + branch(x)
        return total

    @torch.no_grad()
    def merged(self) -> nn.Conv2d:
        """One convolution that gives the same at inference."""
        first = next(self.parameters())
        made = nn.Conv2d(
            self.width, self.out, self.size, padding=self.size // 2, device=first.device, dtype=first.dtype
        )
        kernels, shifts = zip(*(_folded(branch, self) for branch in self.branches), strict=True)
        made.weight.copy_(sum(kernels))
        assert made.bias is not None
        made.bias.copy_(sum(shifts))
        return made.train(self.training)


class RepVggBlock(Branches):
    """3 x 3, 1 x 1 and, where widths agree, the input itself, each with BatchNorm."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, ((3, 3), (1, 1)), identity=True)


class AcBlock(Branches):
    """3 x 3, 3 x 1 and 1 x 3, each with BatchNorm: the asymmetric block of ACNet."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, ((3, 3), (3, 1), (1, 3)))


def _folded(branch: nn.Module, block: Branches) -> tuple[Tensor, Tensor]:
    """The branch as a kernel of the block's size, and a shift."""
    if isinstance(branch, nn.Sequential):
        convolution, norm = branch
        assert isinstance(convolution, nn.Conv2d)
        kernel: Tensor = convolution.weight
    else:  # the input itself is a 1 x 1 convolution by the unit matrix
        kernel, norm = torch.eye(block.width).reshape(block.width, block.width, 1, 1), branch
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None and norm.running_mean is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    high, wide = ((block.size - side) // 2 for side in kernel.shape[2:])
    padded = functional.pad(kernel.to(scale), (wide, wide, high, high))
    return padded * scale[:, None, None, None], norm.bias - norm.running_mean * scale


def merge(model: nn.Module, kind: type[Branches]) -> nn.Module:
    """The model with each block of that kind as one convolution; modules of others merge themselves."""
    if model.training:
        raise DoesNotApply("the model is in training mode, where each branch has its own BatchNorm statistics.")
    if isinstance(model, kind):
        return model.merged()
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, kind):
                made[child] = made.get(child) or child.merged()
                setattr(parent, name, made[child])
    if not made and not sum([_merged_itself(one) for one in list(model.modules())]):
        raise DoesNotApply(f"the model has no branches to merge: no {kind.__name__}, no module with {_OTHERS[0]}().")
    return model


def _merged_itself(module: nn.Module) -> bool:
    for name in _OTHERS:
        if callable(method := getattr(module, name, None)):
            method()
            return True
    return False


def _network(block: Callable[[int, int], Branches]) -> Parts:
    class Net(nn.Sequential):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    blocks = [nn.Sequential(block(width, 16), nn.ReLU(inplace=True)) for width in (3, 16, 16, 16)]
    return Net(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), None, (torch.randn(8, 3, 48, 48),), None


def rep_vgg() -> Parts:
    """An inference by four blocks of RepVGG under no_grad."""
    return _network(RepVggBlock)


def ac_net() -> Parts:
    """An inference by four blocks of ACNet under no_grad."""
    return _network(AcBlock)


def _technique(name: str, kind: type[Branches], whose: str, shown: Any, share: float, reference: str) -> Technique:
    def apply(job: Job) -> None:
        only_inference(job)
        job.model = merge(job.model, kind)

    def in_place(model: nn.Module) -> None:
        if isinstance(model, kind):
            raise DoesNotApply(f"the model is one {kind.__name__}, which cannot be replaced from outside.")
        merge(model, kind)

    return Technique(
        name=name,
        idea=f"{whose} is trained with branches that a single 3 x 3 convolution replaces exactly at inference.",
        attacks=("temporary", "activation", "parameter"),
        kind="saving",
        stage="model",
        equality=close(1e-4, "the same numbers multiplied and added in another order"),
        price="None at inference: it is faster. The merged model cannot be trained on as before; keep the original.",
        not_when="Training needs the branches; branches with something nonlinear inside cannot be merged.",
        code="for module in model.eval().modules():\n"
        "    if hasattr(module, 'switch_to_deploy'):     # the published code's own name for it\n"
        "        module.switch_to_deploy()",
        references=(reference,),
        shown=Shown(shown, share=share),
        tips=("G4",),
        apply=apply,
        outside=lambda: on_models(in_place),
    )


TECHNIQUES = (
    _technique(
        "repvgg_merge",
        RepVggBlock,
        "RepVGG",
        rep_vgg,
        0.25,
        "Ding et al., RepVGG, 2021, https://arxiv.org/abs/2101.03697",
    ),
    _technique(
        "acnet_merge", AcBlock, "ACNet", ac_net, 0.25, "Ding et al., ACNet, 2019, https://arxiv.org/abs/1908.03930"
    ),
)
