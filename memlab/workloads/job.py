"""A job: the parts of a step, so that a technique can change one of them and leave the rest alone.

It runs but does not measure, and imports none of memlab's other packages.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
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
"""How many values of the trained parameters an outcome keeps."""


class Job:
    """One piece of work: `build` makes its parts, `run` runs its steps, `outcome` is what can be compared.

    A technique replaces or wraps the attributes below; each is used by `train` (or `infer`), in the order below.
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
        """What the loop keeps alive between steps, for a baseline pattern."""
        self.notes: list[str] = []
        """What a technique reports in addition to the figures."""
        # Pieces:
        self.around: list[Context] = []
        """Entered around all steps."""
        self.step: Callable[[], None] = self.train
        self.clear: Callable[[], None] = lambda: self.optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
        self.feed: Callable[[], Iterable[tuple[float, tuple[Any, ...]]]] = lambda: [(1.0, self.batch)]
        """The pieces of a step's batch, each with its share of the loss."""
        self.contexts: list[Context] = []
        """Entered around forward and loss."""
        self.forward: Callable[..., Any] = lambda *inputs: self.model(*inputs)
        self.backward: Callable[[Tensor], None] = lambda loss: loss.backward()
        self.update: Callable[[], None] = lambda: self.optimizer.step()  # type: ignore[union-attr]
        self.keep: Callable[[Any, Tensor], None] = lambda output, loss: None
        """Called with the output and the loss, with its graph, at the end of a step."""

    @property
    def trains(self) -> bool:
        """Whether a step has a backward; otherwise it is inference."""
        return self.optimizer is not None

    def build(self, make: Callable[[], Parts]) -> None:
        """Make the parts on the device; parts made elsewhere are moved there."""
        with self.device:
            self.model, self.optimizer, self.batch, self.loss = checked(make())
        if not any(one.is_meta for one in self.model.parameters()):  # else a technique fills it later
            self.model.to(self.device)
        self.batch = moved(self.batch, self.device)
        if not self.trains:
            self.step = self.infer
            self.model.eval()
            return
        self.model.train()
        if own := getattr(self.model, "job_step", None):  # two networks take turns: not an ordinary step
            self.step = functools.partial(own, self)

    def run(self, on_step: Callable[[int], None] = lambda done: None) -> None:
        """Run all steps; `on_step` is called with the number done."""
        with entered(self.around):
            for done in range(self.steps):
                self.step()
                on_step(done + 1)

    def train(self) -> None:
        """One training step."""
        assert self.loss is not None
        self.clear()
        total: Tensor | None = None
        for share, batch in self.feed():
            with self.in_contexts():
                output = self.forward(*batch[:-1])
                loss = self.loss(output, batch[-1])
            self.backward(loss * share if share != 1 else loss)
            part = loss.detach() * share
            total = part if total is None else total + part
            self.keep(output, loss)
            del output, loss
        self.update()
        if total is not None:
            self.losses.append(total)

    def infer(self) -> None:
        """One inference, written without thinking of memory: gradients are not switched off."""
        outputs = []
        for _, batch in self.feed():
            with self.in_contexts():
                outputs.append(self.forward(*batch))
        self.output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        self.keep(self.output, self.output)

    def in_contexts(self) -> contextlib.ExitStack:
        """The context around a forward and its loss."""
        return entered(self.contexts)

    def outcome(self) -> dict[str, Any]:
        """What must be equal for two jobs with the same work: losses and trained parameters, or the output."""
        if not self.trains:
            return {"output": self.output.detach() if isinstance(self.output, Tensor) else self.output}
        trained = [one.detach() for one in self.model.parameters()]
        return {"losses": [float(one) for one in self.losses], "weights": sample_of(trained), "digest": digest(trained)}


def entered(contexts: list[Context]) -> contextlib.ExitStack:
    """Enter all contexts in order; if one fails, leave those before it."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return stack.pop_all()


def checked(parts: Any) -> Parts:
    """Check the four parts of a workload; a one-line error if they are invalid."""
    what = "a workload gives model, optimizer, batch and loss"
    if not isinstance(parts, tuple) or len(parts) != 4:
        count = f" of {len(parts)}" if isinstance(parts, tuple) else ""
        raise MemlabError(f"{what}, got {type(parts).__name__}{count}.")
    model, optimizer, batch, loss = parts
    if not isinstance(model, nn.Module):
        raise MemlabError(f"{what}: the first is a torch.nn.Module, got {type(model).__name__}.")
    if optimizer is not None:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise MemlabError(f"{what}: the second is an optimizer, or None for inference, got {kind}.")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:  # as that of LBFGS
            why = "its step runs the model itself, many times"
            raise MemlabError(f"{what}: the second is an optimizer that steps without a closure, got {kind}: {why}.")
        if not callable(loss):
            raise MemlabError(f"{what}: the fourth is a function of output and target, got {type(loss).__name__}.")
        if isinstance(batch, list):  # as a DataLoader gives it
            batch = tuple(batch)
    batch = batch if isinstance(batch, tuple) else (batch,)
    if len(batch) < (1 if optimizer is None else 2):
        raise MemlabError(
            f"{what}: the third is (input, ..., target), for inference (input, ...), got {len(batch)} parts."
        )
    return model, optimizer, batch, loss


def moved(value: Any, device: torch.device) -> Any:
    """Move a batch to a device, in any nested container."""
    if type(value) in (tuple, list):
        return type(value)(moved(one, device) for one in value)
    if callable(getattr(type(value), "to", None)):  # a tensor, or an object with its own `to`
        return value.to(device)
    return mapped(value, lambda one: one.to(device))


def sample_of(tensors: list[Tensor]) -> Tensor:
    """Numbers evenly spaced over all tensors, as float32 on the host: about SAMPLE of them; a complex number is two."""
    every = max(1, -(-sum(one.numel() for one in tensors) // SAMPLE))
    parts = []
    for one in tensors:
        some = one.reshape(-1)[::every]
        some = torch.view_as_real(some.resolve_conj()).reshape(-1) if some.is_complex() else some
        parts.append(some.float().cpu())
    return torch.cat(parts)[: 2 * SAMPLE] if parts else torch.empty(0)


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 over every bit, dtype and shape."""
    total = hashlib.sha256()
    for one in tensors:
        total.update(f"{one.dtype}{tuple(one.shape)}".encode())
        total.update(one.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed random numbers on every device; afterwards the user's random state is restored."""
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
