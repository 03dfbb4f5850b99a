"""What fake CUDA tensors and devices are taken for: their class, devices by number, default types, other libraries, profilers."""

from __future__ import annotations

import copyreg
import functools
import sys
import types
from typing import Any

import torch
import torch.utils.dlpack

from memlab.errors import PredictionError
from memlab.fake_cuda import tensors
from memlab.fake_cuda.gpus import with_index
from memlab.fake_cuda.patches import Patches, constant, nothing
from memlab.fake_cuda.tensors import FakeCudaParameter, is_fake
from memlab.torch_internals import cuda_names

PROFILED = "torch.profiler recorded the host only: nothing ran on a card"
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")


def identify(cuda: Any, patches: Patches) -> None:
    """Patch what decides by class or by device number."""
    _accept_numbers(patches)
    _accept_parameters(patches)
    _exchange_memory(patches)
    _quieten_profilers(cuda, patches)


def _accept_numbers(patches: Patches) -> None:
    """`device=0` is the GPU, also where C++ knows no accelerator."""
    for owner, names in ((torch, _LIKE), (torch.Tensor, _NEW)):
        for name in names:
            patches.put(owner, **{name: numbered(getattr(owner, name))})
    # `module.to(0)`: C++ would ask which accelerator that is.
    patches.put(cuda_names.nn_functions, _parse_to=numbered(cuda_names.nn_functions._parse_to))
    new_tensor = torch.Tensor.new_tensor

    @functools.wraps(new_tensor)
    def made(self, data, *, dtype=None, device=None, **kwargs):
        """On the GPU it starts on the host (torch/csrc/utils/tensor_new.cpp)."""
        if device is None:
            return new_tensor(self, data, dtype=dtype, **kwargs)
        dtype = dtype or (data.dtype if isinstance(data, torch.Tensor) else self.dtype)
        return torch.tensor(data, dtype=dtype, device=device, **kwargs)

    module_of = torch.get_device_module
    patches.put(torch.Tensor, new_tensor=made)
    patches.put(torch, get_device_module=lambda device=None: module_of("cuda" if device is None else device))
    patches.put(torch, set_default_tensor_type=_set_default_tensor_type)
    patches.callback(torch.set_default_dtype, torch.get_default_dtype())
    try:
        torch.device(0)
    except RuntimeError:  # a build without any accelerator
        _number_devices(patches)


def numbered(function: Any) -> Any:
    """A function whose device, named or the first argument, may be a number."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if args and type(args[0]) is int:
            args = (with_index(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = with_index(kwargs["device"])
        return function(*args, **kwargs)

    return call


_Device = torch.device


class _DeviceKind(type):
    """`torch.device` where a number means a GPU: it makes devices of the one class there is, and stands for it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("type", kwargs.get("device"))
        if type(first) is int and len(args) + len(kwargs) == 1:
            return _Device("cuda", first)
        return _Device(*args, **kwargs)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, _Device)

    def __subclasscheck__(cls, kind: type) -> bool:
        return kind is _Device or type.__subclasscheck__(cls, kind)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Device

    def __hash__(cls) -> int:
        return hash(_Device)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Device, name)


def _number_devices(patches: Patches) -> None:
    device = _DeviceKind("device", (), {"__module__": "torch", "__doc__": _Device.__doc__})

    def reduced(one: Any) -> Any:  # pickle looks for a device's class by its name
        return device, (one.type,) if one.index is None else (one.type, one.index)

    patches.put_item(copyreg.dispatch_table, _Device, reduced)
    patches.put(torch, device=device)


def _set_default_tensor_type(kind: Any) -> None:
    """`torch.set_default_tensor_type("torch.cuda.HalfTensor")`: a dtype and a device."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    dtype = tensors.LEGACY_TYPES.get(name.rpartition(".")[2])
    if dtype is None or not dtype.is_floating_point:
        raise TypeError("invalid type object: only floating-point types are supported as the default type")
    torch.set_default_dtype(dtype)
    torch.set_default_device("cuda" if name.startswith("torch.cuda.") else None)


def _accept_parameters(patches: Patches) -> None:
    """`nn.Parameter(parameter)`: what has a parameter's class is known to be one of a plain tensor."""
    parameter = torch.nn.Parameter
    make = parameter.__new__

    def new(cls, data=None, requires_grad=True):
        return make(cls, data.detach() if type(data) is FakeCudaParameter else data, requires_grad)

    patches.put(parameter, __new__=new)


def _exchange_memory(patches: Patches) -> None:
    """DLPack between PyTorch and itself is a view, with others it is refused."""
    given = torch.from_dlpack

    @functools.wraps(given)
    def taken(external, *args, **kwargs):
        return external.detach() if is_fake(external) else given(external, *args, **kwargs)

    pack = torch.utils.dlpack.to_dlpack

    @functools.wraps(pack)
    def packed(tensor):
        if is_fake(tensor):
            raise PredictionError(tensors.NO_DLPACK)
        return pack(tensor)

    for owner in (torch, torch.utils.dlpack):
        patches.put_where_present(owner, from_dlpack=taken, to_dlpack=packed)


def _quieten_profilers(cuda: Any, patches: Patches) -> None:
    """Profilers of a GPU that is not there print a stack per operator; ranges of NVTX go nowhere."""
    profile = sys.modules["torch.autograd.profiler"].profile
    begin = profile.__init__

    @functools.wraps(begin)
    def on_host(self, enabled=True, **kwargs):
        if kwargs.get("use_device") == "cuda" or kwargs.get("use_cuda"):
            cuda.assume(PROFILED)
            kwargs |= {"use_device": None, "use_cuda": False, "use_cpu": True}
        begin(self, enabled, **kwargs)

    patches.put(profile, __init__=on_host)
    nvtx = dict.fromkeys(("range_push", "range_pop", "range_end", "mark"), nothing) | {"range_start": constant(0)}
    patches.put_where_present(torch.cuda.nvtx, **nvtx)
    patches.put_where_present(torch.cuda.profiler, start=nothing, stop=nothing)
    runtime = types.SimpleNamespace(cudaProfilerStart=constant(0), cudaProfilerStop=constant(0))
    patches.put_where_present(torch.cuda, cudart=constant(runtime))
