"""Pretend CUDA: code written for "cuda" runs on tensors without data, and every byte it asks for is logged.

    with PretendCuda(card) as pretend:
        model = Net().to("cuda"); ...
    pretend.log, pretend.assumptions

Made for a child process: what the code inside turned into pretend tensors stays pretend.

Limits: one at a time per process; work of other threads is seen where pretend tensors are involved. Compiled code runs as
eager code. What depends on values is assumed (see `answers`), and said in `assumptions`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from memlab.allocator import CachingAllocator
from memlab.errors import PredictionError
from memlab.predictor.pretend import blanks, devices, kernels_on, rules, streams
from memlab.predictor.pretend.log import Log
from memlab.predictor.pretend.memory import Memory
from memlab.predictor.pretend.mode import PretendMode
from memlab.predictor.pretend.patches import Patches
from memlab.predictor.pretend.run import Run
from memlab.predictor.pretend.tensors import State
from memlab.seams import dispatch

__all__ = ["PretendCuda"]


class PretendCuda:
    """Within it there is a CUDA device, `card`, that holds no data.

    `conf` is what PYTORCH_CUDA_ALLOC_CONF would say. Where the card is full the code gets the error that it would get, or, with
    `raises_oom=False`, goes on as if there were room. `log` has births and deaths in order, `assumptions` what had to be
    assumed, in order, with how often.
    """

    def __init__(self, card: Any, conf: str = "", *, raises_oom: bool = True) -> None:
        self.card = card
        self.assumptions: Counter[str] = Counter()
        rules.load()
        context = sum(card.context_bytes) // 2
        self.log = Log(CachingAllocator(card.usable_bytes, conf, context, torch_version=torch.__version__), raises_oom)
        self.run = Run(card, self.log, self.assumptions)
        self.mode = self.run.mode = PretendMode(self.run)
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> PretendCuda:
        if State.active is not None:
            raise PredictionError("a prediction is running in this process already: end it before starting another.")
        with contextlib.ExitStack() as stack:
            self._install(stack)
            self._stack = stack.pop_all()
        return self

    def _install(self, stack: contextlib.ExitStack) -> None:
        patches = Patches()
        stack.callback(patches.restore)
        stack.callback(torch.set_default_device, torch.get_default_device() if _has_default() else None)
        stack.callback(_forget)
        devices.put(patches, self.card, Memory(self.card, self.log, self.run.assume), self.assumptions)
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        State.active, streams.Current.log = self, self.log
        stack.enter_context(kernels_on.installed(self.run, patches))
        stack.enter_context(self.mode)
        begin = vars(threading.Thread)["_bootstrap_inner"]  # seen in Python 3.11 to 3.13
        patches.put(threading.Thread, _bootstrap_inner=_with_mode(begin, self.mode))

    @property
    def is_on(self) -> bool:
        """Whether this is the pretend CUDA that code finds now."""
        return State.active is self

    def __exit__(self, *error: Any) -> None:
        assert self._stack is not None
        self.log.settle_deaths()
        stack, self._stack = self._stack, None
        stack.__exit__(*error)


def _with_mode(run_thread: Callable[[Any], None], mode: Any) -> Callable[[Any], None]:
    """Modes belong to threads: those that begin meanwhile get it too."""

    def bootstrap(thread: Any) -> None:
        dispatch.push_mode(mode)
        try:
            run_thread(thread)
        finally:
            dispatch.remove_mode(mode)

    return bootstrap


def _has_default() -> bool:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None


def _forget() -> None:
    State.active, streams.Current.log = None, None
    streams.Current.of_thread.__dict__.clear()
    blanks.forget()
