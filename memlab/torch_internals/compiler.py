"""Private hooks between global module hooks and torch.compile, so that nothing is recompiled.

Dynamo guards on the global module hooks. Up to PyTorch 2.13 it does so only where it traced them, so hooks that are hidden
while it compiles change nothing. From 2.15 on a module compiled in place (`module.compile()`) is guarded on there being
none; hidden hooks would then make it compile again at every call. There they stay visible, always the same functions
under the same key, which makes one more compilation in all: one graph with hooks, one without.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.torch_internals.private_names import private

COMPILER_MODULE = "torch._dynamo.callback"
_TABLES = tuple(
    private(f"torch.nn.modules.module._global_forward_{name}")
    for name in ("pre_hooks", "hooks", "hooks_always_called", "hooks_with_kwargs")
)
_shown: dict[int, Any] = {}
HIDES_HOOKS = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 14)
"""Whether hooks are hidden while Dynamo compiles; seen to help in 2.11 to 2.13, not to be needed in 2.14, and to harm in 2.15."""


def show_module_hooks(key: int, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Let `before(module, args)` and `after(module, args, kwargs, output)` be called around the forward of every module.

    The public functions would give them a new key at every registration, and Dynamo guards on the keys.
    """
    _shown[key] = before, after
    for table, value in zip(_TABLES, (before, after, True, True), strict=True):
        table[key] = value


def hide_module_hooks(key: int) -> None:
    """Take the hooks of this key away; those of others stay."""
    _shown.pop(key, None)
    for table in _TABLES:
        table.pop(key, None)


@contextlib.contextmanager
def without_module_hooks() -> Iterator[None]:
    """Within it no hooks of `show_module_hooks` are there, only those of others."""
    shown = dict(_shown)
    for key in shown:
        hide_module_hooks(key)
    try:
        yield
    finally:
        for key, hooks in shown.items():
            show_module_hooks(key, *hooks)


def compiler_is_loaded() -> bool:
    """Whether Dynamo has been imported; memlab never imports it."""
    return COMPILER_MODULE in sys.modules


def eval_frame() -> Any:
    """Dynamo's module with the class of compiled models (`OptimizedModule`), and what is asked before a compiled function runs."""
    return private("torch._dynamo.eval_frame")


def backend_of(callback: Any) -> tuple[str, bool]:
    """The name of the compiler that Dynamo's callback gives its graphs to, and whether they are to run in CUDA graphs."""
    backend = callback._torchdynamo_orig_backend._torchdynamo_orig_backend
    config: dict[str, Any] = getattr(backend, "get_compiler_config", dict)() or {}
    return str(getattr(backend, "_compiler_name", "")), bool(config.get("triton.cudagraphs"))


def call_of(module: Any) -> Any:
    """What a module runs when it is called: its forward and its hooks (`nn.Module._call_impl`)."""
    return module._call_impl


def is_static(tensor: Any) -> bool:
    """Whether a tensor stays where it is, as parameters and what else modules hold (Dynamo's mark_static_address)."""
    return isinstance(tensor, torch.nn.Parameter) or getattr(tensor, "_dynamo_static_input_type", None) is not None


def traceable(call: Callable[..., Any]) -> Any:
    """The same in a frame that Dynamo traces, where it skips that of `call`."""
    return private("torch._dynamo.external_utils.wrap_inline")(call)


def stand_for(run: Any, function: Any) -> None:
    """Let Dynamo trace `function` where it meets `run` (`_torchdynamo_inline`, 2.5 to 2.15)."""
    run._torchdynamo_inline = function


def set_compiled_call(module: Any, call: Any) -> None:
    """Let a module run this when it is called, as `module.compile()` does (`nn.Module._compiled_call_impl`, 2.2 to 2.15)."""
    module._compiled_call_impl = call


def watch_compilations(begin: Callable[..., Any], end: Callable[..., Any]) -> Any:
    """Let Dynamo call `begin` and `end` around each of its compilations; None where it is not loaded."""
    callbacks = getattr(sys.modules.get(COMPILER_MODULE), "callback_handler", None)
    if callbacks is not None:
        callbacks.register_start_callback(begin)
        callbacks.register_end_callback(end)
    return callbacks


def forget_compilations(callbacks: Any, begin: Callable[..., Any], end: Callable[..., Any]) -> None:
    """Take back `watch_compilations`; `torch._dynamo.reset()` may have done it already."""
    for remove, callback in ((callbacks.remove_start_callback, begin), (callbacks.remove_end_callback, end)):
        with contextlib.suppress(ValueError):
            remove(callback)


def known_to_dynamo() -> list[dict[Any, Any]]:
    """The tables in which Dynamo looks up functions of PyTorch: how it traces them, what handles them, which are constants."""
    variables = private("torch._dynamo.variables.torch")
    handlers = variables.TorchInGraphFunctionVariable._get_handlers()
    return [private("torch._dynamo.trace_rules").get_torch_obj_rule_map(), handlers, variables.constant_fold_functions]


def tensor_classes() -> tuple[dict[Any, Any], Any]:
    """Dynamo's table of the classes of values, and what it does with tensors."""
    builder = private("torch._dynamo.variables.builder.VariableBuilder")
    return builder._type_dispatch(), builder.wrap_tensor


def skip_packages(*names: str) -> Callable[[], None]:
    """Let Dynamo trace no code of these packages until what is returned is called."""
    rules = private("torch._dynamo.trace_rules")
    before = list(rules.SKIP_DIRS)
    for name in names:
        rules.add(name)

    def undo() -> None:
        rules.SKIP_DIRS[:] = before
        rules._recompile_re()

    return undo
