"""Every name of PyTorch that pretend CUDA exchanges, put in one place and put back as it was.

Private ones are listed in `PRIVATE` with what they are for; all were seen in 2.11 to 2.15. `selftest` asks whether they are
still there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

PRIVATE: tuple[tuple[str, str], ...] = (
    ("torch.Tensor._make_subclass", "tensors that C++ takes for meta ones and Python for CUDA ones"),
    ("torch._C._swap_tensor_impl", "a parameter that moves stays the same object"),
    ("torch._C._set_meta_in_tls_dispatch_include", "operators run their meta kernels"),
    ("torch._C._PreserveDispatchKeyGuard", "operators run their meta kernels"),
    ("torch._C._DisableTorchDispatch", "operators run their meta kernels"),
    ("torch._C._set_only_lift_cpu_tensors", "torch.tensor(..., device='cuda') starts on the CPU"),
    ("torch._C._dispatch_has_kernel_for_dispatch_key", "which operators are decomposed"),
    ("torch._C._current_autograd_node", "whether backward is on"),
    ("torch._has_compatible_shallow_copy_type", "modules move by `.data =`"),
    ("torch._subclasses.fake_tensor.FakeTensorMode", "shapes of results"),
    ("torch._subclasses.fake_tensor.FakeTensor", "shapes of results"),
    ("torch._subclasses.fake_tensor.init_gpu_context", "no CUDA context is made"),
    ("torch.optim.optimizer._foreach_supported_types", "optimizers take their CUDA defaults"),
    ("torch.optim.Optimizer._accelerator_graph_capture_health_check", "no driver is asked"),
    ("torch.amp.GradScaler._maybe_opt_step", "the step is not skipped"),
    ("torch.cuda.amp.common.amp_definitely_not_available", "autocast is on"),
    ("torch.cuda._lazy_init", "no CUDA context is made"),
    ("torch.nn.init._no_grad_trunc_normal_", "host tensors without data stay so"),
    ("torch.utils._python_dispatch._disable_current_modes", "shape functions run by themselves"),
    ("torch.utils._device._device_constructors", "who asks for the meta device"),
    ("torch.utils._device.DeviceContext", "who asks for the meta device"),
)

_ABSENT = object()


class Patches:
    """Names exchanged for a while; `restore` puts them back in reverse order."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, **values: Any) -> None:
        """Exchange names of a module or class."""
        for name, value in values.items():
            self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def put_where_present(self, owner: Any, **values: Any) -> None:
        """Exchange only those names that this version of PyTorch has."""
        self.put(owner, **{name: value for name, value in values.items() if hasattr(owner, name)})

    def add(self, items: list[Any], *values: Any) -> None:
        """Append to a list of PyTorch's; taken off again."""
        for value in values:
            items.append(value)
            self._saved.append((items, "", value))

    def restore(self) -> None:
        """Put everything back."""
        while self._saved:
            owner, name, value = self._saved.pop()
            if not name:
                owner.remove(value)
            elif value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def missing() -> list[str]:
    """The private names that this PyTorch lacks."""
    return [f"{name} ({why})" for name, why in PRIVATE if not _found(name)]


def _found(path: str) -> bool:
    thing: Any = torch
    name = "torch"
    for part in path.split(".")[1:]:
        name = f"{name}.{part}"
        # torch/optim/__init__.py takes the name of its module `optimizer` away.
        thing = getattr(thing, part, sys.modules.get(name))
        if thing is None:
            return False
    return True
