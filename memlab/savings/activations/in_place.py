"""Activations that write over their input, where nothing else needs it.

Whether something does is read from the model's graph (torch.fx); where that cannot be drawn, from the parts of which it can.
A layer is changed only if what it gets was just made by a layer beside it that does not need it again, and goes nowhere else.
Hooks that keep outputs elsewhere are not seen, nor are calls of `functional.relu`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from memlab.errors import DoesNotApply
from memlab.savings.outside import on_models
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts

MAKERS = (_ConvNd, _BatchNorm, nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
"""Layers that give a new tensor and do not keep it for their backward."""
FUNCTIONS = {operator.add, torch.add, torch.cat, functional.conv2d, functional.linear}


class _Drawing(fx.Tracer):
    """Draws the graph without calling hooks, and remembers in which module each node stands."""

    def __init__(self) -> None:
        super().__init__()
        self.path = [""]
        self.parent: dict[fx.Node, str] = {}

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Goes on inside of the user's modules, by their forward alone: hooks would meet stand-ins for tensors."""
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return self.create_proxy("call_module", name, args, kwargs)
        self.path.append(name)
        try:
            return m.forward(*args, **kwargs)
        finally:
            self.path.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """As it is, with its place."""
        node = super().create_node(*args, **kwargs)
        self.parent[node] = self.path[-1]
        return node


def changeable(model: nn.Module) -> list[nn.Module]:
    """The activations that may write over their input wherever they are called, and do not yet."""
    verdicts: dict[nn.Module, bool] = {}
    for layer, is_safe in _verdicts(model):
        verdicts[layer] = verdicts.get(layer, True) and is_safe
    return [layer for layer, is_safe in verdicts.items() if is_safe and not layer.inplace]


def _verdicts(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    drawing = _Drawing()
    try:
        graph = drawing.trace(module)
    except Exception:  # whatever the user's forward does with a stand-in
        for child in module.children():
            yield from _verdicts(child)
        return
    layers = dict(module.named_modules(remove_duplicate=False))
    for node in graph.nodes:
        layer = layers.get(str(node.target)) if node.op == "call_module" else None
        if layer is not None and _is_activation(layer):
            source = node.args[0] if node.args else None
            beside = isinstance(source, fx.Node) and drawing.parent[source] == drawing.parent[node]
            yield layer, beside and _is_free(source, layers)


def _is_activation(layer: nn.Module) -> bool:
    """Those whose backward can do with the result, to the bit; a leaky slope below 0 cannot."""
    return type(layer) is nn.ReLU or (type(layer) is nn.LeakyReLU and layer.negative_slope >= 0)


def _is_free(node: Any, layers: dict[str, nn.Module]) -> bool:
    """Whether the node's tensor is its own, kept by nobody, and used once."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    if node.op == "call_module":
        layer = layers[str(node.target)]
        return isinstance(layer, MAKERS) and not layer._forward_hooks
    if node.op == "call_function" and node.target is operator.iadd:
        return _is_free(node.args[0], layers)
    return node.op == "call_function" and node.target in FUNCTIONS


def make_in_place(model: nn.Module) -> None:
    """Set `inplace` where it is safe."""
    found = changeable(model)
    if not found:
        raise DoesNotApply(
            f"{type(model).__name__} has no ReLU or LeakyReLU layer that could write over its input and does not yet."
        )
    for layer in found:
        layer.inplace = True  # type: ignore[assignment]


def _apply(job: Job) -> None:
    make_in_place(job.model)


def leaky_stack(layers: int = 8, width: int = 8, side: int = 32) -> Parts:
    """Convolutions with LeakyReLU, as in a GAN's discriminator."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for index in range(layers):
        model.extend([nn.Conv2d(width if index else 3, width, 3, padding=1), nn.LeakyReLU(0.2)])
    batch = torch.randn(4, 3, side, side), torch.randn(4, width, side, side)
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, _distance


def _distance(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


TECHNIQUES = (
    Technique(
        name="in_place",
        idea="Let ReLU and LeakyReLU write over their input instead of making a second tensor.",
        attacks=("activation", "temporary"),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="none in time; what is overwritten cannot be looked at afterwards.",
        not_when="The input is needed again: a short cut taken before the activation, a leaf, a sigmoid or GELU before it, a"
        " hook that keeps it. Plain ReLU saves one copy for a moment, as PyTorch keeps its result and never its input: a quarter"
        " of the peak of a VGG, nothing of a ResNet's. LeakyReLU keeps its input, a second tensor for each layer. ReLU6 keeps"
        " a copy of it all the same.",
        code="""\
def inplace_relu(module):
    if "ReLU" in type(module).__name__:
        module.inplace = True

model.apply(inplace_relu)  # only where no input is needed again: compare the losses of a step or two
""",
        references=(
            "In-place operations with autograd, PyTorch documentation,"
            " https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-operations-with-autograd",
            "derivatives.yaml, PyTorch source: relu keeps `result`, leaky_relu `self`,"
            " https://github.com/pytorch/pytorch/blob/main/tools/autograd/derivatives.yaml",
        ),
        shown=Shown(leaky_stack, share=0.3),
        tips=("C1",),
        apply=_apply,
        outside=lambda: on_models(make_in_place),
    ),
)
