"""BatchNorm and ReLU recomputed in backward: what goes into the norm is kept, what comes out is made again, to the bit.

Results of cheap operators are known by their storage; where autograd saves one it gets a recipe instead. Running statistics
are updated once, as the recipe computes with the batch alone. Only `functional.batch_norm`, `functional.relu` (which the layers
call) and, for DenseNets, `torch.cat` are known as cheap; a tensor that was changed in place afterwards is saved as it is.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from memlab.errors import DoesNotApply
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts


class Recipe:
    """How to make a tensor again: a function of tensors, some of which are recipes themselves."""

    def __init__(self, make: Callable[..., Tensor], parts: list[Any]) -> None:
        self.make, self.parts = make, parts
        self.versions = [one._version if isinstance(one, Tensor) else -1 for one in parts]
        self.waits = False
        """Whether the operator that made it needs it too, as the last one."""
        self._weak: Callable[[], Tensor | None] = lambda: None
        self._kept: Tensor | None = None

    def value(self, last: bool = False) -> Tensor:
        """The tensor; kept from its first use in backward to its last one, by the operator that made it."""
        value = self._kept if self._kept is not None else self._weak()
        if value is None:
            value = self._made()
            self._weak = weakref.ref(value)
        self._kept = value if self.waits and not last else None
        return value

    def _made(self) -> Tensor:
        for part, version in zip(self.parts, self.versions, strict=True):
            if isinstance(part, Tensor) and part._version != version:
                raise DoesNotApply(
                    "a tensor was changed in place after a concatenation or norm had read it, so it cannot be recomputed."
                )
        with torch.no_grad():
            return self.make(*[part.value() if isinstance(part, Recipe) else part for part in self.parts])


class Recomputing(TorchFunctionMode):
    """While it is on, results of BatchNorm, of ReLU after it and, if wanted, of concatenations are saved as recipes."""

    def __init__(self, concatenations: bool = False) -> None:
        self.saved = 0
        """How many tensors were saved as recipes."""
        self._known: dict[int, tuple[Any, tuple[Any, ...], Recipe]] = {}
        self._rules: dict[Any, Callable[..., Tensor]] = {functional.batch_norm: self._norm}
        self._rules |= dict.fromkeys((functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), self._relu)
        if concatenations:
            self._rules |= dict.fromkeys((torch.cat, torch.concat, torch.concatenate), self._cat)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Around forward and loss."""
        try:
            with saved_tensors_hooks(self._pack, _unpack), self:
                yield
        finally:
            self._known.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow the rule for the function, if it has one and a graph is being made."""
        rule = self._rules.get(func) if torch.is_grad_enabled() else None
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))

    # --- rules -----------------------------------------------------------------------------------------------------------

    def _norm(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        x, mean, variance, weight, bias, training, _, eps = _of_norm(*args, **kwargs)
        self._note(
            result, Recipe(functools.partial(_norm_again, training, eps), [self._part(x), weight, bias, mean, variance])
        )
        return result

    def _relu(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        source = self._recipe(x)
        if source is None:
            result: Tensor = func(x, *args, **kwargs)
            return result
        recipe = Recipe(functional.relu, [source])
        shape = x.shape

        def pack(tensor: Tensor) -> Any:
            if tensor.shape != shape:
                return tensor.detach()
            recipe.waits = True
            self.saved += 1
            return recipe

        with saved_tensors_hooks(pack, _unpack_last):
            result = func(x, *args, **kwargs)
        self._note(result, recipe)
        return result

    def _cat(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        tensors, dim = _of_cat(*args, **kwargs)
        if "out" not in kwargs and isinstance(dim, int):
            self._note(result, Recipe(functools.partial(_cat_again, dim), [self._part(one) for one in tensors]))
        return result

    # --- who is who --------------------------------------------------------------------------------------------------------

    def _note(self, result: Tensor, recipe: Recipe) -> None:
        storage = result.untyped_storage()
        key = id(storage)

        def forget(ref: Any) -> None:  # a recipe holds what it reads, and must not outlive what it makes
            if self._known.get(key, (None,))[0] is ref:
                del self._known[key]

        self._known[key] = (weakref.ref(storage, forget), _geometry(result), recipe)

    def _recipe(self, tensor: Tensor) -> Recipe | None:
        """The recipe of a tensor, if it is what came out of a rule, unchanged."""
        storage = tensor.untyped_storage()
        found = self._known.get(id(storage))
        if found is None or found[0]() is not storage or found[1] != _geometry(tensor):
            return None
        return found[2]

    def _part(self, tensor: Tensor) -> Recipe | Tensor:
        return self._recipe(tensor) or tensor.detach()

    def _pack(self, tensor: Tensor) -> Any:
        recipe = self._recipe(tensor)
        if recipe is None:
            return tensor.detach()  # an output that knows its node would keep it, and itself, for ever
        self.saved += 1
        return recipe


def _unpack(packed: Any) -> Tensor:
    value: Tensor = packed.value() if isinstance(packed, Recipe) else packed
    return value


def _unpack_last(packed: Any) -> Tensor:
    value: Tensor = packed.value(last=True) if isinstance(packed, Recipe) else packed
    return value


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _of_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of functional.batch_norm, in order."""
    plain = [None if one is None else one.detach() for one in (running_mean, running_var, weight, bias)]
    return input, *plain, training, momentum, eps


