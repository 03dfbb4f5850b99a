"""A job: what a step is made of, in pieces, so that a technique can change one of them and leave the rest alone.

It runs; it does not measure. Nothing of it knows of memlab's other rooms.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memlab.errors import MemlabError
from memlab.workloads.nested import mapped

Parts = tuple[nn.Module, torch.optim.Optimizer | None, tuple[Any, ...], Callable[..., Tensor] | None]
"""Model, optimizer (None: inference), batch (the model's arguments, then the target), loss (None: inference)."""
Context = Callable[[], AbstractContextManager[Any]]
SAMPLE = 1 << 16
"""Of how many numbers of the trained parameters an outcome keeps the values."""


class Job:
    """One piece of work: `build` makes its parts, `run` takes its steps, `outcome` is what can be compared.

    A technique replaces or wraps the attributes below; each is used by `train` (or `infer`) in the order they stand in.
    """

    def __init__(self, device: str = "cpu", steps: int = 3) -> None:
        self.device, self.steps = torch.device(device), steps
        self.model: nn.Module = nn.Identity()
        self.optimizer: torch.optim.Optimizer | None = None
        self.batch: tuple[Any, ...] = ()
        self.loss: Callable[..., Tensor] | None = None
        self.losses: list[Tensor] = []
        self.output: Any = None
        """The last output of an inference."""
        self.held: list[Any] = []
        """What the loop keeps alive from one step to the next, where a habit keeps something."""
        self.notes: list[str] = []
        """What a technique wants said beside the figures."""
        # Pieces:
        self.making: list[Context] = []
        """Entered while the parts are made."""
        self.around: list[Context] = []
        """Entered around all steps."""
        self.step: Callable[[], None] = self.train
        self.clear: Callable[[], None] = self._clear
        self.feed: Callable[[], Iterator[tuple[float, tuple[Any, ...]]]] = self._feed
        self.contexts: list[Context] = []
        """Entered around forward and loss."""
        self.forward: Callable[..., Any] = self._forward
        self.backward: Callable[[Tensor], None] = self._backward
        self.update: Callable[[], None] = self._update
        self.keep: Callable[[Any, Tensor], None] = lambda output, loss: None
        """Gets the output and the loss, with its graph, at the end of a step."""

    @property
    def trains(self) -> bool:
        """Whether a step has a backward; else it is an inference."""
        return self.optimizer is not None

    def build(self, make: Callable[[], Parts]) -> None:
        """Make the parts on the device; what was made elsewhere is moved there."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.device)
            for context in self.making:
                stack.enter_context(context())
            self.model, self.optimizer, self.batch, self.loss = checked(make())
        if not any(one.is_meta for one in self.model.parameters()):  # else a technique fills it later
            self.model.to(self.device)
        self.batch = moved(self.batch, self.device)
        if self.trains:
            self.model.train()
            if own := getattr(self.model, "job_step", None):  # two networks, two turns: no step of the usual kind
                self.step = functools.partial(own, self)
        else:
            self.step = self.infer
            self.model.eval()

    def run(self, on_step: Callable[[int], None] = lambda done: None) -> None:
        """Take all steps; `on_step` hears how many are done."""
        with contextlib.ExitStack() as stack:
            for context in self.around:
                stack.enter_context(context())
            for done in range(self.steps):
                self.step()
                on_step(done + 1)

    # --- how a step goes -------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """One training step."""
        self.clear()
        total: Tensor | None = None
        for share, batch in self.feed():
            with self._forward_contexts():
                output = self.forward(*batch[:-1])
                loss = self._lost(output, batch[-1])
            self.backward(loss * share if share != 1 else loss)
            part = loss.detach() * share
            total = part if total is None else total + part
            self.keep(output, loss)
            del output, loss
        self.update()
        if total is not None:
            self.losses.append(total)

    def infer(self) -> None:
        """One inference; what a user writes without thinking of memory: gradients are not switched off."""
        outputs = []
        for _, batch in self.feed():
            with self._forward_contexts():
                outputs.append(self.forward(*batch))
        self.output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        self.keep(self.output, self.output)

    def _forward_contexts(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for context in self.contexts:
            stack.enter_context(context())
        return stack

    def _lost(self, output: Any, target: Any) -> Tensor:
        assert self.loss is not None
        return self.loss(output, target)

    def _clear(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def _feed(self) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """The pieces of a step's batch, each with its share of the loss."""
        yield 1.0, self.batch

    def _forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _update(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()

    # --- for techniques --------------------------------------------------------------------------------------------------

    def new_optimizer(self, kind: type[torch.optim.Optimizer] | None = None, **settings: Any) -> None:
        """Make the optimizer anew for what is trained now: of the same kind and settings, where nothing else is said."""
        assert self.optimizer is not None
        kept = dict(self.optimizer.defaults) if kind is None else {"lr": self.optimizer.defaults["lr"]}
        # AdamW has among its defaults what its constructor does not take (decoupled_weight_decay, torch/optim/adamw.py).
        takes = inspect.signature(kind or type(self.optimizer)).parameters
        kept = {key: value for key, value in kept.items() if key in takes}
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = (kind or type(self.optimizer))(trained, **{**kept, **settings})

    # --- what came of it --------------------------------------------------------------------------------------------------

    def outcome(self) -> dict[str, Any]:
        """What two jobs that did the same work have equal: losses and trained parameters, or the output."""
        if not self.trains:
            return {"output": self.output.detach() if isinstance(self.output, Tensor) else self.output}
        trained = [one.detach() for one in self.model.parameters()]
        return {"losses": [float(one) for one in self.losses], "weights": sample_of(trained), "digest": digest(trained)}


def checked(parts: Any) -> Parts:
    """The four parts of a workload, or one clear line."""
    what = "a workload gives model, optimizer, batch and loss"
    if not isinstance(parts, tuple) or len(parts) != 4:
        raise MemlabError(
            f"{what}, got {type(parts).__name__}{f' of {len(parts)}' if isinstance(parts, tuple) else ''}."
        )
    model, optimizer, batch, loss = parts
    if not isinstance(model, nn.Module):
        raise MemlabError(f"{what}: the first is a torch.nn.Module, got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise MemlabError(f"{what}: the second is an optimizer, or None for inference, got {type(optimizer).__name__}.")
    if optimizer is not None and _wants_closure(optimizer):
        raise MemlabError(
            f"{what}: the second is an optimizer that steps without a closure, got {type(optimizer).__name__}: its step runs"
            " the model itself, many times."
        )
    if optimizer is not None and not callable(loss):
        raise MemlabError(f"{what}: the fourth is a function of output and target, got {type(loss).__name__}.")
    if isinstance(batch, list) and optimizer is not None:  # as a DataLoader gives it
        batch = tuple(batch)
    batch = batch if isinstance(batch, tuple) else (batch,)
    if len(batch) < (1 if optimizer is None else 2):
        raise MemlabError(
            f"{what}: the third is (input, ..., target), for inference (input, ...), got {len(batch)} parts."
        )
    return model, optimizer, batch, loss


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot be taken without one, as that of LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def moved(value: Any, device: torch.device) -> Any:
    """A batch on a device: tensors in whatever holds them."""
    if type(value) in (tuple, list):
        return type(value)(moved(one, device) for one in value)
    if callable(getattr(type(value), "to", None)):  # a tensor, or what knows best what of it goes where
        return value.to(device)
    return mapped(value, lambda one: one.to(device))


def sample_of(tensors: list[Tensor]) -> Tensor:
    """Numbers from all over the tensors, evenly spaced, as float32 on the host: at most SAMPLE of them."""
    count = sum(one.numel() for one in tensors)
    every = max(1, -(-count // SAMPLE))
    parts = [_real(one.reshape(-1)[::every]).float().cpu() for one in tensors if one.numel()]
    return torch.cat(parts)[: 2 * SAMPLE] if parts else torch.empty(0)


def _real(tensor: Tensor) -> Tensor:
    """A complex number as two."""
    return torch.view_as_real(tensor.resolve_conj()).reshape(-1) if tensor.is_complex() else tensor


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 over every bit, dtype and shape."""
    total = hashlib.sha256()
    for one in tensors:
        total.update(f"{one.dtype}{tuple(one.shape)}".encode())
        total.update(one.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Random numbers that begin at `seed`, on every device; afterwards the user's go on where they were."""
    state, state_of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(state_of_numpy)
