"""PyTorch's tensors without data.

`FakeTensorMode` runs operators for their shapes alone; `FakeTensor(mode, meta_tensor, device)` makes one that claims a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from memlab.torch_internals.dispatch import TorchDispatchMode
from memlab.torch_internals.private_names import private, private_error

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
else:
    FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode")

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]

DataDependentOutputException = private_error("torch._subclasses.fake_tensor.DataDependentOutputException")
no_dispatch: Any = private("torch.utils._mode_utils.no_dispatch")
wraps_others: Any = private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
"""Whether a tensor is of a class that wraps others and tells which (`__tensor_flatten__`)."""
tree_map: Any = private("torch.utils._pytree.tree_map")
tree_leaves: Any = private("torch.utils._pytree.tree_leaves")
_from_real: Any = private("torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor")
LOGGER = "torch._subclasses.fake_tensor"
"""Who writes a traceback to the log when an operator refuses its arguments, before raising it."""


def claim_cuda() -> None:
    """Make fakes and autocast believe that CUDA is available, without a context; permanent, so in a child only.

    FakeTensorMode.avoid_device_init and init_gpu_context of torch/_subclasses/fake_tensor.py: a fork cannot begin a context.
    """
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[method-assign, assignment]
    private("torch._subclasses.fake_tensor").init_gpu_context = lambda device: None
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True


def known_number(mode: FakeTensorMode, number: torch.Tensor) -> FakeTensor:
    """A stand-in for one number that remembers its value, so that code may ask for it."""
    return _from_real(mode.fake_tensor_converter, mode, number, make_constant=True)


def fake_mode_is_on() -> bool:
    """Whether this thread runs operators for their shapes alone already."""
    key = private("torch._C._TorchDispatchModeKey").FAKE
    return private("torch._C._get_dispatch_mode")(key) is not None
