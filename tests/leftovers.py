"""What a test must not leave behind: `before = record()`, then `leftovers(before)` says what is different, in words.

It does not clean up: the test has to.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def record() -> Record:
    """Name -> state of everything that is compared. Asking imports nothing and starts nothing."""
    return {name: state() for name, state in STATES.items()}


def leftovers(before: Record) -> list[str]:
    """One line for each state that is not what it was; empty when all is well."""
    let_others_end(before["threads"])
    now = record()
    if before["IPython's hooks"] is None:  # a test may make a shell: then only what is ours counts
        before = {**before, "IPython's hooks": frozenset()}
        now["IPython's hooks"] = frozenset(hook for hook in now["IPython's hooks"] or () if "memlab" in hook[1])
    changed = [name for name in STATES if before[name] != now[name]]
    return [difference(name, before[name], now[name]) for name in changed]


def let_others_end(before: frozenset[threading.Thread]) -> None:
    """Two seconds for threads of others that were told to end and not waited for; ours have to be joined already."""
    for thread in threads() - before:
        if not thread.name.startswith("memlab"):
            thread.join(2.0)


def difference(name: str, before: object, now: object) -> str:
    """What changed, named as shortly as the kind of state allows."""
    if isinstance(before, frozenset) and isinstance(now, frozenset):
        words = [f"new {', '.join(map(show, now - before))}" if now - before else ""]
        words += [f"gone {', '.join(map(show, before - now))}" if before - now else ""]
        return f"{name}: {'; '.join(filter(None, words))}"
    return f"{name}: was {show(before)}, is {show(now)}"


def show(value: object) -> str:
    """A thread by its name, anything else by its repr."""
    return repr(value.name) if isinstance(value, threading.Thread) else repr(value)


# Threads that others start once and keep for the life of the process; none of them is ours.
HARMLESS_THREADS = (
    "execnet",  # pytest-xdist's channel to its workers
    "IPythonHistorySavingThread",  # IPython's, from the first shell on
    "Thread-history",  # the same in other versions
    "asyncio_",  # the default executor of an event loop that lives longer than the test
    "InductorSubproc",  # torch.compile's compile workers
    "tqdm_monitor",
    "pydevd",
)


def threads() -> frozenset[threading.Thread]:
    """Living threads that somebody has to stop."""
    return frozenset(t for t in threading.enumerate() if not is_harmless(t))


def is_harmless(thread: threading.Thread) -> bool:
    """A dummy stands for a thread that Python did not start (torch's backward threads) and cannot be stopped."""
    return isinstance(thread, threading._DummyThread) or thread.name.startswith(HARMLESS_THREADS)


def torch_global_hooks() -> frozenset[tuple[str, int]]:
    """The hooks that run for every module and every optimizer, as (table, id of the handle)."""
    return frozenset((name, handle) for name, hooks in hook_tables() for handle in hooks)


def hook_tables() -> Iterator[tuple[str, Mapping[int, Callable[..., Any]]]]:
    """Every `_global_*` table of hooks in torch's modules and optimizers; none where torch is not loaded."""
    for place in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, value in sorted(vars(sys.modules.get(place, object)).items()):
            if name.startswith("_global_") and isinstance(value, Mapping):
                yield name, value


def of_torch(ask: Callable[[Any], Any]) -> Callable[[], Any]:
    """A state that is None as long as torch is not loaded."""

    def state() -> Any:
        torch = sys.modules.get("torch")
        return ask(torch) if torch is not None else None

    return state


def dispatch_modes(torch: Any) -> tuple[int, int]:
    """How many modes see every operator, and how many see every torch function, in this thread."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def engines(torch: Any) -> tuple[int, ...]:
    """Who answers to a backward pass, and what `Tensor` and `Optimizer` do: replaced functions have another id."""
    return (
        id(torch.autograd._engine_run_backward),
        id(torch.autograd.graph._engine_run_backward),
        id(torch.autograd.backward),
        id(torch.autograd.grad),
        id(torch.Tensor.backward),
        id(torch.nn.Module.__call__),
        id(torch.optim.Optimizer.profile_hook_step),
    )


def storages_and_ranks(torch: Any) -> frozenset[tuple[str, int]]:
    """What resizes storages, where new processes begin, and functions of FSDP that memlab has wrapped."""
    found = {("UntypedStorage.resize_", id(vars(torch.UntypedStorage).get("resize_")))}
    found.add(("_wrap of new processes", id(vars(sys.modules["torch.multiprocessing.spawn"]).get("_wrap"))))
    for module, names in FSDP.items():
        for holder in filter(None, (getattr(sys.modules.get(module), name, None) for name in names)):
            for name, function in [*vars(holder).items()] if isinstance(holder, type) else [("", holder)]:
                code = getattr(function, "__code__", None)
                if code is not None and code.co_filename.startswith(MEMLAB):
                    found.add((f"{holder.__qualname__}.{name}", id(function)))
    return frozenset(found)


MEMLAB = str(Path(__file__).resolve().parent.parent / "memlab") + os.sep  # other folders may have it in their name
FSDP = {
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("FSDPParamGroup",),
    "torch.distributed.fsdp._flat_param": ("FlatParamHandle",),
    "torch.distributed.fsdp._runtime_utils": ("_reduce_grad",),
}


def grad_modes(torch: Any) -> tuple[bool, ...]:
    """Whether gradients, inference, anomaly detection and deterministic algorithms are on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def saved_tensor_hooks(torch: Any) -> bool:
    """Whether pack and unpack hooks are still in place for saved tensors."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(False) is not None


def allocator_history(torch: Any) -> bool:
    """Whether CUDA's allocator records its history. The question itself crashes before CUDA is initialized."""
    return torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()


def tracers() -> tuple[Any, Any]:
    """The trace and the profile function of this thread."""
    return sys.gettrace(), sys.getprofile()


def tracers_of_new_threads() -> tuple[Any, Any]:
    """Those that threads get which are started from now on."""
    return threading.gettrace(), threading.getprofile()


def monitoring_tools() -> tuple[Any, ...]:
    """Who has registered with `sys.monitoring` (Python 3.12 and later)."""
    monitoring = getattr(sys, "monitoring", None)
    return tuple(monitoring.get_tool(tool) for tool in range(6)) if monitoring else ()


def signal_handlers() -> frozenset[tuple[str, Any]]:
    """The handler of every signal but SIGALRM: pytest-timeout's own clock, which it stops early when a test fails."""
    numbers = signal.valid_signals() - {getattr(signal, "SIGALRM", None)}
    return frozenset((getattr(number, "name", str(number)), signal.getsignal(number)) for number in numbers)


def gc_state() -> tuple[Any, ...]:
    """Whether the collector runs, its thresholds, and how many want to be told (hypothesis adds one and keeps it)."""
    callbacks = [c for c in gc.callbacks if not (getattr(c, "__module__", "") or "").startswith("hypothesis")]
    return gc.isenabled(), gc.get_threshold(), tuple(map(id, callbacks))


def exception_hooks() -> tuple[int, ...]:
    """Who is told of errors that nobody caught, and who prints a value."""
    return tuple(map(id, (sys.excepthook, threading.excepthook, sys.unraisablehook)))


def ipython_hooks() -> frozenset[tuple[str, str]] | None:
    """Input transformers and event callbacks of the IPython shell, as (place, function); None without a shell."""
    module = sys.modules.get("IPython.core.interactiveshell")
    if module is None or not module.InteractiveShell.initialized():
        return None
    shell = module.InteractiveShell.instance()
    manager = shell.input_transformer_manager
    hooks = [
        ("cleanup_transforms", manager.cleanup_transforms),
        ("line_transforms", manager.line_transforms),
        ("token_transformers", manager.token_transformers),
        ("input_transformers_post", shell.input_transformers_post),
        ("ast_transformers", shell.ast_transformers),
        *((f"event {name}", callbacks) for name, callbacks in shell.events.callbacks.items()),
    ]
    return frozenset((place, qualified(function)) for place, functions in hooks for function in functions)


def qualified(thing: Any) -> str:
    """A callable by module and name, an object by its class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


STATES: dict[str, Callable[[], Any]] = {
    "threads": threads,
    "torch's global hooks": torch_global_hooks,
    "torch's dispatch and function modes": of_torch(dispatch_modes),
    "torch's autograd functions": of_torch(engines),
    "functions of storages, FSDP and new processes": of_torch(storages_and_ranks),
    "torch's gradient modes": of_torch(grad_modes),
    "torch's saved tensor hooks": of_torch(saved_tensor_hooks),
    "CUDA allocator history": of_torch(allocator_history),
    "trace and profile functions": tracers,
    "trace and profile functions of new threads": tracers_of_new_threads,
    "sys.monitoring tools": monitoring_tools,
    "signal handlers": signal_handlers,
    "garbage collector": gc_state,
    "exception hooks": exception_hooks,
    "IPython's hooks": ipython_hooks,
}
