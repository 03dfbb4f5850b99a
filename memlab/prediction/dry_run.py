"""A dry run: code written for "cuda" runs on a fake GPU, in the calling process, and yields a trace.

For a child process: tensors that became fake stay fake. The parent's live CUDA tensors become fake there too: a child must
not touch the driver, and autograd has no thread for them (backward would wait forever). Existing graphs are not there:
their results are leaves, which hold what the graph had saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from memlab.fake_cuda import FakeCuda, gpus
from memlab.fake_cuda.devices import ASKED_FREE, import_scripts
from memlab.fake_cuda.process_groups import ThisRank
from memlab.fake_cuda.tensors import new_tensor, swap
from memlab.prediction import child, selftest
from memlab.prediction.cards import Card
from memlab.prediction.child import ChildOutcome
from memlab.prediction.probe import NOTES, FakeCudaProbe
from memlab.probes.line_marks import Lines
from memlab.torch_internals import graph
from memlab.torch_internals.cuda_names import _disable_current_modes
from memlab.torch_internals.dispatch import TensorBase
from memlab.torch_internals.fakes import FakeTensorMode
from memlab.torch_internals.objects import storage_id
from memlab.trace.file import dumps, loads
from memlab.trace.trace import Trace
from memlab.units import ByteRange, format_bytes

NEWS_EVERY_S = 0.25


@functools.cache
def prepare() -> None:
    """Do in the parent what comes first: imports for fake tensors, which each child would do again (1.7 s), and an error of C++.

    The first takes a lock of libc (`atexit`). In a child that was forked while another thread had it, it would wait forever.
    """
    with contextlib.suppress(RuntimeError):
        torch.device("none")
    with contextlib.suppress(Exception):  # the child reports errors
        FakeTensorMode()
        import_scripts()


@contextlib.contextmanager
def dry_run(
    card: Card,
    conf: str = "",
    raises_oom: bool = False,
    job: ThisRank | None = None,
    make_lines: Callable[[], Lines] | None = None,
    given: Mapping[str, Any] | None = None,
    torch_version: str = "",
    devices: int = 1,
    makes_all: bool = False,
) -> Iterator[Callable[[], bytes]]:
    """A context in which "cuda" is the fake GPU; it yields a function that returns the trace as bytes once it has ended.

    With `raises_oom` the code gets the out-of-memory error of the card, and may catch it; otherwise memory is unlimited. `job`
    says which rank of a distributed job it is. `make_lines` gives what follows the lines of the code, `given` values by key, to
    take for those that only a GPU computes. It is for this PyTorch, or another `torch_version`. `devices` is how many of the
    card there are. Code that `makes_all` that it uses finds the card empty: no CUDA tensor of the parent is there.
    """
    selftest.require()
    traces: list[Trace] = []
    how: dict[str, Any] = {"job": job, "given": given, "torch_version": torch_version, "devices": devices}
    with FakeCuda(card, conf, raises_oom=raises_oom, **how) as fake, _news(fake):
        if child.current() is not None and torch.version.cuda is not None:
            adopt(fake, is_on_card=not makes_all)
        probe = FakeCudaProbe(fake, make_lines() if make_lines is not None else None)
        probe.start()
        try:
            yield lambda: dumps(traces[0])
        finally:
            traces.append(probe.stop())


@contextlib.contextmanager
def _news(fake: FakeCuda) -> Iterator[None]:
    channel, end = child.current(), threading.Event()
    if channel is None:
        yield
        return

    def send() -> None:
        while not end.wait(NEWS_EVERY_S):
            peak = max(one.peak_allocated_bytes for one in fake.log.allocators)
            channel.send({"events": len(fake.log), "peak_allocated_bytes": peak})

    sender = threading.Thread(target=send, name="memlab-news", daemon=True)
    sender.start()
    try:
        yield
    finally:
        end.set()
        sender.join()


def dry_runs(
    card: Card, run: Callable[[Card, float | None, bool], ChildOutcome], limit_s: float | None = None
) -> tuple[ChildOutcome, list[Trace]]:
    """Dry-run a program once, and again for both ends of what is a range and may change its requests.

    Scratch buffers of kernels depend on the card's multiprocessors; a cache that fills what is free, on the CUDA context.
    `run(card, limit_s, is_first)` dry-runs it in a child; all of it takes at most `limit_s`. Returns the first outcome, whose
    notes say what is missing, and the traces.
    """
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    first = run(card, limit_s, True)
    if first.result is None:
        return first, []
    selftest.passed()
    traces, notes = [loads(first.result)], list(first.notes)
    counts = sorted({*card.plausible_multiprocessors} - {card.multiprocessors})
    variants = [(f"{count} multiprocessors", dataclasses.replace(card, multiprocessors=count)) for count in counts]
    if any(text == ASKED_FREE for text, _ in traces[0].notes[NOTES]["assumptions"]):
        variants += _with_most_and_least_free(card)
    if first.error is not None and not len(traces[0].events):  # it failed before there was anything to be a range
        variants = []
    for name, variant in variants:
        left_s = deadline - time.monotonic()
        result, why = None, "it could not be predicted"
        if first.error is not None or first.started:  # real side effects must not be repeated
            why = "it was not predicted, as the program " + ("started others" if first.started else "failed")
        elif left_s <= 0:
            why = "there was no time to predict it"
        else:
            result = run(variant, None if limit_s is None else left_s, False).result
        if result is None:
            notes.append(f"With {name} {why}: the range does not cover it.")
        else:
            traces.append(loads(result))
    return dataclasses.replace(first, notes=tuple(notes)), traces


def _with_most_and_least_free(card: Card) -> list[tuple[str, Card]]:
    low, high = card.context_bytes
    ends = ((low, card.usable_high_bytes), (high, card.usable_bytes))
    return [
        (
            f"a CUDA context of {format_bytes(context)}",
            dataclasses.replace(
                card, context_bytes=ByteRange(context, context), usable_bytes=usable, usable_high_bytes=usable
            ),
        )
        for context, usable in ends
    ]


_REAL: list[Any] = []
"""Tensors on the real GPU: kept alive, as freeing them would call the driver."""


def adopt(fake: FakeCuda, is_on_card: bool = True) -> None:
    """Make every CUDA tensor of the parent that Python knows a fake one, in place: same objects, same sharing.

    Those that are not to be on the card stay as they are: nothing may use them.
    """
    there = gpus.GPUS[: fake.devices]
    known = _known_to_python(there)
    gradients = [(one, one.grad) for one in known if one.is_leaf and one.grad is not None]
    found = {id(one): one for one in (*known, *(grad for _, grad in gradients)) if _is_real(one, there)}
    if not is_on_card:
        _REAL.extend(found.values())
        return
    built = [one for one in found.values() if one.grad_fn is not None]
    storages: dict[int, Any] = {}

    def stand_in(real: torch.Tensor) -> Any:
        """The fake bytes of a tensor's storage."""
        storage = TensorBase.untyped_storage(real)
        if storage_id(storage) not in storages:
            with gpus.on(storage.device.index):
                made = fake.dispatcher.empty((storage.nbytes(),), torch.uint8, op="before the prediction")
            storages[storage_id(storage)] = made
        return storages[storage_id(storage)]

    with torch.no_grad(), _disable_current_modes():
        _keep_saved(built, lambda saved: stand_in(saved) if _is_real(saved, there) else None)
        for one in found.values():
            with gpus.on(one.device.index):
                other = new_tensor((0,), (1,), one.dtype)
            base = TensorBase.untyped_storage(stand_in(one))
            other.set_(base, one.storage_offset(), one.shape, one.stride())
            other.requires_grad_(one.requires_grad and one.is_leaf)
            swap(one, other)
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if set_by_user := getattr(one, hooks, None):
                    setattr(one, hooks, set_by_user)  # which registers them in C++ again
            _REAL.append(other)
        for one, gradient in gradients:
            one.grad = gradient
    if found:
        fake.dispatcher.assume(f"{len(found)} CUDA tensors that were there before are on the card, too")
    if built:
        what = "results of a graph: what it saved is on the card, too, but no backward goes through it"
        fake.dispatcher.assume(f"{len(built)} of them were {what}")


