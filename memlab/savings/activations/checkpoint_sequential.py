"""A long nn.Sequential cut into segments, each of which is run again in backward: a fixed number, or the square root of N.

As PyTorch's `checkpoint_sequential` does it, with two differences: a segment never begins with an operation in place, which
would change what it is run again from, and running statistics are updated once.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings.activations.checkpoint import SAME, no_contexts, recomputed, refuse_inference
from memlab.savings.outside import on_models
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts

SEGMENTS = 4
SHORTEST = 4
"""Layers that a Sequential has at least to be worth cutting."""
Count = Callable[[int], int]
"""Number of layers -> number of segments."""


def longest(model: nn.Module) -> nn.Sequential:
    """The Sequential with the most layers that are trained."""
    chains = [one for one in model.modules() if _is_plain(one) and len(one) >= SHORTEST]
    if not chains:
        raise DoesNotApply(
            f"{type(model).__name__} has no nn.Sequential of {SHORTEST} layers or more to cut into segments."
        )
    return max(chains, key=len)


def _is_plain(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether its forward is to go through its layers, and no more: one of a class of its own may have a short cut."""
    is_chain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_chain and "forward" not in vars(module)


def segments(chain: nn.Sequential, count: int) -> list[list[nn.Module]]:
    """The layers in so many runs of about the same length, cut only before layers that leave their input as it is."""
    layers = list(chain)
    wanted = {round(len(layers) * index / count) for index in range(1, count)}
    cuts = sorted({_passable(layers, cut) for cut in wanted} - {0, len(layers)})
    return [layers[start:end] for start, end in zip([0, *cuts], [*cuts, len(layers)], strict=True)]


def _passable(layers: list[nn.Module], cut: int) -> int:
    while cut < len(layers) and _begins_in_place(layers[cut]):
        cut += 1
    return cut


def _begins_in_place(layer: nn.Module) -> bool:
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))


def segmented(chain: nn.Sequential, count: Count, value: Any) -> Any:
    """The chain's forward, in segments. They are found at each call: others may make layers in-place later."""
    *early, last = segments(chain, count(len(chain)))
    for layers in early:
        value = recomputed(functools.partial(_through, layers), layers, no_contexts, value)
    return _through(last, value)  # its backward comes at once: forgetting would save nothing


def _through(layers: list[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def _apply(count: Count, job: Job) -> None:
    refuse_inference(job)
    chain = longest(job.model)
    chain.forward = functools.partial(segmented, chain, count)  # type: ignore[method-assign]


@contextlib.contextmanager
def _outside(count: Count) -> Iterator[None]:
    """A module that is being called has looked up its forward already, so that of the class is replaced."""
    chosen: set[int] = set()
    plain = nn.Sequential.forward

    def forward(self: nn.Sequential, value: Any) -> Any:
        return segmented(self, count, value) if id(self) in chosen else plain(self, value)

    nn.Sequential.forward = forward  # type: ignore[method-assign]
    try:
        with on_models(lambda model: chosen.add(id(longest(model)))):
            yield
    finally:
        nn.Sequential.forward = plain  # type: ignore[method-assign]


def fixed(layers: int) -> int:
    """SEGMENTS, whatever the length."""
    return SEGMENTS


def square_root(layers: int) -> int:
    """As many segments as each has layers."""
    return max(2, round(math.sqrt(layers)))


def chain(layers: int = 36, width: int = 64, rows: int = 512) -> Parts:
    """Linear layers one after the other, as the classic example of checkpointing has a thousand of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    batch = torch.randn(rows, width), torch.randn(rows, width)
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, _distance


def _distance(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


_NOT_WHEN = (
    "The model is no chain, or one layer makes most of the activations: the segment it is in comes back whole. Never let a"
    " segment begin with an in-place layer: it would be run again from a changed input."
)

TECHNIQUES = (
    Technique(
        name="checkpoint_sequential",
        idea=f"Cut a long nn.Sequential into {SEGMENTS} segments; keep what goes into each, run each again in backward.",
        attacks=("activation",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="one more forward of all segments but the last.",
        slower=True,
        not_when=_NOT_WHEN,
        code=f"""\
from torch.utils.checkpoint import checkpoint_sequential

output = checkpoint_sequential(model.features, {SEGMENTS}, images, use_reentrant=False)
""",
        references=(
            "torch.utils.checkpoint, PyTorch documentation, https://docs.pytorch.org/docs/stable/checkpoint.html",
            "Training Deep Nets with Sublinear Memory Cost, Chen et al. 2016, https://arxiv.org/abs/1604.06174",
        ),
        shown=Shown("gpt", share=0.35),
        tips=("C5",),
        excludes={"sqrt_segments": SAME, "selective_checkpoint": SAME},
        apply=functools.partial(_apply, fixed),
        outside=lambda: _outside(fixed),
    ),
    Technique(
        name="sqrt_segments",
        idea="Cut N layers into the square root of N segments: what is kept and what comes back are then equally small.",
        attacks=("activation",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="one more forward of all segments but the last, as with any other number of segments.",
        slower=True,
        not_when="Layers differ much in size: the rule is for N of one size. Few layers: four are two segments of two. "
        + _NOT_WHEN,
        code="""\
import math
from torch.utils.checkpoint import checkpoint_sequential

segments = round(math.sqrt(len(model.features)))
output = checkpoint_sequential(model.features, segments, images, use_reentrant=False)
""",
        references=(
            "Training Deep Nets with Sublinear Memory Cost, Chen et al. 2016, https://arxiv.org/abs/1604.06174",
        ),
        shown=Shown(chain, share=0.5),
        tips=("C6",),
        excludes={"selective_checkpoint": SAME},
        apply=functools.partial(_apply, square_root),
        outside=lambda: _outside(square_root),
    ),
)