def _norm_again(training: bool, eps: float, x: Tensor, weight: Any, bias: Any, *statistics: Any) -> Tensor:
    """In training, copies are updated in place of the statistics; without any the kernel would compute in other dtypes."""
    mean, variance = (one.clone() if training and one is not None else one for one in statistics)
    return functional.batch_norm(x, mean, variance, weight, bias, training, 0.0, eps)


def _of_cat(tensors: Any, dim: Any = 0, *, axis: Any = None, out: Any = None) -> tuple[Any, Any]:
    return tensors, dim if axis is None else axis


def _cat_again(dim: int, *parts: Tensor) -> Tensor:
    return torch.cat(parts, dim)


# --- the technique ---------------------------------------------------------------------------------------------------------


def recompute(job: Job, concatenations: bool) -> None:
    """Save recipes in the job's forwards; refuse at the end where there was nothing to save them for."""
    mode = Recomputing(concatenations)
    job.contexts.append(mode.on)
    job.around.append(lambda: _refusing(mode, concatenations))


@contextlib.contextmanager
def _refusing(mode: Recomputing, concatenations: bool) -> Iterator[None]:
    yield
    if not mode.saved:
        what = "concatenation or BatchNorm" if concatenations else "BatchNorm"
        raise DoesNotApply(f"no result of a {what} was kept for backward: there is nothing to recompute.")


@contextlib.contextmanager
def recompute_outside(concatenations: bool) -> Iterator[None]:
    """Save recipes in whatever runs inside."""
    mode = Recomputing(concatenations)
    with _refusing(mode, concatenations), mode.on():
        yield


def _apply(job: Job) -> None:
    if not any(isinstance(one, _BatchNorm) for one in job.model.modules()):
        raise DoesNotApply(f"{type(job.model).__name__} has no BatchNorm layer whose result could be recomputed.")
    recompute(job, concatenations=False)


def norm_stack(layers: int = 6, width: int = 8, side: int = 32) -> Parts:
    """Convolution, BatchNorm and ReLU, again and again."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for index in range(layers):
        model.extend(
            [nn.Conv2d(width if index else 3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        )
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)])
    batch = torch.randn(8, 3, side, side), torch.randint(0, 4, (8,))
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, functional.cross_entropy


FORGOTTEN = "both decide what autograd keeps of the same activations, and only one can"

TECHNIQUES = (
    Technique(
        name="recomputed_norm",
        idea="Keep what goes into BatchNorm and ReLU and compute both again in backward, instead of keeping both sides.",
        attacks=("activation",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="one more BatchNorm and ReLU for each in backward: a few percent, as they are bound by memory and not by sums.",
        slower=True,
        not_when="There is no BatchNorm, or the norm is in front of something that keeps nothing, such as another addition.",
        code="""\
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

def norm_relu_conv(x):  # the convolution is inside: it is the one who would keep what ReLU gives
    return conv(F.relu(norm(x)))

norm.momentum = 1 - (1 - norm.momentum) ** 0.5  # the statistics are updated in the forward and again in backward
x = checkpoint(norm_relu_conv, x, use_reentrant=False)
""",
        references=(
            "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs, Rota Bulò et al. 2018,"
            " https://arxiv.org/abs/1712.02616",
            "Memory-Efficient Implementation of DenseNets, Pleiss et al. 2017, https://arxiv.org/abs/1707.06990",
        ),
        shown=Shown(norm_stack, share=0.3),
        tips=("C7",),
        excludes={
            **dict.fromkeys(
                ("checkpoint", "selective_checkpoint", "checkpoint_sequential", "sqrt_segments"), FORGOTTEN
            ),
            "offload": FORGOTTEN,
        },
        apply=_apply,
        outside=lambda: recompute_outside(concatenations=False),
    ),
)
