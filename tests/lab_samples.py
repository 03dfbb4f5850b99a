"""What the tests of the Lab run: a workload of a few milliseconds, and what hears of a Lab."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def tiny() -> Any:
    """Twelve layers, and activations that outweigh them."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers)
    batch = torch.randn(2048, 64), torch.randn(2048, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch, nn.functional.mse_loss


class Listener:
    """Hears of a Lab as its view does; `on_progress` is called with what the view would show."""

    def __init__(self, on_progress: Callable[[str, int, int], object] = lambda what, done, total: None) -> None:
        self.heard: list[str] = []
        self.stepped = threading.Event()
        self._on_progress = on_progress

    def changed(self, what: str) -> None:
        self.heard.append(what)

    def progress(self, what: str, done: int, total: int) -> None:
        if done:
            self.stepped.set()
        self._on_progress(what, done, total)

    def say(self, text: str) -> None:
        self.heard.append(text)

    def close(self) -> None:
        self.heard.append("closed")
