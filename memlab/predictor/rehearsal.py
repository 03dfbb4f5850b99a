"""A rehearsal: code written for "cuda" runs on a pretend card, in the process it is called in, and leaves a trace.

For a child process: what the code turned into pretend tensors stays pretend (see `child`). CUDA tensors that the parent has
alive are pretend ones there, too: it must not touch the driver, and autograd has no thread for them (backward would wait for
ever). A graph that was built before is not followed: its tensors are leaves.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memlab.predictor import child, selftest
from memlab.predictor.cards import Card
from memlab.predictor.pretend import PretendCuda
from memlab.predictor.pretend.tensors import CUDA0, swap, wrapped
from memlab.predictor.probe import PretendProbe
from memlab.seams.dispatch import TensorBase
from memlab.trace.file import dumps
from memlab.trace.trace import Trace

NEWS_EVERY_S = 0.25


@functools.cache
def prepare() -> None:
    """Import in the parent what PyTorch imports for the first fake tensor, or each child would do it again: 1.5 s."""
    with contextlib.suppress(Exception):  # the child says what is wrong
        FakeTensorMode()


@contextlib.contextmanager
def rehearsal(card: Card, conf: str = "", raises_oom: bool = False) -> Iterator[Callable[[], bytes]]:
    """Within it "cuda" is the pretend card; the function it gives has the trace, as bytes, once it has ended.

    With `raises_oom` the code meets an out-of-memory as on the card, and may catch it; else it goes on as if there were room.
    """
    selftest.require()
    traces: list[Trace] = []
    with PretendCuda(card, conf, raises_oom=raises_oom) as pretend, _news(pretend):
        if child.current() is not None and torch.version.cuda is not None:
            adopt(pretend)
        probe = PretendProbe(pretend)
        probe.start()
        try:
            yield lambda: dumps(traces[0])
        finally:
            traces.append(probe.stop())


def rehearsed(step: Callable[[], object], card: Card, conf: str, raises_oom: bool) -> bytes:
    """The trace of a step, as bytes."""
    with rehearsal(card, conf, raises_oom) as finish:
        step()
    return finish()


# --- what the parent has on a real card ------------------------------------------------------------------------------------

_REAL: list[Any] = []
"""What is on the real card: it must live, as letting go of it would be told to the driver."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def adopt(pretend: PretendCuda) -> None:
    """Make every CUDA tensor that Python knows a pretend one, in place: the same objects, sharing what they shared."""
    storages: dict[int, Any] = {}
    found = _on_real_cards()
    built = sum(one.grad_fn is not None for one in found)
    gradients = [(one, one.grad) for one in found if one.is_leaf and one.grad is not None]
    with torch.no_grad(), _disable_current_modes():
        for one in found:
            _adopt(one, storages, pretend)
        for one, gradient in gradients:
            one.grad = gradient
    if found:
        pretend.run.assume(f"{len(found)} CUDA tensors that were there before are on the card, too")
    if built:
        pretend.run.assume(f"{built} of them were results of a graph, which is not there: no backward through it")


def _on_real_cards() -> list[torch.Tensor]:
    known = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter) and _is_real(one)]
    gradients = [one.grad for one in known if one.is_leaf and one.grad is not None]
    return list({id(one): one for one in (*known, *gradients) if _is_real(one)}.values())


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and TensorBase.device.__get__(tensor) == CUDA0


def _adopt(one: torch.Tensor, storages: dict[int, Any], pretend: PretendCuda) -> None:
    real = TensorBase.untyped_storage(one)
    base = storages.get(real._cdata)
    if base is None:
        base = storages[real._cdata] = pretend.run.empty((real.nbytes(),), torch.uint8, op="before the prediction")
    seen = torch.empty(0, dtype=one.dtype, device="meta")
    seen.set_(TensorBase.untyped_storage(base), one.storage_offset(), one.shape, one.stride())
    other = wrapped(seen)
    other.requires_grad_(one.requires_grad and one.is_leaf)
    swap(one, other)
    for hooks in _HOOKS:
        if found := getattr(one, hooks, None):
            setattr(one, hooks, found)  # which tells C++ of them again
    _REAL.append(other)


@contextlib.contextmanager
def _news(pretend: PretendCuda) -> Iterator[None]:
    """Tell the parent now and then how far it is."""
    channel, end = child.current(), threading.Event()
    if channel is None:
        yield
        return

    def tell() -> None:
        while not end.wait(NEWS_EVERY_S):
            channel.send(
                {"events": len(pretend.log), "peak_allocated_bytes": pretend.log.allocator.peak_allocated_bytes}
            )

    teller = threading.Thread(target=tell, name="memlab-news", daemon=True)
    teller.start()
    try:
        yield
    finally:
        end.set()
        teller.join()
