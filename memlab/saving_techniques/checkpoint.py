"""Checkpointing: keep the input of a part, discard what it computed, and recompute it in backward.

The parts are a model's repeated blocks, or segments of a long nn.Sequential: a fixed number of them, or the square root of N.
Selective checkpointing keeps results of matrix products and convolutions, and recomputes only the cheap operators.

Running statistics are updated once, in the forward, as usual; PyTorch's own `checkpoint` updates them twice. A block
that changes its input in place, or a buffer that is no norm's (a running average, the vectors of spectral_norm), cannot be
run again and is refused when it does so.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import linear_stack
from memlab.saving_techniques.patching import on_models, only_training, to_model
from memlab.saving_techniques.technique import Demo, described
from memlab.torch_internals.layers import NormWithStatistics
from memlab.workloads.job import Job, Parts

Contexts = Callable[[], tuple[Any, Any]]
"""Returns the contexts for the forward and its recomputation."""
_CHAINS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _no_contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


def recomputed(
    call: Callable[..., Any], modules: Iterable[nn.Module], contexts: Contexts, *args: Any, **kwargs: Any
) -> Any:
    """`call(*args)`, run again in backward; the norms in `modules` keep their statistics the second time."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    if not torch.is_grad_enabled() or not tensors:
        return call(*args, **kwargs)
    modules = tuple(modules)

    def both() -> tuple[Any, Any]:
        first, again = contexts()
        return first, _frozen_statistics(modules, again)

    versions, buffers = [one._version for one in tensors], _buffers(modules)
    output = checkpoint(call, *args, use_reentrant=False, context_fn=both, **kwargs)
    if [one._version for one in tensors] != versions:
        raise DoesNotApply(
            "a block changes its input in place, so that it cannot be run again: make its first operation out of place."
        )
    if changed := [name for name, one in buffers.items() if _buffers(modules).get(name) != one]:
        raise DoesNotApply(
            f"a block changes its buffer {changed[0][1]!r:.80} in its forward: run again, it would change it twice."
        )
    return output


def _buffers(modules: tuple[nn.Module, ...]) -> dict[tuple[int, str], tuple[int, int]]:
    """Module and name -> which tensor in which version, for all buffers except those of norms, which are protected."""
    found: dict[tuple[int, str], tuple[int, int]] = {}
    for index, top in enumerate(modules):
        for path, module in top.named_modules():
            if not isinstance(module, NormWithStatistics):
                for name, one in module.named_buffers(path, recurse=False):
                    found[index, name] = id(one), one._version
    return found


@contextlib.contextmanager
def _frozen_statistics(modules: tuple[nn.Module, ...], inner: Any) -> Iterator[None]:
    """Norms do not update statistics: momentum 0 leaves the running ones to the bit, None counts no batch.

    Switching them off by `track_running_stats` would save other tensors than the first time, which checkpoint refuses.
    """
    found = {one for top in modules for one in top.modules() if isinstance(one, NormWithStatistics)}
    before = [(one, one.momentum, one.num_batches_tracked) for one in found if one.training and one.track_running_stats]
    try:
        for one, *_ in before:
            one.momentum, one.num_batches_tracked = 0.0, None
        with inner:
            yield
    finally:
        for one, momentum, count in before:
            one.momentum, one.num_batches_tracked = momentum, count


# --- repeated blocks ---


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: outermost modules of a kind that occurs at least twice and has children.

    Where there are none, innermost Sequentials count as blocks if the model has three of them or more.
    """
    kinds = Counter(type(one) for one in model.modules() if one is not model)

    def is_innermost(module: nn.Module) -> bool:
        is_chain = isinstance(module, nn.Sequential) and len(module) > 1
        return is_chain and not any(isinstance(one, _CHAINS) for one in module.children())

    found = list(_outermost(model, lambda one: not isinstance(one, _CHAINS) and kinds[type(one)] > 1))
    if not found:
        found = list(_outermost(model, is_innermost))
        found = found if len(found) > 2 else []
    return [one for one in dict.fromkeys(found) if any(True for _ in one.parameters())]


def _outermost(module: nn.Module, is_block: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        if is_block(child) and any(True for _ in child.children()):
            yield child
        else:
            yield from _outermost(child, is_block)


def checkpoint_blocks(model: nn.Module, contexts: Contexts = _no_contexts) -> None:
    """Run every repeated block of the model again in backward."""
    found = blocks(model)
    if not found:
        raise DoesNotApply(
            f"{type(model).__name__} has no repeated blocks to checkpoint: wrap parts of its forward by hand, or use"
            " checkpoint_sequential where it has a long nn.Sequential."
        )
    for block in found:
        block.forward = functools.partial(recomputed, block.forward, (block,), contexts)


EXPENSIVE = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention"}
    | {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"}
    | {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"}
)
"""The operators whose results selective checkpointing keeps."""


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = getattr(getattr(operator, "overloadpacket", None), "__name__", "")  # higher-order operators have none
    return CheckpointPolicy.MUST_SAVE if name in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_cheap(model: nn.Module) -> None:
    """An in-place layer would change what was kept, which PyTorch refuses."""
    for block in blocks(model):
        for name, layer in block.named_modules():
            if getattr(layer, "inplace", False):
                raise DoesNotApply(f"{type(block).__name__}.{name} works in place and would change what is kept.")
    checkpoint_blocks(model, functools.partial(create_selective_checkpoint_contexts, _policy))


# --- segments of a chain ---

SHORTEST = 4
"""The minimum number of layers of a Sequential to cut."""
Count = Callable[[int], int]
"""Number of layers -> number of segments."""


def four(layers: int) -> int:
    """As in PyTorch's example, whatever the length."""
    return 4


