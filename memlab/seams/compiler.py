"""Private hooks between global module hooks and torch.compile, so that what is compiled is compiled once.

Dynamo guards on the global module hooks. Up to PyTorch 2.13 it does so only where it traced them, so hooks that are hidden
while it compiles change nothing. From 2.15 on a module compiled in place (`module.compile()`) is guarded on there being
none; hidden hooks would then make it compile again at every call. There they stay visible, always the same functions
under the same key, which makes one more compilation in all: one graph with hooks, one without.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as modules

_COMPILER = "torch._dynamo.callback"
HIDES_HOOKS = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 14)
"""Whether hooks are hidden while Dynamo compiles; seen to help in 2.11 to 2.13 and to harm in 2.15, 2.14 was not tried."""


def show_module_hooks(key: int, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Let `before(module, args)` and `after(module, args, kwargs, output)` be called around the forward of every module.

    torch.nn.modules.module._global_forward_hooks and its three neighbours, seen in 2.11 to 2.15. The public functions would
    give them a new key at every registration, and Dynamo guards on the keys.
    """
    modules._global_forward_pre_hooks[key] = before
    modules._global_forward_hooks[key] = after
    modules._global_forward_hooks_always_called[key] = True
    modules._global_forward_hooks_with_kwargs[key] = True


def hide_module_hooks(key: int) -> None:
    """Take the hooks of this key away; those of others stay."""
    tables = (modules._global_forward_pre_hooks, modules._global_forward_hooks)
    options = (modules._global_forward_hooks_always_called, modules._global_forward_hooks_with_kwargs)
    for table in (*tables, *options):
        table.pop(key, None)


def compiler_is_loaded() -> bool:
    """Whether Dynamo has been imported; memlab never imports it."""
    return _COMPILER in sys.modules


def watch_compilations(begin: Callable[..., Any], end: Callable[..., Any]) -> Any:
    """Let Dynamo call `begin` and `end` around each of its compilations; None where it is not loaded.

    torch._dynamo.callback.callback_handler, seen in 2.11 to 2.15.
    """
    callbacks = getattr(sys.modules.get(_COMPILER), "callback_handler", None)
    if callbacks is not None:
        callbacks.register_start_callback(begin)
        callbacks.register_end_callback(end)
    return callbacks


def forget_compilations(callbacks: Any, begin: Callable[..., Any], end: Callable[..., Any]) -> None:
    """Take back `watch_compilations`; `torch._dynamo.reset()` may have done it already."""
    with contextlib.suppress(ValueError):
        callbacks.remove_start_callback(begin)
    with contextlib.suppress(ValueError):
        callbacks.remove_end_callback(end)
