"""Rules for operators that PyTorch decomposes: put where the dispatcher decomposes them, for pretend tensors alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from memlab.predictor.pretend.patches import Patches
from memlab.predictor.pretend.rules import CUDA_KERNELS, INSTALLERS, operator
from memlab.predictor.pretend.run import Run
from memlab.predictor.pretend.tensors import bare, is_pretend


@contextlib.contextmanager
def installed(run: Run, patches: Patches) -> Iterator[None]:
    """Within it the rules of composite operators stand in for their decomposition, and what modules install is on."""
    library = torch.library.Library("aten", "IMPL")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        for name in CUDA_KERNELS:
            _claim(library, operator(name))
        for func, rule in run.above.items():
            _put(library, func, rule, run)
        for one in INSTALLERS:
            stack.enter_context(one(run, patches))
        yield


def _claim(library: Any, func: Any) -> None:
    """Let autograd take an operator whole, as where CUDA has a kernel for it (Dispatcher: computeDispatchTableEntry)."""
    if func is None or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA"):
        return

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return func.decompose(*args, **kwargs)  # of the tensors that shape functions work with

    library.impl(func, kernel, "CUDA")


def _put(library: Any, func: Any, rule: Any, run: Run) -> None:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _has_pretend(args) or _has_pretend(tuple(kwargs.values())):
            try:
                return rule(func, args, kwargs, run)
            except BaseException as problem:
                error = bare(problem)
            try:
                raise error
            finally:  # a frame that holds its own error keeps all frames alive until the garbage is collected
                del args, kwargs, error
        return func.decompose(*args, **kwargs)  # of the tensors that shape functions work with

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel of PyTorch's is overridden is meant
        library.impl(func, kernel, "AutogradCUDA", allow_override=True)


def _has_pretend(values: Any) -> bool:
    return any(_has_pretend(one) if isinstance(one, list | tuple) else is_pretend(one) for one in values)