def square_root(layers: int) -> int:
    """As many segments as each has layers."""
    return max(2, round(math.sqrt(layers)))


def longest_chain(model: nn.Module) -> nn.Sequential:
    """The Sequential with the most layers whose forward does no more than go through them: a subclass may have a shortcut."""
    chains = [one for one in model.modules() if isinstance(one, nn.Sequential) and len(one) >= SHORTEST]
    plain = nn.Sequential.forward
    chains = [one for one in chains if type(one).forward is plain and "forward" not in vars(one)]
    if not chains:
        raise DoesNotApply(
            f"{type(model).__name__} has no nn.Sequential of {SHORTEST} layers or more to cut into segments."
        )
    return max(chains, key=len)


def segments(chain: nn.Sequential, count: int) -> list[list[nn.Module]]:
    """The layers in that many runs of about equal length, cut only before layers that leave their input unchanged."""
    layers = list(chain)
    cuts = set()
    for index in range(1, count):
        cut = round(len(layers) * index / count)
        while cut < len(layers) and _begins_in_place(layers[cut]):
            cut += 1
        cuts.add(cut)
    bounds = [0, *sorted(cuts - {0, len(layers)}), len(layers)]
    return [layers[start:end] for start, end in itertools.pairwise(bounds)]


def _begins_in_place(layer: nn.Module) -> bool:
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))


def _segmented(chain: nn.Sequential, count: Count, value: Any) -> Any:
    """The chain's forward, in segments, which are found at each call: other techniques may make layers in-place later.

    Unlike those of PyTorch's `checkpoint_sequential`, they never begin with an in-place operation, which would change the
    input that they are run again from.
    """

    def through(layers: list[nn.Module], value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    *early, last = segments(chain, count(len(chain)))
    for layers in early:
        value = recomputed(functools.partial(through, layers), layers, _no_contexts, value)
    return through(last, value)  # its backward follows at once: discarding would save nothing


def _segment(count: Count, job: Job) -> None:
    only_training(job)
    chain = longest_chain(job.model)
    chain.forward = functools.partial(_segmented, chain, count)  # type: ignore[method-assign]


@contextlib.contextmanager
def _patch_segments(count: Count) -> Iterator[None]:
    """The forward of the class is replaced: one of its own would be a cycle that keeps a chain alive."""
    chosen: set[int] = set()
    plain = nn.Sequential.forward

    def forward(self: nn.Sequential, input: Any) -> Any:
        return _segmented(self, count, input) if id(self) in chosen else plain(self, input)

    replaced = mock.patch.object(nn.Sequential, "forward", forward)
    with replaced, on_models(lambda model: chosen.add(id(longest_chain(model)))):
        yield


chain = functools.partial(linear_stack, 36, 64, 512, activation=nn.Tanh)
"""36 linear layers one after the other, as the classic example of checkpointing has a thousand of them."""


class _DemoBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def residual_stack() -> Parts:
    """Feed-forward blocks with shortcuts: a transformer without its attention."""
    model = nn.Sequential(*(_DemoBlock(32) for _ in range(6)), nn.Linear(32, 4))
    batch = torch.randn(1024, 32), torch.randint(4, (1024,))
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, functional.cross_entropy


TECHNIQUES = (
    described("checkpoint", Demo("gpt", share=0.5), **to_model(checkpoint_blocks, only_training)),
    described("selective_checkpoint", Demo(residual_stack), **to_model(_checkpoint_cheap, only_training)),
    *(
        described(
            name,
            demo,
            functools.partial(_segment, count),
            patch=functools.partial(_patch_segments, count),
            change=longest_chain,
        )
        for name, demo, count in (
            ("checkpoint_sequential", Demo("gpt", share=0.35), four),
            ("sqrt_segments", Demo(chain, share=0.5), square_root),
        )
    ),
)
