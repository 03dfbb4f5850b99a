"""What fake CUDA takes from PyTorch's inside: `private_names.FAKE_CUDA` has the names."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from memlab.torch_internals.dispatch import TensorBase, TorchDispatchMode
from memlab.torch_internals.fakes import DataDependentOutputException
from memlab.torch_internals.private_names import private, private_error

if TYPE_CHECKING:
    from torch._subclasses import fake_tensor
    from torch.utils._device import DeviceContext
else:
    fake_tensor = private("torch._subclasses.fake_tensor")
    DeviceContext = private("torch.utils._device.DeviceContext")

__all__ = ["DeviceContext", "TorchDispatchMode", "fake_tensor"]

make_subclass: Any = private("torch.Tensor._make_subclass")
make_wrapper_subclass: Any = private("torch.Tensor._make_wrapper_subclass")
swap_tensor_impl: Any = private("torch._C._swap_tensor_impl")
no_torch_function: Any = private("torch._C._disabled_torch_function_impl")
tensor_use_count: Any = private("torch.Tensor._use_count")
sdp_priority_order: Any = private("torch._C._get_sdp_priority_order")
without_dispatch: Any = private("torch._C._DisableTorchDispatch")
truncated_normal: Any = private("torch.nn.init._no_grad_trunc_normal_")
has_kernel: Any = private("torch._C._dispatch_has_kernel_for_dispatch_key")
make_contiguous_strides_for: Any = private("torch._prims_common.make_contiguous_strides_for")
make_channels_last_strides_for: Any = private("torch._prims_common.make_channels_last_strides_for")
suggest_memory_format: Any = private("torch._prims_common.suggest_memory_format")
tree_map_only: Any = private("torch.utils._pytree.tree_map_only")
_disable_current_modes: Any = private("torch.utils._python_dispatch._disable_current_modes")
nn_functions: Any = private("torch._C._nn")
"""Where modules look up how to read what `to` is given: `_parse_to`."""
flex_attention: Any = private("torch._higher_order_ops.flex_attention")
_device_constructors: Any = private("torch.utils._device._device_constructors")
_exclude_keys: Any = private("torch._C._ExcludeDispatchKeyGuard")
_keep_key: Any = private("torch._C._PreserveDispatchKeyGuard")
_include_meta: Any = private("torch._C._set_meta_in_tls_dispatch_include")
_storage_use_count: Any = private("torch._C._storage_Use_Count")
NO_SHAPES = private_error("torch._subclasses.fake_tensor.UnsupportedOperatorException")
"""What is raised for an operator without a shape function."""
UNPREDICTABLE = (
    DataDependentOutputException,
    private_error("torch._subclasses.fake_tensor.DynamicOutputShapeException"),
    NO_SHAPES,
)
"""What shape functions raise where a shape depends on values, or where there is none."""


def flex_by_operators() -> tuple[Any, Any]:
    """`flex_attention` and its backward by ordinary operators; PyTorch gave the name of their module to the operator."""
    module = sys.modules[type(flex_attention).__module__]
    return module.math_attention, module.sdpa_dense_backward


def without_autocast() -> Any:
    """Within it autocast does not see what is called."""
    return _exclude_keys(_autocast_keys())


@functools.cache
def _autocast_keys() -> Any:
    return private("torch._C.DispatchKeySet")(private("torch._C.DispatchKey").AutocastCUDA)


def storage_use_count(tensor: Any) -> int:
    """How many references C++ counts of a tensor's storage."""
    return _storage_use_count(TensorBase.untyped_storage(tensor)._cdata)


def has_default_device() -> bool:
    """Whether `torch.set_default_device` is in force in this thread."""
    return getattr(private("torch._GLOBAL_DEVICE_CONTEXT"), "device_context", None) is not None


def compiled_cudnn_version() -> int:
    """The cuDNN of this build, or what comes with the CUDA builds of 2.12 to 2.15."""
    try:
        major, minor, patch = torch._C._cudnn.getCompileVersion()
    except AttributeError:  # not built with it
        return 92000
    return int(major * 10_000 + minor * 100 + patch)


def dispatches_to_cuda(tensor: Any) -> bool:
    """Whether operators on a tensor are those of CUDA."""
    return private("torch._C._dispatch_keys")(tensor).has(private("torch._C.DispatchKey").CUDA)


def lift_only_host_tensors(stack: contextlib.ExitStack) -> None:
    """Until the stack unwinds, `torch.tensor(..., device="cuda")` starts on the host."""
    switch = private("torch._C._set_only_lift_cpu_tensors")
    stack.callback(switch, private("torch._C._only_lift_cpu_tensors")())
    switch(True)


class meta_kernels:
    """Within it, operators on fake CUDA tensors run their meta kernels (as torch._subclasses.fake_tensor does)."""

    __slots__ = ("_guards",)
    running = False

    def __enter__(self) -> None:
        off, keep = without_dispatch(), _keep_key()
        off.__enter__()
        keep.__enter__()
        _include_meta(True)
        meta_kernels.running = True
        self._guards = (keep, off)

    def __exit__(self, *error: Any) -> None:
        meta_kernels.running = False
        for guard in self._guards:
            guard.__exit__(*error)
