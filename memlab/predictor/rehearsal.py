"""A rehearsal: code written for "cuda" runs on a pretend card, in the process it is called in, and leaves a trace.

For a child process: what the code turned into pretend tensors stays pretend (see `child`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.predictor import child, selftest
from memlab.predictor.cards import Card
from memlab.predictor.pretend import PretendCuda
from memlab.predictor.probe import PretendProbe
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
