"""A forward pass of a model on stand-ins: nothing is computed, and the model is afterwards what it was."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memlab.errors import MemlabError
from memlab.seams.fakes import LOGGER
from memlab.sizes.classic import ClassicCount, Counted
from memlab.sizes.gradients import Reached, reached
from memlab.sizes.layers import Layers
from memlab.sizes.refusal import Refusal, refusal
from memlab.sizes.standins import Copies, StandIns, swapped
from memlab.sizes.storages import tensors_in
from memlab.sizes.value import OTHER, OUTPUT, SAVED, Kept
from memlab.sizes.watch import Made, Watch, unpack

_NO_HOOKS = "saved tensor hooks"
"""What PyTorch says where a function forbids them, as those of torch.func do."""


@dataclass(slots=True)
class Rehearsed:
    """What one forward came to, in stand-ins."""

    watch: Watch
    graph: Reached
    kept: dict[int, Kept]
    elsewhere_bytes: int
    counted: list[Counted]
    calls: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    tells_saved: bool


def rehearse(
    layers: Layers, standins: StandIns, args: tuple[Any, ...], kwargs: dict[str, Any], with_shapes: bool
) -> Rehearsed:
    """Run the forward once; where a function in it forbids hooks for saved tensors, again without them.

    `with_shapes` says that some inputs were given as shapes, which an error should mention.
    """
    with_hooks = True
    while True:
        done = _attempt(layers, standins, args, kwargs, with_hooks)
        if isinstance(done, Rehearsed):
            return done
        if with_hooks and _NO_HOOKS in done.message:
            with_hooks = False
            continue
        raise MemlabError(done.text(type(layers.modules[0]).__name__, with_shapes))


def _attempt(
    layers: Layers, standins: StandIns, args: tuple[Any, ...], kwargs: dict[str, Any], with_hooks: bool
) -> Rehearsed | Refusal:
    watch = Watch(standins, layers)
    tally = Calls(ClassicCount(watch))
    layers.reset()
    with _as_it_was(), swapped(layers.modules, Copies(standins)):
        layers.watch(tally.after)
        hooks = saved_tensors_hooks(watch.pack, unpack) if with_hooks else contextlib.nullcontext()
        try:
            with hooks, standins.mode, watch:
                out = layers.modules[0](*args, **kwargs)
        except Exception as error:
            return refusal(error, layers.where(error))
        outputs = tensors_in(out)
        kept, elsewhere = _kept(watch, outputs, standins, with_hooks)
        return Rehearsed(
            watch=watch,
            graph=reached(outputs),
            kept=kept,
            elsewhere_bytes=elsewhere,
            counted=tally.classic.counted,
            calls=tally.calls,
            shapes=tally.shapes,
            tells_saved=with_hooks,
        )


class Calls:
    """How often each layer was called, and the shape it gave out first."""

    def __init__(self, classic: ClassicCount) -> None:
        self.classic = classic
        self.calls: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def after(self, path: str, module: nn.Module, output: Any) -> None:
        """One layer has put something out."""
        self.calls[path] = self.calls.get(path, 0) + 1
        first = next(iter(tensors_in(output)), None)
        if first is not None:
            self.shapes.setdefault(path, tuple(first.shape))
        self.classic.after(path, module, output)


def _kept(watch: Watch, outputs: list[Tensor], standins: StandIns, with_hooks: bool) -> tuple[dict[int, Kept], int]:
    """What is alive now, by identity of its `Made`; and the bytes of what lies on other devices than the model."""
    found: dict[int, Kept] = {}
    for saved in watch.seen.saved:
        if saved.packed() is not None and saved.made.is_alive:
            found.setdefault(id(saved.made), _as_kept(saved.made, SAVED, saved.layer, saved.shape, saved.dtype))
    for tensor in outputs:
        for made in watch.made_of(tensor):
            found.setdefault(id(made), _as_kept(made, OUTPUT, made.layer, made.shape, made.dtype))
    for made in watch.seen.made:
        if made.is_alive:
            why = OTHER if with_hooks else SAVED
            found.setdefault(id(made), _as_kept(made, why, made.layer, made.shape, made.dtype))
    far = {id(made) for made in watch.seen.made if made.device.type not in standins.device_types}
    elsewhere = sum(one.nbytes for key, one in found.items() if key in far)
    return {key: one for key, one in found.items() if key not in far and one.nbytes}, elsewhere


def _as_kept(made: Made, why: str, layer: str, shape: tuple[int, ...], dtype: torch.dtype) -> Kept:
    name = str(dtype).removeprefix("torch.")
    return Kept(why, made.nbytes, shape, name, layer, made.layer, made.operator)


# cuDNN's recurrent layers ask whether their weights lie side by side.
_NO_ADDRESS = ("ignore", re.compile("Accessing the data pointer of FakeTensor"), UserWarning, None, 0)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Random numbers are afterwards as before; compiled parts run as they are written; no cast stays in autocast's cache.

    And nobody writes to the log what an error is going to say.
    """
    log = logging.getLogger(LOGGER)
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    was_off, log.disabled = log.disabled, True
    warnings.filters.insert(0, _NO_ADDRESS)  # type: ignore[attr-defined]  # and not by filterwarnings, which shows old ones again
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=cuda), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        log.disabled = was_off
        warnings.filters[:] = [one for one in warnings.filters if one is not _NO_ADDRESS]  # type: ignore[index]
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            torch.clear_autocast_cache()
