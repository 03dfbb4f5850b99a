"""PyTorch's tensors without data, and the wrappers of `torch.func`: private names, seen in 2.11 to 2.15.

`FakeTensorMode` runs operators for their shapes alone; `FakeTensor(mode, meta_tensor, device)` makes one that claims a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "LOGGER",
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "fake_mode_is_on",
    "known_number",
    "no_dispatch",
    "unwrapped",
    "wraps_others",
]

LOGGER = "torch._subclasses.fake_tensor"
"""Who writes a traceback to the log when an operator refuses its arguments, before raising it."""


def known_number(mode: FakeTensorMode, number: torch.Tensor) -> FakeTensor:
    """A stand-in for one number that remembers its value, so that code may ask for it."""
    return mode.fake_tensor_converter.from_real_tensor(mode, number, make_constant=True)


def fake_mode_is_on() -> bool:
    """Whether this thread runs operators for their shapes alone already."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def wraps_others(tensor: Any) -> bool:
    """Whether a tensor is of a class that wraps others and tells which (`__tensor_flatten__`)."""
    return bool(is_traceable_wrapper_subclass(tensor))


def unwrapped(tensor: Any) -> Any:
    """The tensor inside of those that vmap and grad of `torch.func` hand to the functions they transform."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
