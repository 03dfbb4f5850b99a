"""The fixture `leaves_nothing_behind` can fail: each kind of leftover is made, found, and taken away again."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from leftovers import STATES, leftovers, record
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

pytest_plugins = ["pytester"]


def nothing(*_args: object, **_kwargs: object) -> None:
    """A hook that does nothing."""


@contextmanager
def thread(name: str) -> Iterator[None]:
    stop = threading.Event()
    one = threading.Thread(target=stop.wait, name=name, daemon=True)
    one.start()
    yield
    stop.set()
    one.join()


@contextmanager
def handle(register: object, *arguments: object) -> Iterator[None]:
    one = register(*arguments)
    yield
    one.remove()


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def called(do: object, undo: object) -> Iterator[None]:
    do()
    yield
    undo()


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextmanager
def signal_handler() -> Iterator[None]:
    old = signal.signal(signal.SIGUSR2, nothing)
    yield
    signal.signal(signal.SIGUSR2, old)


@contextmanager
def trace_function(module: object, kind: str) -> Iterator[None]:
    old = getattr(module, f"get{kind}")()
    getattr(module, f"set{kind}")(nothing)
    yield
    getattr(module, f"set{kind}")(old)


def found_after(do: object, undo: object) -> list[str]:
    """What is found after `do`; nothing is after `undo`."""
    before = record()
    with called(do, undo):
        found = leftovers(before)
    assert leftovers(before) == []
    return found


module = torch.nn.modules.module
LEAKS = {
    "a thread of ours": ("threads: new 'memlab sampler'", lambda: thread("memlab sampler")),
    "a module hook": ("_global_forward_hooks", lambda: handle(module.register_module_forward_hook, nothing)),
    "a module pre-hook": ("_global_forward_pre", lambda: handle(module.register_module_forward_pre_hook, nothing)),
    "a backward hook": ("_global_backward_pre", lambda: handle(module.register_module_full_backward_pre_hook, nothing)),
    "an optimizer hook": ("_global_optimizer_pre", lambda: handle(register_optimizer_step_pre_hook, nothing)),
    "another optimizer hook": ("_global_optimizer_post", lambda: handle(register_optimizer_step_post_hook, nothing)),
    "a dispatch mode": ("modes: was (0, 0), is (1, 0)", Mode),
    "a function mode": ("modes: was (0, 0), is (0, 1)", lambda: torch.device("meta")),
    "a replaced engine": ("autograd functions", lambda: replaced(torch.autograd, "_engine_run_backward", nothing)),
    "another replaced engine": (
        "autograd functions",
        lambda: replaced(torch.autograd.graph, "_engine_run_backward", nothing),
    ),
    "a replaced backward": ("autograd functions", lambda: replaced(torch.Tensor, "backward", nothing)),
    "another resize": ("functions of storages", lambda: replaced(torch.UntypedStorage, "resize_", nothing)),
    "another beginning of processes": (
        "('_wrap of new processes'",
        lambda: replaced(sys.modules["torch.multiprocessing.spawn"], "_wrap", nothing),
    ),
    "gradients off": ("gradient modes", torch.no_grad),
    "inference mode": ("gradient modes", torch.inference_mode),
    "saved tensor hooks": ("saved tensor hooks", lambda: torch.autograd.graph.saved_tensors_hooks(id, id)),
    "a trace function": ("trace and profile functions: was", lambda: trace_function(sys, "trace")),
    "a profile function": ("profile functions", lambda: trace_function(sys, "profile")),
    "a profile function for threads": ("of new threads", lambda: trace_function(threading, "profile")),
    "a trace function for threads": ("of new threads", lambda: trace_function(threading, "trace")),
    "a signal handler": ("signal handlers", signal_handler),
    "a gc callback": (
        "garbage collector",
        lambda: called(lambda: gc.callbacks.append(nothing), lambda: gc.callbacks.remove(nothing)),
    ),
    "the collector off": ("garbage collector", lambda: called(gc.disable, gc.enable)),
    "an exception hook": ("exception hooks", lambda: replaced(sys, "excepthook", nothing)),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leftover_is_found_and_its_removal_too(kind):
    words, leak = LEAKS[kind]
    before = record()
    with leak():
        found = leftovers(before)
    assert len(found) == 1
    assert words in found[0]
    assert leftovers(before) == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")
def test_a_monitoring_tool_is_found():
    (found,) = found_after(lambda: sys.monitoring.use_tool_id(3, "memlab"), lambda: sys.monitoring.free_tool_id(3))
    assert found.startswith("sys.monitoring tools: ")
    assert "'memlab'" in found


def test_a_thread_that_others_keep_is_no_leftover():
    before = record()
    with thread("IPythonHistorySavingThread"):
        assert leftovers(before) == []


def test_a_thread_of_others_gets_time_to_end():
    before = record()
    threading.Timer(0.05, nothing).start()
    assert leftovers(before) == []


def test_recording_leaves_cuda_alone():
    was = torch.cuda.is_initialized()
    record()
    assert torch.cuda.is_initialized() == was


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    was_there = InteractiveShell.initialized()
    yield InteractiveShell.instance()
    if not was_there:
        InteractiveShell.clear_instance()


def memlab_transform(lines: list[str]) -> list[str]:
    """Its module is this test's; what tells is the name."""
    return lines


@pytest.mark.parametrize("place", ["cleanup_transforms", "line_transforms"])
def test_a_transformer_is_found(shell, place):
    transforms = getattr(shell.input_transformer_manager, place)
    (found,) = found_after(lambda: transforms.append(memlab_transform), lambda: transforms.remove(memlab_transform))
    assert place in found


def test_an_event_callback_is_found(shell):
    event = "post_run_cell", memlab_transform
    (found,) = found_after(lambda: shell.events.register(*event), lambda: shell.events.unregister(*event))
    assert "event post_run_cell" in found


def test_in_a_shell_that_is_new_only_what_is_ours_counts(shell):
    before = {**record(), "IPython's hooks": None}
    assert leftovers(before) == []
    shell.input_transformers_post.append(memlab_transform)
    found = leftovers(before)
    shell.input_transformers_post.remove(memlab_transform)
    assert len(found) == 1
    assert "memlab_transform" in found[0]


@pytest.mark.simulated
def test_allocator_history_is_found():
    torch.cuda.init()
    history = torch.cuda.memory._record_memory_history
    assert found_after(history, lambda: history(enabled=None)) == ["CUDA allocator history: was False, is True"]


def test_every_state_is_proven_somewhere_here():
    source = " ".join([*(words for words, _ in LEAKS.values()), "sys.monitoring tools"])
    by_hand = {"threads", "CUDA allocator history", "IPython's hooks", "torch's global hooks"}
    unproven = [name for name in STATES if name not in by_hand and not set(name.split()) & set(source.split())]
    assert unproven == []


def test_the_fixture_fails_the_test_that_leaks(pytester, request, monkeypatch):
    here = request.config.rootpath / "tests"
    pytester.makeconftest((here / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n  browser\n  gpu\n  simulated\n")
    pytester.makepyfile("""
        import signal
        def test_leaks():
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        def test_does_not():
            pass
    """)
    monkeypatch.setenv("PYTHONPATH", str(here))
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    done.assert_outcomes(passed=2, errors=1)
    done.stdout.fnmatch_lines(["*the test did not clean up:*", "*signal handlers: new ('SIGUSR2'*gone ('SIGUSR2'*"])
