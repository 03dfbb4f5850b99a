"""Rules: what a CUDA kernel allocates where PyTorch's shape functions show something else, one function per operator.

    @rule("aten.native_dropout.default")
    def dropout(func, args, kwargs, run): ...

A rule stands in for its operator on pretend tensors. It may call `run.op(func, *args, **kwargs)` (the operator by its shape
function, births logged in the order of its results), ordinary torch functions on pretend tensors (each with its own rules,
logged on its own), `run.empty(shape, dtype)`, `run.scratch(nbytes)` and `run.hold(nbytes)` / `run.release(block)` for
memory that belongs to no tensor, and `run.assume(text)`.

Operators that PyTorch decomposes (`aten.dropout.default`) may have one too: it then runs above autograd, in forward and when
a checkpoint is recomputed, and is made of differentiable calls; `run.plain(func, *args, **kwargs)` is PyTorch's own
decomposition.

What has to be installed for the whole time (kernels at other dispatch keys, patches of functions) is a context manager
registered with `@installer`, which is given (run, patches). Every module of this package is loaded when pretend CUDA begins,
so a module brings its rules by being there.

Limits: a rule for a decomposed operator is asked only for calls whose tensors are pretend ones.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]

RULES: dict[str, Rule] = {}
"""Rules by the name of their operator: "aten.native_dropout.default"."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Say that a function is the rule of these operators; names that a version of PyTorch lacks are passed over."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


Installer = Callable[[Any, Any], AbstractContextManager[Any]]
INSTALLERS: list[Installer] = []
"""What is on as long as pretend CUDA is."""


def installer(function: Installer) -> Installer:
    """Register a context manager that is entered with (run, patches)."""
    if all(one.__module__ != function.__module__ or one.__name__ != function.__name__ for one in INSTALLERS):
        INSTALLERS.append(function)
    return function


def load() -> None:
    """Load the modules of this package, which bring the rules."""
    package = importlib.import_module("memlab.predictor.pretend")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"memlab.predictor.pretend.{module.name}")


def operator(name: str) -> Any:
    """The operator behind "namespace.name.overload", None where this PyTorch has none."""
    found: Any = torch.ops
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return None
    return found


def resolved() -> tuple[dict[Any, Rule], dict[Any, Rule]]:
    """The rules by operator: of those that reach the backend, and of those that PyTorch decomposes before."""
    below: dict[Any, Rule] = {}
    above: dict[Any, Rule] = {}
    for name, function in RULES.items():
        func = operator(name)
        if func is not None:
            (above if is_composite(func) else below)[func] = function
    return below, above


CUDA_KERNELS = ("aten._fused_rms_norm.default", "aten.silu_backward.default", "aten.mish_backward.default")
"""Operators that are decomposed unless there is a kernel for the backend, and that have one for CUDA (2.12)."""


def is_composite(func: Any) -> bool:
    """Whether PyTorch decomposes an operator before autograd sees it."""
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    return bool(has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CUDA")) and (
        str(func) not in CUDA_KERNELS
    )
