"""What the tests of the Lab run: a workload of a few milliseconds, and a comparison that compares nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memlab.session.run import Run


def tiny() -> Any:
    """Twelve layers, and activations that outweigh them."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers)
    batch = torch.randn(2048, 64), torch.randn(2048, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, nn.functional.mse_loss


@dataclass
class Check:
    verdict: str = "equal"


@dataclass
class FakeComparison:
    """The face that the Lab uses."""

    a: Run
    b: Run

    @property
    def saved_bytes(self) -> int:
        return self.a.peak_bytes - self.b.peak_bytes

    @property
    def results(self) -> Check:
        return Check()

    @property
    def sentence(self) -> str:
        return f"{self.b.name} saves {self.saved_bytes:,} bytes against {self.a.name}, results equal"

    def figure_bundle(self) -> dict[str, Any]:
        return dict(self.b.report().figure_bundle())
