"""The GPUs of a prediction: how many there are, how C++ sees them, and which is a thread's current one.

To C++ cuda:0 is the meta device and cuda:1 is meta:1. So it tells them apart where it decides by device: `to` and its backward,
gradients, results "on the device of this one".
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from memlab.fake_cuda.places import where
from memlab.torch_internals.dispatch import TensorBase, current_autograd_node
from memlab.torch_internals.graph import gpu_of_node, number_of

MOST = 16
"""So many GPUs can be predicted, as many as the largest machines have."""
GPUS = tuple(torch.device("cuda", number) for number in range(MOST))
METAS = (torch.device("meta"), *(torch.device("meta", number) for number in range(1, MOST)))
"""The same as C++ sees them."""
CUDA0, META = GPUS[0], METAS[0]
_Device = torch.device
_seen: Any = TensorBase.device.__get__


class State:
    """Global state that tensors need: the active FakeCuda, how many GPUs programs see, and how many of them are there.

    In a distributed job a rank sees all GPUs of its machine, and each of them means its own.
    """

    active: Any = None
    device_count = 1
    devices = 1
    asked = ""
    """The method that copies to the host, if it is known."""


class _Chosen(threading.local):
    """The current GPU of a thread, and the number of the node of the graph that ran when it was chosen (None: none)."""

    number = 0
    node: int | None = None


_chosen = _Chosen()


def _running() -> int | None:
    node = current_autograd_node()
    return None if node is None else number_of(node)


def current() -> int:
    """The number of the current GPU: what the thread chose, or in backward that of the node (autograd/engine.cpp, thread_init)."""
    if State.devices == 1:
        return 0
    running = _running()
    return _chosen.number if running is None or running == _chosen.node else gpu_of_node(current_autograd_node())


def choose(number: int) -> None:
    """Make a GPU the current one, as `torch.cuda.set_device`."""
    _chosen.number, _chosen.node = number, _running()


class on:
    """Within it a GPU is the current one."""

    __slots__ = ("_before", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        self._before = _chosen.number, _chosen.node
        choose(self.number)

    def __exit__(self, *error: object) -> None:
        _chosen.number, _chosen.node = self._before


def forget() -> None:
    """As at the start: one GPU, which is the current one."""
    State.active, State.device_count, State.devices = None, 1, 1
    _chosen.__dict__.clear()


def number_on(thing: Any) -> int:
    """The number of the GPU of a fake CUDA tensor or of its storage."""
    device = _seen(thing) if isinstance(thing, TensorBase) else thing.device
    return device.index or 0


def with_index(device: Any) -> torch.device:
    """A device by its name or number: "cuda" is the current GPU, and in a distributed job all are cuda:0, as a rank has one."""
    device = _Device("cuda", device) if isinstance(device, int) else _Device(device)
    if device.type != "cuda":
        return device
    index = current() if device.index is None else device.index
    if index < State.device_count:
        return GPUS[index] if State.devices > 1 else CUDA0
    line = where() or "the program"
    more = f"predict it with devices={index + 1}, or --devices {index + 1}"
    there = f"{State.device_count} GPUs are predicted" if State.device_count > 1 else f"one GPU is predicted: {more}"
    raise RuntimeError(f"CUDA error: invalid device ordinal. {line} asks for {device}, and {there}.")
