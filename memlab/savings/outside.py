"""Switching a technique on for code that knows nothing of it, for the advisor; only ever entered in a child process.

What is found is changed in place: the outermost modules that are called, the optimizers that step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from memlab import seams
from memlab.errors import DoesNotApply


@contextlib.contextmanager
def on_models(change: Callable[[nn.Module], None]) -> Iterator[None]:
    """Change every outermost module before its first call; raises DoesNotApply at the end where none could be changed.

    `change` may replace children, and raises DoesNotApply where it finds nothing. The module itself stays what it is.
    """
    reasons: list[str] = []
    with _outermost(_counted(change, reasons)):
        yield
    _refuse(reasons, "no module was called")


@contextlib.contextmanager
def on_optimizers(change: Callable[[Optimizer], None]) -> Iterator[None]:
    """Change every optimizer before its first step; raises DoesNotApply at the end where none could be changed."""
    reasons: list[str] = []
    counted = _counted(change, reasons)
    seen: set[int] = set()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in seen:
            seen.add(id(optimizer))
            counted(optimizer)

    hook = register_optimizer_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
    _refuse(reasons, "no optimizer took a step")


def _counted(change: Callable[[Any], None], reasons: list[str]) -> Callable[[Any], None]:
    """The change, with "" in `reasons` for each that was made, and why for each that was not."""

    def counted(what: Any) -> None:
        try:
            with torch.no_grad():
                change(what)
            reasons.append("")
        except DoesNotApply as error:
            reasons.append(str(error))

    return counted


def _refuse(reasons: list[str], nothing: str) -> None:
    if "" not in reasons:
        raise DoesNotApply(reasons[0] if reasons else nothing)


@contextlib.contextmanager
def _outermost(found: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call `found` with each module that is called from no other one, before its first call."""
    depth, seen = 0, set[int]()

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1 and id(module) not in seen and not is_backward():
            seen.add(id(module))
            found(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        with backwards() as is_backward:
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def backwards() -> Iterator[Callable[[], bool]]:
    """Gives what says whether a backward is at work: what it calls is run again, and is no model of its own."""
    running, plain = 0, seams.engine_entry()

    def entry(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        running += 1
        try:
            return plain(*args, **kwargs)
        finally:
            running -= 1

    seams.replace_engine_entry(entry)
    try:
        yield lambda: running > 0
    finally:
        seams.replace_engine_entry(plain)
