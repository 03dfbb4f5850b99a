"""Checkpointing: keep what goes into a block, forget what the block made, and run it again in backward.

Running statistics are updated once, in the forward, as without it; PyTorch's own `checkpoint` updates them twice. A block
that changes its input in place, or a buffer that is no norm's (an average of its own, the vectors of spectral_norm), cannot be
run again and is refused when it does so.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from memlab.errors import DoesNotApply
from memlab.savings.outside import on_models
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts

Contexts = Callable[[], tuple[Any, Any]]
"""Gives what is entered around the forward and around its repetition."""
_CHAINS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def recomputed(
    call: Callable[..., Any], modules: Iterable[nn.Module], contexts: Contexts, *args: Any, **kwargs: Any
) -> Any:
    """`call(*args)`, run again in backward; the norms in `modules` keep their statistics the second time."""
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    if not torch.is_grad_enabled() or not given:
        return call(*args, **kwargs)
    modules = tuple(modules)
    versions, kept = [one._version for one in given], _buffers(modules)
    both = functools.partial(_contexts, modules, contexts)
    output = checkpoint(call, *args, use_reentrant=False, context_fn=both, **kwargs)
    if [one._version for one in given] != versions:
        raise DoesNotApply(
            "a block changes its input in place, so that it cannot be run again: make its first operation out of place."
        )
    if changed := [name for name, one in kept.items() if _buffers(modules).get(name) != one]:
        raise DoesNotApply(
            f"a block changes its buffer {changed[0]!r:.80} in its forward: run again, it would change it twice."
        )
    return output


def _buffers(modules: tuple[nn.Module, ...]) -> dict[str, tuple[int, int]]:
    """Name -> which tensor in which version, for all buffers but those of norms, which keep theirs the second time."""
    found: dict[str, tuple[int, int]] = {}
    for at, top in enumerate(modules):
        for place, module in top.named_modules():
            if not isinstance(module, _NormBase):
                own = module.named_buffers(f"{at}.{place}".rstrip("."), recurse=False)
                found |= {name: (id(one), one._version) for name, one in own}
    return {name.partition(".")[2]: one for name, one in found.items()}


def no_contexts() -> tuple[Any, Any]:
    """Nothing around the forward, nothing around its repetition."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def _contexts(modules: tuple[nn.Module, ...], contexts: Contexts) -> tuple[Any, Any]:
    first, again = contexts()
    return first, _both(_still(modules), again)


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


@contextlib.contextmanager
def _still(modules: tuple[nn.Module, ...]) -> Iterator[None]:
    """Norms take no notice of what they see: momentum 0 leaves running statistics to the bit, None counts no batch.

    Switching them off by `track_running_stats` would save other tensors than the first time, which checkpoint refuses.
    """
    found = [one for top in modules for one in top.modules() if isinstance(one, _NormBase)]
    norms = [one for one in dict.fromkeys(found) if one.training and one.track_running_stats]
    before = [(one.momentum, one.num_batches_tracked) for one in norms]
    try:
        for one in norms:
            one.momentum, one.num_batches_tracked = 0.0, None
        yield
    finally:
        for one, (momentum, count) in zip(norms, before, strict=True):
            one.momentum, one.num_batches_tracked = momentum, count


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: outermost modules of a kind that is there at least twice and is made of others.

    Where there are none, innermost Sequentials count as blocks if the model has three of them or more.
    """
    kinds = Counter(type(one) for one in model.modules() if one is not model)
    found = list(_outermost(model, lambda one: not isinstance(one, _CHAINS) and kinds[type(one)] > 1))
    if not found:
        found = list(_outermost(model, _is_innermost))
        found = found if len(found) > 2 else []
    return [one for one in dict.fromkeys(found) if any(True for _ in one.parameters())]


def _is_innermost(module: nn.Module) -> bool:
    is_chain = isinstance(module, nn.Sequential) and len(module) > 1
    return is_chain and not any(isinstance(one, _CHAINS) for one in module.children())


def _outermost(module: nn.Module, is_one: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        if is_one(child) and any(True for _ in child.children()):
            yield child
        else:
            yield from _outermost(child, is_one)


def checkpoint_blocks(model: nn.Module, contexts: Contexts = no_contexts) -> None:
    """Run every repeated block of the model again in backward."""
    found = blocks(model)
    if not found:
        raise DoesNotApply(
            f"{type(model).__name__} has no repeated blocks to checkpoint: wrap parts of its forward by hand, or use"
            " checkpoint_sequential where it has a long nn.Sequential."
        )
    for block in found:
        again = functools.partial(recomputed, block.forward, (block,), contexts)
        block.forward = again


def refuse_inference(job: Job) -> None:
    """Without a backward nothing is kept for it, or should not be."""
    if not job.trains:
        raise DoesNotApply("this is an inference: switch gradients off instead, then nothing is kept for a backward.")


def _apply(job: Job) -> None:
    refuse_inference(job)
    checkpoint_blocks(job.model)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def residual_stack(layers: int = 6, width: int = 32, rows: int = 1024) -> Parts:
    """Feed-forward blocks beside a short cut: what a transformer is without its attention."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(width) for _ in range(layers)), nn.Linear(width, 4))
    batch = torch.randn(rows, width), torch.randint(0, 4, (rows,))
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, functional.cross_entropy


SAME = "the same activations would be forgotten twice and run three times"

TECHNIQUES = (
    Technique(
        name="checkpoint",
        idea="Keep only what goes into each block; run the block again when backward needs what it made.",
        attacks=("activation",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="one more forward of every block: a third more time where the backward takes two forwards.",
        slower=True,
        not_when="Activations are a small part of the peak, or one block makes most of them: while it is run again all of"
        " its activations are there at once. A BatchNorm inside counts each batch twice in its running statistics if you"
        " paste the lines as they are.",
        code="""\
from torch.utils.checkpoint import checkpoint

def forward(self, x):
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return self.head(x)
""",
        references=(
            "Training Deep Nets with Sublinear Memory Cost, Chen et al. 2016, https://arxiv.org/abs/1604.06174",
            "torch.utils.checkpoint, PyTorch documentation, https://docs.pytorch.org/docs/stable/checkpoint.html",
        ),
        shown=Shown("gpt", share=0.5),
        tips=("C5",),
        excludes={"selective_checkpoint": SAME, "checkpoint_sequential": SAME, "sqrt_segments": SAME},
        apply=_apply,
        outside=lambda: on_models(checkpoint_blocks),
    ),
)
