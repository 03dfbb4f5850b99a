"""Rules: the allocations of CUDA kernels that differ from PyTorch's shape functions, one function per operator.

    @rule("native_dropout.default")
    def native_dropout(cuda, func, tensor, p, train): ...

    @scratch("multinomial.default")
    def multinomial(cuda, out, weights, samples, replacement=False, **rest): ...

A rule replaces its ATen operator on fake CUDA tensors and gets its arguments. `cuda` is the OpDispatcher: `cuda.op(func,
*args, **kwargs)` runs the operator by its shape function and logs the results in their order, `cuda.empty(shape, dtype)`
allocates a tensor, `cuda.held(...)` and `cuda.scratch(...)` allocate memory without a tensor, `cuda.assume(text)` records an
assumption. Ordinary torch functions on fake tensors have their own rules and are logged too. `@scratch` is for the common
case: the operator, then scratch memory; the function returns its sizes in order.

An operator that PyTorch decomposes (`dropout.default`) may have a rule too: it runs above autograd, in forward and when a
checkpoint is recomputed, and is made of differentiable calls; `func.decompose(*args, **kwargs)` is PyTorch's decomposition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memlab.torch_internals.cuda_names import has_kernel
from memlab.torch_internals.objects import schema_of

Rule = Callable[..., Any]
FLOAT, LONG = torch.float32, 8
HALVES = (torch.float16, torch.bfloat16)
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

RULES: dict[str, Rule] = {}
"""Rules by the name of their operator: "native_dropout.default"."""

CUDA_KERNELS = ("_fused_rms_norm.default", "silu_backward.default", "mish_backward.default")
"""Operators that are decomposed unless there is a kernel for the backend, and that have one for CUDA (2.12)."""


def registering(table: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """A decorator that enters a function into a table under the names of operators; those that a PyTorch lacks are skipped."""

    def under(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            table.update(dict.fromkeys(names, function))
            return function

        return register

    return under


rule = registering(RULES)
"""Register a function as the rule of these operators."""


def scratch(*names: str) -> Callable[[Rule], Rule]:
    """Register the scratch memory of kernels: a function of (cuda, out, *args, **kwargs) -> sizes."""

    def register(sizes: Rule) -> Rule:
        @rule(*names)
        def kernel(cuda, func, *args, **kwargs):
            out = cuda.op(func, *args, **kwargs)
            cuda.scratch(*sizes(cuda, out, *args, **kwargs), op=func)
            return out

        return sizes

    return register


def operator(name: str) -> Any:
    """The operator "name.overload" of ATen, or "namespace::name.overload"; None if this PyTorch lacks it."""
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def operators(names: Iterable[str]) -> frozenset[Any]:
    """Those of these ATen operators that this PyTorch has."""
    return frozenset(func for name in names if (func := operator(name)) is not None)


def name_of(func: Any) -> str:
    """Without namespace and overload: "native_dropout"."""
    return str(schema_of(func).name.rpartition("::")[2])


def resolved() -> tuple[dict[Any, Rule], dict[Any, Rule]]:
    """The rules by operator: all, and those of operators that PyTorch decomposes above the backend."""
    found = {func: function for name, function in RULES.items() if (func := operator(name)) is not None}
    return found, {func: function for func, function in found.items() if is_composite(func)}


def is_composite(func: Any) -> bool:
    """Whether PyTorch decomposes an operator before autograd sees it."""
    name = func.name()
    is_kernel = has_kernel(name, "CUDA") or str(func).removeprefix("aten.") in CUDA_KERNELS
    return not is_kernel and bool(has_kernel(name, "CompositeImplicitAutograd"))


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """What is in lists and tuples, however they are nested."""
    for one in values:
        if isinstance(one, list | tuple):
            yield from flat(one)
        else:
            yield one


def bytes_of(tensor: Any) -> int:
    """The bytes of a dense copy."""
    return int(tensor.numel() * tensor.element_size())


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step
