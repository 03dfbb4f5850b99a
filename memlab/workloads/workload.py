"""A workload: a small plain model with its optimizer, batch and loss, in several sizes; and shared helpers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import MemlabError
from memlab.workloads.job import Parts

SIZES = ("tiny", "laptop", "card")
"""For tests (well below a second per step on two cores), for laptops (about a second), and as published, for a GPU."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`make(**settings)` gives model, optimizer, batch and loss; `sizes` has the settings of each size."""

    name: str
    idea: str
    make: Callable[..., Parts]
    sizes: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, name: str, idea: str, make: Callable[..., Parts], *sizes: tuple[int, ...]) -> Workload:
        """One whose settings are the arguments of `make`; the values are those of "tiny", "laptop" and "card"."""
        names = inspect.signature(make).parameters
        settings = (dict(zip(names, values, strict=True)) for values in sizes)
        return cls(name, idea, make, dict(zip(SIZES, settings, strict=True)))

    def sized(self, size: str = "laptop", **settings: Any) -> Callable[[], Parts]:
        """A function that makes the four parts at this size; `settings` override those of the size."""
        if size not in self.sizes:
            raise MemlabError(
                f"workload {self.name!r} has no size {size!r:.80}. Choose one of {', '.join(self.sizes)}."
            )
        usual_settings = self.sizes[size]
        for key in sorted(set(settings) - set(usual_settings)):
            known = ", ".join(usual_settings)
            raise MemlabError(f"workload {self.name!r} has no setting {key!r:.80}. It has {known}.")
        for key, value in settings.items():
            usual = usual_settings[key]
            least = min(1, usual) if type(usual) is int else 0
            if type(usual) in (int, bool) and (type(value) is not type(usual) or value < least):
                what = f"a whole number from {least}" if type(usual) is int else "True or False"
                raise MemlabError(f"{key} of workload {self.name!r} is {what}, got {value!r:.80}.")
        return functools.partial(self.make, **{**usual_settings, **settings})

    def __call__(self) -> Parts:
        """The four parts at the size of a laptop."""
        return self.sized()()

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.idea}"]
        for size, settings in self.sizes.items():
            lines.append(f"  {size:<7} {', '.join(f'{key}={value}' for key, value in settings.items())}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Workload {self.name!r}: {self.idea}>"


def divided(whole: str, by: str, **settings: int) -> None:
    """Require that one setting is a multiple of another."""
    if settings[whole] % settings[by]:
        raise MemlabError(f"{whole} has to be a multiple of {by}, got {settings[whole]} and {settings[by]}.")


def images_and_classes(batch: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """A batch of random square images, each with a random class."""
    return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))


def classifying(model: nn.Module, batch: int, side: int, classes: int) -> Parts:
    """The model with SGD and momentum, as convolutional networks were trained, and cross-entropy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, images_and_classes(batch, side, classes), functional.cross_entropy


def stepping(make: Callable[[], Parts], device: str) -> Callable[[], float]:
    """A training step of the parts, seeded and made on the device, which returns its loss."""
    torch.manual_seed(0)
    with torch.device(device):
        model, optimizer, (*inputs, target), loss_of = make()

    def step() -> float:
        assert optimizer is not None and loss_of is not None
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(*inputs), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def inference(make: Callable[[], Parts]) -> Callable[[], Parts]:
    """The same work without training: the model in evaluation mode, with its inputs alone."""
    return functools.partial(_inferring, make)  # which can be pickled


def _inferring(make: Callable[[], Parts]) -> Parts:
    model, optimizer, batch, _ = make()
    return model.eval(), None, batch if optimizer is None else batch[:-1], None
