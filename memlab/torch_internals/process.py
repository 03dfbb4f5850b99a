"""Private hooks of CPython, PyTorch and asyncio, for a child that is forked from a live kernel.

Nothing here imports torch, IPython or a loader of its own accord: what is not loaded needs no mending.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from memlab.errors import PredictionError


def can_skip_handlers() -> bool:
    """Whether libc has `_Fork` (glibc 2.34, musl 1.2.3), which runs no handler that was left with pthread_atfork."""
    return hasattr(ctypes.PyDLL(None), "_Fork")


def fork(skip_handlers: bool) -> int:
    """Fork by libc's `fork` or `_Fork`, with what CPython does before and after: PyOS_BeforeFork and PyOS_AfterFork_*.

    `os.fork` does the same, and from Python 3.12 on warns of every thread in the process. The three functions belong to
    the public C API (CPython 3.7 to 3.13). Not one bytecode may run in the child before PyOS_AfterFork_Child: where a
    thread of the parent was waiting for the GIL the child would hand it over and wait forever (drop_gil in
    Python/ceval_gil.h). So the calls are chained by C functions alone.
    """
    libc = ctypes.PyDLL(None)  # PyDLL: keeps the GIL during the call
    before, parent, child = libc.PyOS_BeforeFork, libc.PyOS_AfterFork_Parent, libc.PyOS_AfterFork_Child
    for function in (before, parent, child):
        function.restype = None
    clone = libc._Fork if skip_handlers else libc.fork
    pids, answer = itertools.tee(map(operator.call, (clone,)))
    after = map({0: child}.get, pids, (parent,))
    chain = itertools.chain((before,), after)
    list(map(operator.call, chain))  # before(), pid = clone(), then child() or parent()
    pid = int(next(answer))
    if pid < 0:
        raise OSError("the system made no new process (its limit of processes, or of memory?)")
    return pid


def leave_running_loop() -> None:
    """Let the thread have no running event loop; asyncio._set_running_loop, seen in CPython 3.7 to 3.13.

    The loop of the kernel shares its epoll with the parent of a fork, so the child must not touch it.
    """
    asyncio._set_running_loop(None)


def disown_loaders() -> None:
    """Keep off iterators of DataLoaders that were there before a fork; loaders start workers of their own.

    `_MultiProcessingDataLoaderIter._shutdown_workers` (called by its `__del__`: it would stop the workers of the process
    that was forked), its `_next_data`, and `DataLoader._iterator`, where persistent workers are kept; seen in 2.11 to 2.15.
    The classes are changed, and not the objects: finding those takes half a second, and copies every page of Python's.
    """
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    if module is None:
        return
    kind, loader = module._MultiProcessingDataLoaderIter, module.DataLoader
    stop, next_data, iterate, own = kind._shutdown_workers, kind._next_data, loader.__iter__, _made_from_now_on(kind)

    def stop_own(self: Any) -> None:
        if self in own:
            stop(self)

    def next_of_own(self: Any) -> Any:
        if self not in own:
            raise PredictionError(
                "the workers of this DataLoader iterator belong to the notebook, and a child cannot share them; "
                "make the iterator, iter(loader), inside of what is predicted."
            )
        return next_data(self)

    def iterate_own(self: Any) -> Any:
        if self._iterator is not None and self._iterator not in own:
            self._iterator = None
        return iterate(self)

    kind._shutdown_workers, kind._next_data, loader.__iter__ = stop_own, next_of_own, iterate_own


def disown_pools() -> None:
    """Let thread pools that were there before a fork start threads anew: a task would wait for the old ones forever.

    ThreadPoolExecutor._threads, _work_queue and _idle_semaphore, seen in CPython 3.9 to 3.13.
    """
    module: Any = sys.modules.get("concurrent.futures.thread")
    if module is None:
        return
    kind = module.ThreadPoolExecutor
    submit, own = kind.submit, _made_from_now_on(kind)

    def submit_to_own(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in own:
            own.add(self)
            self._threads, self._work_queue = set(), type(self._work_queue)()
            self._idle_semaphore = threading.Semaphore(0)
        return submit(self, *args, **kwargs)

    kind.submit = submit_to_own


def _made_from_now_on(kind: Any) -> weakref.WeakSet[Any]:
    """The instances of a class that are made from here on."""
    begin, own = kind.__init__, weakref.WeakSet[Any]()

    def begin_own(self: Any, *args: Any, **kwargs: Any) -> None:
        own.add(self)
        begin(self, *args, **kwargs)

    kind.__init__ = begin_own
    return own


def disown_processes() -> None:
    """Forget the processes that the parent of a fork started, and its folder for their sockets.

    multiprocessing.process._children and the "tempdir" of the current process's `_config`, seen in CPython 3.4 to 3.13.
    """
    module = sys.modules.get("multiprocessing.process")
    if module is not None:
        module._children.clear()
        module.current_process()._config.pop("tempdir", None)


def keep_one_thread() -> None:
    """Let torch compute on one thread, whatever is asked of it later.

    libgomp's workers do not exist after a fork, and an operation on two threads would wait for them forever
    (pytorch issue 17199); `torch.set_num_threads` is replaced by a function that does nothing.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        torch.set_num_threads = lambda count: None


def divert_torch_files(divert: Callable[[str], str]) -> None:
    """Let `divert(path)` say where torch writes instead, when it opens a file in C++, which no audit hook sees.

    torch._C.PyTorchFileWriter, which torch.serialization calls with a path or a file object; seen in 2.11 to 2.15.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    writer = torch._C.PyTorchFileWriter

    def diverted(target: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(target, str | bytes | os.PathLike):
            target = divert(os.fsdecode(target))
        return writer(target, *args, **kwargs)

    torch._C.PyTorchFileWriter = diverted


def gpu_in_sight() -> bool:
    """Whether torch sees a GPU: then a backward pass, of CPU tensors too, has made autograd refuse to run in a fork.

    torch/csrc/autograd/engine.cpp, track_bad_autograd_forks: a flag set by a pthread_atfork handler, for good.
    """
    with contextlib.suppress(Exception):
        return bool(sys.modules["torch"].cuda.is_available())
    return False
