"""Inference without a graph, and with a simpler network: no_grad, what is mistaken for it, merged layers.

Under no_grad a list of features holds just the features; otherwise each also holds everything that autograd saved on the way
to it. BatchNorm is folded into the convolution before it, and branches of
RepVGG and ACNet, each linear, become one convolution. Modules of other libraries are merged if they provide it:
`switch_to_deploy` (RepVGG, ACNet), `reparameterize` (timm, MobileOne).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_conv_bn_weights

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import Parallel, Serving, conv_stack, linear_stack, relu
from memlab.saving_techniques.patching import only_inference, refusing_backward, to_model
from memlab.saving_techniques.technique import Demo, described
from memlab.workloads import workloads
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import mapped
from memlab.workloads.workload import inference

# --- without a graph ---


plain_inference = functools.partial(conv_stack, 6, 16, nn.BatchNorm2d, relu, training=False)
"""Six convolutions with BatchNorm, written without thinking of gradients."""
layers_that_train = functools.partial(linear_stack, 4, 64, 512, activation=nn.Tanh, lr=0.01)
vgg_features = inference(workloads["vgg16"].sized("tiny"))
"""VGG-16 on a batch of images, without no_grad."""


def _enter(mode: Callable[[], AbstractContextManager[Any]], job: Job) -> None:
    only_inference(job)
    job.contexts.append(mode)


def _eval(job: Job) -> None:
    only_inference(job)
    job.model.eval()


def _volatile(job: Job) -> None:
    feed = job.feed

    def marked() -> Iterator[tuple[float, tuple[Any, ...]]]:
        for share, batch in feed():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "volatile was removed and now has no effect"
                variables = mapped(batch, functools.partial(torch.autograd.Variable, volatile=True))
            yield share, variables

    job.feed = marked


def _backward_without_grad(job: Job) -> None:
    if not job.trains:
        raise DoesNotApply("an inference has no backward.")
    job.backward = torch.no_grad()(job.backward)


def layers_of(model: nn.Module, count: int = 4) -> list[nn.Module]:
    """Layers without children, evenly spaced through the model."""
    leaves = [one for one in model.modules() if not any(True for _ in one.children())]
    every = max(1, len(leaves) // count)
    return leaves[every - 1 :: every][:count]


def _collect(job: Job) -> None:
    """Keep the features of every step in a list, as for style transfer, until the next step makes a new one."""
    if job.trains:
        return
    features: list[Tensor] = []

    def collect(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            features.append(output)

    @contextlib.contextmanager
    def collecting() -> Iterator[None]:
        features.clear()
        with contextlib.ExitStack() as hooks:
            for layer in layers_of(job.model):
                hooks.callback(layer.register_forward_hook(collect).remove)
            yield

    job.contexts.append(collecting)
    job.held.append(features)


def _collect_without_grad(job: Job) -> None:
    if job.trains:
        raise DoesNotApply("features are extracted without training; this job trains, and needs its graph.")
    _collect(job)
    job.contexts.append(torch.no_grad)


# --- BatchNorm folded into convolutions ---

_NORMS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Names of convolutions and BatchNorms, where the convolution feeds only the BatchNorm.

    They are read from a trace of the forward; where that cannot be traced, from the order in nn.Sequential. Convolutions used
    twice, or whose output something else reads too, are left out.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: list[tuple[str, str]] = []
    try:
        graph = fx.Tracer().trace(model)
    except Exception:  # a forward with branches on values, a loop over sizes: fx refuses in many ways
        uses = [id(one) for one in modules.values()]
        for path, module in model.named_modules():
            if type(module) is nn.Sequential:
                found += itertools.pairwise(f"{path}.{name}".lstrip(".") for name in module._modules)
    else:
        uses = [id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module"]
        for node in graph.nodes:
            before = node.args[0] if node.op == "call_module" and node.args else None
            if isinstance(before, fx.Node) and before.op == "call_module" and len(before.users) == 1:
                found.append((str(before.target), str(node.target)))

    def fit(first: Any, second: Any) -> bool:
        is_norm = type(second) is _NORMS.get(type(first)) and second.running_mean is not None
        return is_norm and uses.count(id(first)) == uses.count(id(second)) == 1

    return [(first, second) for first, second in found if fit(modules.get(first), modules.get(second))]


@torch.no_grad()
def fuse(model: nn.Module) -> None:
    """Fold every BatchNorm that follows a convolution into it, in place."""
    if model.training:
        raise DoesNotApply("the model is in training mode, where BatchNorm takes the batch's statistics.")
    found = pairs(model)
    if not found:
        raise DoesNotApply("the model has no BatchNorm that follows a convolution and nothing else.")
    for first, second in found:
        fused = fuse_conv_bn_eval(model.get_submodule(first), model.get_submodule(second))  # type: ignore[arg-type,type-var]
        model.set_submodule(first, fused)
        model.set_submodule(second, nn.Identity())


# --- branches merged ---

_METHODS = ("switch_to_deploy", "reparameterize")


class Branches(Parallel):
    """Convolutions of several shapes on one input, each with BatchNorm, added up; the largest is `size` x `size`."""

    def __init__(self, width: int, out: int, shapes: Sequence[tuple[int, int]], identity: bool = False) -> None:
        convolutions = (nn.Conv2d(width, out, one, padding=(one[0] // 2, one[1] // 2), bias=False) for one in shapes)
        super().__init__(nn.Sequential(conv, nn.BatchNorm2d(out)) for conv in convolutions)
        if identity and width == out:
            self.branches.append(nn.BatchNorm2d(out))
        self.width, self.out, self.size = width, out, max(max(one) for one in shapes)

    @torch.no_grad()
    def merged(self) -> nn.Conv2d:
        """One convolution that gives the same at inference."""
        like: Any = next(self.parameters())
        place = {"device": like.device, "dtype": like.dtype}
        merged = nn.Conv2d(self.width, self.out, self.size, padding=self.size // 2, **place)
        kernels, shifts = zip(*(self._kernel(branch) for branch in self.branches), strict=True)
        assert merged.bias is not None
        merged.weight.copy_(sum(kernels))
        merged.bias.copy_(sum(shifts))
        return merged.train(self.training)

    def _kernel(self, branch: Any) -> tuple[Tensor, Tensor]:
        """The branch as a kernel of the block's size, and a bias."""
        if isinstance(branch, nn.Sequential):
            kernel, norm = cast(Tensor, branch[0].weight), cast(nn.BatchNorm2d, branch[1])
        else:  # the identity is a 1 x 1 convolution by the unit matrix
            norm = branch
            kernel = torch.eye(self.width).reshape(self.width, self.width, 1, 1).to(norm.weight)
        assert norm.running_mean is not None and norm.running_var is not None
        weight, shift = fuse_conv_bn_weights(
            kernel, None, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        high, wide = ((self.size - side) // 2 for side in kernel.shape[2:])
        return functional.pad(weight, (wide, wide, high, high)), shift


class RepVggBlock(Branches):
    """3 x 3, 1 x 1 and, where widths agree, the input itself, each with BatchNorm."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, ((3, 3), (1, 1)), identity=True)


class AcBlock(Branches):
    """3 x 3, 3 x 1 and 1 x 3, each with BatchNorm: the asymmetric block of ACNet."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, ((3, 3), (3, 1), (1, 3)))


@torch.no_grad()
def merge(kind: type[Branches], model: nn.Module) -> nn.Module:
    """The model with each such block as one convolution; without any, merge modules that provide a method for it."""
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
    named = ((getattr(one, name, None) for name in _METHODS) for one in model.modules() if not made)
    own = [next(filter(callable, methods), None) for methods in named]
    for merge_itself in filter(None, own):
        merge_itself()
    if not made and not any(own):
        raise DoesNotApply(f"the model has no branches to merge: no {kind.__name__}, no module with {_METHODS[0]}().")
    return model


def four_blocks(kind: Callable[[int, int], Branches]) -> Parts:
    """An inference by four blocks under no_grad."""
    blocks = [nn.Sequential(kind(width, 16), nn.ReLU(inplace=True)) for width in (3, 16, 16, 16)]
    return Serving(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), None, (torch.randn(8, 3, 48, 48),), None


TECHNIQUES = (
    *(
        described(
            mode.__name__,
            Demo(plain_inference, share=0.5),
            functools.partial(_enter, mode),
            patch=functools.partial(refusing_backward, mode),
        )
        for mode in (torch.no_grad, torch.inference_mode)
    ),
    described("eval_mode", Demo(plain_inference, share=0.01), _eval, baseline_pattern=lambda job: job.model.train()),
    described("volatile", Demo(plain_inference, share=0.0), _volatile),
    described("no_grad_backward", Demo(layers_that_train, share=0.0), _backward_without_grad),
    described("feature_lists", Demo(vgg_features), _collect_without_grad, baseline_pattern=_collect),
    described("conv_bn_fusion", Demo(plain_inference), **to_model(fuse, only_inference)),
    *(
        described(
            name, Demo(functools.partial(four_blocks, kind)), **to_model(functools.partial(merge, kind), only_inference)
        )
        for name, kind in (("repvgg_merge", RepVggBlock), ("acnet_merge", AcBlock))
    ),
)
