"""BatchNorm folded into the convolution before it, at inference.

Which BatchNorm follows which convolution is read from a trace of the forward; where that cannot be traced, from the order in
nn.Sequential. Limits: convolutions used twice, or whose output somebody else reads too, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from memlab.errors import DoesNotApply
from memlab.savings.inference.grad import only_inference, pictures
from memlab.savings.outside import on_models
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job

_CONVOLUTIONS = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}


def _fit(first: nn.Module | None, second: nn.Module | None) -> bool:
    return type(second) is _CONVOLUTIONS.get(type(first)) and second.running_mean is not None  # type: ignore[arg-type]


def pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Names of the convolutions and BatchNorms that follow each other and nothing else."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception:  # a forward with branches on values, a loop over sizes: fx refuses in many ways
        return list(_neighbours(model))
    return list(_followers(model, graph))


def _followers(model: nn.Module, graph: fx.Graph) -> Iterator[tuple[str, str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    called = [id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module"]
    for node in graph.nodes:
        before = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        first, second = modules[str(before.target)], modules[str(node.target)]
        if _fit(first, second) and called.count(id(first)) == called.count(id(second)) == 1:
            yield str(before.target), str(node.target)


def _neighbours(model: nn.Module) -> Iterator[tuple[str, str]]:
    times = [id(one) for _, one in model.named_modules(remove_duplicate=False)]
    for path, module in model.named_modules():
        if type(module) is not nn.Sequential:
            continue
        names = [f"{path}.{name}" if path else name for name, _ in module._modules.items()]
        layers = list(module._modules.values())
        for at in range(len(layers) - 1):
            if _fit(layers[at], layers[at + 1]) and times.count(id(layers[at])) == 1 == times.count(id(layers[at + 1])):
                yield names[at], names[at + 1]


def fuse(model: nn.Module) -> None:
    """Fold every BatchNorm that follows a convolution into it, in place."""
    if model.training:
        raise DoesNotApply("the model is in training mode, where BatchNorm takes the batch's statistics.")
    found = pairs(model)
    if not found:
        raise DoesNotApply("the model has no BatchNorm that follows a convolution and nothing else.")
    for first, second in found:
        fused = fuse_conv_bn_eval(model.get_submodule(first), model.get_submodule(second))  # type: ignore[arg-type,type-var]
        _put(model, first, fused)
        _put(model, second, nn.Identity())


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _apply(job: Job) -> None:
    only_inference(job)
    with torch.no_grad():
        fuse(job.model)


TECHNIQUES = (
    Technique(
        name="conv_bn_fusion",
        idea="At inference BatchNorm is a scale and a shift: folded into the convolution's weights, a layer goes away.",
        attacks=("activation", "buffer", "temporary"),
        kind="saving",
        stage="model",
        equality=close(1e-4, "the same numbers multiplied in another order"),
        price="None at inference; the folded model cannot be trained on as before.",
        not_when="Training; under no_grad the peak hardly moves, as only one layer's input and output live: it saves time.",
        code="from torch.nn.utils.fusion import fuse_conv_bn_eval\n\n"
        "model.eval()\nmodel.conv1, model.bn1 = fuse_conv_bn_eval(model.conv1, model.bn1), torch.nn.Identity()",
        references=(
            "PyTorch tutorial, Building a Convolution/Batch Norm fuser, "
            "https://docs.pytorch.org/tutorials/intermediate/torch_compile_conv_bn_fuser.html",
        ),
        shown=Shown(pictures, share=0.25),
        tips=("G3",),
        apply=_apply,
        outside=lambda: on_models(fuse),
    ),
)