def _known_to_python(there: Sequence[torch.device]) -> list[torch.Tensor]:
    """The tensors on these GPUs that something in Python refers to, and those that no graph keeps either.

    PyTorch keeps the Python object of a tensor that is left to a graph alone, and nothing would ever free its fake.
    """
    kinds, objects = (torch.Tensor, torch.nn.Parameter), gc.get_objects()
    found = {id(one): one for one in objects if type(one) in kinds and _is_real(one, there)}
    results = [one for one in found.values() if one.grad_fn is not None]
    unknown = found.keys() & {id(thing) for _, what, thing in _held_by_graphs(results) if what == "saved"}
    frames: list[FrameType | None] = [*sys._current_frames().values()] if unknown else []
    while frames:
        if (frame := frames.pop()) is not None:
            unknown -= set(map(id, frame.f_locals.values()))
            frames.append(frame.f_back)
    for start in range(0, len(objects) if unknown else 0, _AT_ONCE):
        unknown -= set(map(id, gc.get_referents(*objects[start : start + _AT_ONCE])))
    return [one for key, one in found.items() if key not in unknown]


_AT_ONCE = 1000
"""How many objects are asked for what they refer to at once."""

_SAVED: dict[int, dict[int, Any]] = {}
"""Id of a result -> what stands for the tensors that its graph holds, as long as the result is alive."""


def _keep_saved(results: list[torch.Tensor], stand_in: Callable[[torch.Tensor], Any]) -> None:
    """Let each result hold its graph's leaves, and what that saved for backward; what several share goes with the last of them."""
    holds = [dict[int, Any]() for _ in results]
    for number, what, thing in _held_by_graphs(results):
        # A leaf is held itself, as its gradient lives as long.
        kept = holds[thing] if what == "result" else thing if what == "leaf" else stand_in(thing)
        if kept is not None:
            holds[number][id(kept)] = kept
    for result, held in zip(results, holds, strict=True):
        _SAVED[id(result)] = held
        weakref.finalize(result, _SAVED.pop, id(result), None).atexit = False


def _held_by_graphs(results: Sequence[torch.Tensor]) -> Iterator[tuple[int, str, Any]]:
    """What the graph of each result holds: its number, and a "leaf", a "saved" tensor, or the number of a "result" that has it."""
    owners: dict[int, int] = {}  # id of a node -> the result that led to it first
    nodes: list[Any] = []  # held, or another node could get the id of a freed one
    for number, result in enumerate(results):
        waiting = [graph.node_of(result)]
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            if id(node) in owners:
                if (owner := owners[id(node)]) != number:
                    yield number, "result", owner
                continue
            owners[id(node)] = number
            nodes.append(node)
            if (getters := graph.node_getters(type(node))) is None:
                continue
            following, saves, leaf = getters
            if leaf is not None and (one := leaf(node)) is not None:
                yield number, "leaf", one
            waiting += graph.following(node, following)
            for _, saved in graph.saved_by(node, saves):
                if graph.is_plain(saved):
                    yield number, "saved", saved
                    waiting.append(graph.node_of(saved))


def _is_real(tensor: torch.Tensor, there: Sequence[torch.device]) -> bool:
    return tensor.layout is torch.strided and TensorBase.device.__get__(tensor) in there
