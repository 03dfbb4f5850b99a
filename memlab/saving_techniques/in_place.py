"""In-place activations, where nothing else needs the input.

Whether something needs it is read from the model's graph (torch.fx), or from the parts that can be traced.
A layer is changed only if a layer in the same module just made its input, does not need it again, and passes it nowhere else.
Hooks that keep outputs elsewhere are not seen, nor are calls of `functional.relu`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import conv_stack
from memlab.saving_techniques.patching import to_model
from memlab.saving_techniques.technique import Demo, described
from memlab.torch_internals.layers import BatchNorm, Convolution
from memlab.torch_internals.objects import forward_hooks

POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
MAKERS = (Convolution, BatchNorm, nn.Linear, nn.GroupNorm, nn.LayerNorm, *POOLS)
"""Layers that return a new tensor and do not save it for backward."""
FUNCTIONS = {operator.add, torch.add, torch.cat, functional.conv2d, functional.linear}


class _Tracer(fx.Tracer):
    """Traces the graph without calling hooks, which would meet proxies for tensors, and notes each node's module."""

    def __init__(self) -> None:
        super().__init__()
        self.path = [""]
        self.parent: dict[fx.Node, str] = {}

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return self.create_proxy("call_module", name, args, kwargs)
        self.path.append(name)
        try:
            return m.forward(*args, **kwargs)
        finally:
            self.path.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.parent[node] = self.path[-1]
        return node


def changeable(model: nn.Module) -> list[nn.Module]:
    """The activations that could be in-place at all of their calls, and are not."""
    verdicts: dict[nn.Module, bool] = {}
    for layer, is_safe in _calls(model):
        verdicts[layer] = verdicts.get(layer, True) and is_safe
    return [layer for layer, is_safe in verdicts.items() if is_safe and not layer.inplace]


def _calls(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Every call of an activation, and whether it could be in-place."""
    tracer = _Tracer()
    try:
        graph = tracer.trace(module)
    except Exception:  # whatever the user's forward does with a proxy
        for child in module.children():
            yield from _calls(child)
        return
    layers = dict(module.named_modules(remove_duplicate=False))
    for node in graph.nodes:
        layer = layers.get(str(node.target)) if node.op == "call_module" else None
        # Those whose backward needs only the result, to the bit; that of a leaky slope below 0 needs the input.
        if type(layer) is nn.ReLU or (type(layer) is nn.LeakyReLU and layer.negative_slope >= 0):
            source = node.args[0] if node.args else None
            in_same_module = isinstance(source, fx.Node) and tracer.parent[source] == tracer.parent[node]
            yield layer, in_same_module and _is_free(source, layers)


def _is_free(node: Any, layers: dict[str, nn.Module]) -> bool:
    """Whether the node makes a new tensor that nothing saves, and that is used once."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    if node.op == "call_module":
        layer = layers[str(node.target)]
        return isinstance(layer, MAKERS) and not forward_hooks(layer)
    if node.op == "call_function" and node.target is operator.iadd:
        return _is_free(node.args[0], layers)
    return node.op == "call_function" and node.target in FUNCTIONS


def _make_in_place(model: nn.Module) -> None:
    layers = changeable(model)
    if not layers:
        raise DoesNotApply(
            f"{type(model).__name__} has no ReLU or LeakyReLU layer that could write over its input and does not yet."
        )
    for layer in layers:
        layer.inplace = True  # type: ignore[assignment]


leaky_stack = functools.partial(conv_stack, 8, 8, lambda width: nn.LeakyReLU(0.2), images=(4, 3, 32), head=False)
"""Convolutions with LeakyReLU, as in a GAN's discriminator."""
TECHNIQUES = (described("in_place", Demo(leaky_stack, share=0.3), **to_model(_make_in_place)),)
