"""BatchNorm, ReLU and concatenations recomputed in backward: inputs are kept, outputs are recomputed.

Autograd saves tensors through `saved_tensors_hooks`. If a saved tensor is the result of such an operator, the
hook saves a recipe instead: the function and its inputs. Only `functional.batch_norm`,
`functional.relu` (which the layers call) and `torch.cat` are known; a result that was changed in place is saved as usual.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import conv_stack, relu
from memlab.saving_techniques.patching import must_happen
from memlab.saving_techniques.technique import Demo, described
from memlab.torch_internals.layers import BatchNorm
from memlab.workloads.job import Job

RELU = (functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
CAT = (torch.cat, torch.concat, torch.concatenate)


class Recipe:
    """How to recompute a tensor: a function and its inputs, tensors or other recipes."""

    def __init__(self, function: Callable[..., Tensor], inputs: list[Any]) -> None:
        self.function, self.inputs = function, inputs
        self.versions = [one._version if isinstance(one, Tensor) else None for one in inputs]
        self.keep = False
        """Whether the result is kept until `last_value`: its own operator reads it last."""
        self._kept: Tensor | None = None

    def value(self) -> Tensor:
        """The recomputed tensor."""
        value = self._kept
        if value is None:
            for read, version in zip(self.inputs, self.versions, strict=True):
                if isinstance(read, Tensor) and read._version != version:
                    raise DoesNotApply(
                        "a tensor was changed in place after it was read, so its result cannot be recomputed."
                    )
            with torch.no_grad():
                value = self.function(*[one.value() if isinstance(one, Recipe) else one for one in self.inputs])
        self._kept = value if self.keep else None
        return value

    def last_value(self) -> Tensor:
        """The tensor, for the last time."""
        self.keep = False
        return self.value()


class Recomputing(TorchFunctionMode):
    """While active, results of BatchNorm, of ReLU after it and, optionally, of concatenations are saved as recipes."""

    def __init__(self, concatenations: bool = False) -> None:
        super().__init__()
        self.saved = 0
        """How many tensors were saved as recipes."""
        self.recipes: Any = WeakIdKeyDictionary()
        """Storage of a result -> its version, to detect changes, and its recipe."""
        self._rules: dict[Any, Callable[..., Tensor]] = {functional.batch_norm: self._batch_norm}
        self._rules |= dict.fromkeys(RELU, self._relu)
        if concatenations:
            self._rules |= dict.fromkeys(CAT, self._cat)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The context for forward and loss."""

        def pack(tensor: Tensor) -> Any:
            recipe = self._recipe_of(tensor)
            if recipe is None:
                return tensor.detach()  # an output that references its node would be a cycle
            self.saved += 1
            return recipe.value

        try:
            with saved_tensors_hooks(pack, lambda packed: packed if isinstance(packed, Tensor) else packed()), self:
                yield
        finally:
            self.recipes.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply the function's rule, if it has one and a graph is being recorded."""
        rule = self._rules.get(func) if torch.is_grad_enabled() else None
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))

    def _batch_norm(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        call = inspect.signature(functional.batch_norm).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        tensors = [given[name] for name in ("weight", "bias", "running_mean", "running_var")]
        inputs = [self._read(given["input"]), *(one if one is None else one.detach() for one in tensors)]
        self._note(result, Recipe(functools.partial(_batch_norm, given["training"], given["eps"]), inputs))
        return result

    def _relu(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        source = self._recipe_of(x)
        if source is None:
            result: Tensor = func(x, *args, **kwargs)
            return result
        recipe = Recipe(functional.relu, [source])

        def pack(tensor: Tensor) -> Any:  # the result has no recipe before the operator returns
            self.saved += 1
            recipe.keep = True
            return recipe.last_value

        with saved_tensors_hooks(pack, lambda packed: packed()):
            result = func(x, *args, **kwargs)
        self._note(result, recipe)
        return result

    def _cat(self, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        tensors, *rest = args or (kwargs["tensors"],)
        dim = rest[0] if rest else kwargs.get("axis", kwargs.get("dim", 0))
        if "out" not in kwargs and isinstance(dim, int):
            recipe = Recipe(lambda *parts: torch.cat(parts, dim), [self._read(one) for one in tensors])
            self._note(result, recipe)
        return result

    def _note(self, result: Tensor, recipe: Recipe) -> None:
        self.recipes[result.untyped_storage()] = _geometry(result), recipe

    def _recipe_of(self, tensor: Tensor) -> Recipe | None:
        """The recipe of a tensor that is the unchanged result of a rule."""
        geometry, recipe = self.recipes.get(tensor.untyped_storage(), (None, None))
        return recipe if geometry == _geometry(tensor) else None

    def _read(self, tensor: Tensor) -> Recipe | Tensor:
        return self._recipe_of(tensor) or tensor.detach()


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _batch_norm(training: bool, eps: float, x: Tensor, weight: Any, bias: Any, *statistics: Any) -> Tensor:
    """In training, copies of the running statistics are updated; without them the kernel would compute in other dtypes."""
    mean, variance = (one.clone() if training and one is not None else one for one in statistics)
    return functional.batch_norm(x, mean, variance, weight, bias, training, 0.0, eps)


# --- the techniques ---


@contextlib.contextmanager
def _recomputing(concatenations: bool) -> Iterator[Recomputing]:
    what = "concatenation or BatchNorm" if concatenations else "BatchNorm"
    with must_happen(f"no result of a {what} was kept for backward: there is nothing to recompute.") as saved:
        mode = Recomputing(concatenations)
        yield mode
        saved.append(mode.saved > 0)


@contextlib.contextmanager
def _patch(concatenations: bool) -> Iterator[None]:
    with _recomputing(concatenations) as mode, mode.on():
        yield


def _apply(concatenations: bool, job: Job) -> None:
    if not concatenations and not any(isinstance(one, BatchNorm) for one in job.model.modules()):
        raise DoesNotApply(f"{type(job.model).__name__} has no BatchNorm layer whose result could be recomputed.")
    modes: list[Recomputing] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with _recomputing(concatenations) as mode:
            modes[:] = [mode]
            yield

    job.around.append(around)
    job.contexts.append(lambda: modes[0].on())


norm_stack = functools.partial(conv_stack, 6, 8, nn.BatchNorm2d, relu, images=(8, 3, 32))
TECHNIQUES = tuple(
    described(name, demo, functools.partial(_apply, concatenations), patch=functools.partial(_patch, concatenations))
    for name, demo, concatenations in (
        ("densenet", Demo("densenet121", share=0.55), True),
        ("recomputed_norm", Demo(norm_stack, share=0.3), False),
    )
)
