"""Tensors without data: to C++ meta tensors with the dispatch keys of CUDA, to Python CUDA tensors.

C++ must not see a CUDA device, or it needs device guards and a context, and without them backward aborts the process
(seen in 2.11 to 2.15); autograd treats a meta device like the CPU. Copies are those of CUDA: `copy.deepcopy`
clones whole storages, pickling carries no values.
"""

from __future__ import annotations

import copyreg
import functools
import weakref
from types import FunctionType
from typing import Any

import torch

from memlab.errors import PredictionError
from memlab.fake_cuda import gpus
from memlab.fake_cuda.gpus import CUDA0, GPUS, META, METAS, State, with_index
from memlab.fake_cuda.patches import constant
from memlab.torch_internals import graph
from memlab.torch_internals.cuda_names import (
    make_subclass,
    make_wrapper_subclass,
    meta_kernels,
    no_torch_function,
    swap_tensor_impl,
)
from memlab.torch_internals.dispatch import TensorBase

LEGACY_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16,
    "CharTensor": torch.int8, "ByteTensor": torch.uint8, "BoolTensor": torch.bool, "ComplexFloatTensor": torch.complex64,
    "ComplexDoubleTensor": torch.complex128,
}  # fmt: skip
_empty_strided = torch.empty_strided
_NO_NUMPY = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
)
NO_DLPACK = (
    "memory handed to another library (DLPack) cannot be predicted: keep the tensor in PyTorch, or leave this part out of "
    "the prediction."
)


def without_frames(function):
    """Strip inner frames from the errors of a function: they hold arguments, which nothing holds on CUDA."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except BaseException as problem:
            problem.__context__ = problem.__cause__ = None
            error = problem.with_traceback(None)
        try:
            raise error
        finally:  # a frame that holds its own error keeps all frames alive until garbage collection
            del args, kwargs, error

    return call


def is_fake(thing: Any) -> bool:
    """Whether it is a fake CUDA tensor."""
    return issubclass(type(thing), FakeCudaTensor)


def tensor_to(self, *args, **kwargs):
    """`Tensor.to`, also for host tensors, and after fake CUDA has ended.

    C++ would ask the driver for the index of "cuda" (ATen/native/TensorConversions.cpp, ensure_has_index), take the device of
    a fake CUDA tensor for meta, and copy what is already on the GPU.
    """
    given, rest = list(args), dict(kwargs)
    device, dtype, copy = rest.pop("device", None), rest.pop("dtype", None), rest.pop("copy", False)
    memory_format, other = rest.pop("memory_format", None), rest.pop("other", None)
    non_blocking = rest.pop("non_blocking", False)
    if given and isinstance(given[0], torch.Tensor):
        other = given.pop(0)
    elif given and isinstance(given[0], torch.dtype):
        dtype = given.pop(0)
    elif given and (given[0] is None or isinstance(given[0], str | int | torch.device)):
        device = given.pop(0)
        dtype = given.pop(0) if given and (given[0] is None or isinstance(given[0], torch.dtype)) else dtype
    if other is not None:
        device, dtype = other.device, other.dtype
    non_blocking, copy = (*given[:2], *(non_blocking, copy)[len(given[:2]) :])
    device = None if device is None else with_index(device)
    is_for_gpu = device is not None and device.type == "cuda"
    if not is_for_gpu and not is_fake(self):
        return TensorBase.to(self, *args, **kwargs)
    if device is not None and device.type == "meta" and not (self.requires_grad and torch.is_grad_enabled()):
        return torch.empty_strided(self.shape, self.stride(), dtype=dtype or self.dtype, device=META)
    where = [device] if device is not None and is_fake(self) != is_for_gpu else []
    if device is not None and not where and device != self.device:
        where = [METAS[device.index]]  # from one GPU to another
    memory_format = memory_format or torch.preserve_format
    how = {"non_blocking": bool(non_blocking), "copy": copy, "memory_format": memory_format}
    return TensorBase.to(self, *where, dtype or self.dtype, **how, **rest)


def tensor_cuda(self: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
    """`Tensor.cuda`."""
    return self.to(with_index("cuda" if device is None else device), memory_format=memory_format)


def type_as(self, other):
    """`Tensor.type_as`, for the same reason."""
    return self.to(other.device, other.dtype)


def deepcopy(tensor: Any, memo: dict[Any, Any]) -> Any:
    """As `torch.Tensor.__deepcopy__` and `nn.Parameter.__deepcopy__`, with their allocations."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    with torch.no_grad():
        made: Any
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(tensor.detach().clone(memory_format=torch.preserve_format), tensor.requires_grad)
        else:
            # The same view of a copy of the storage; views that are copied together share the copy.
            storage = TensorBase.untyped_storage(tensor)
            key = ("storage of fake CUDA tensors", id(storage))
            base = memo.get(key)
            if base is None or base[0]() is not storage:
                base = memo[key] = (weakref.ref(storage), restored(storage.nbytes(), tensor.device))
            made = torch.empty((), dtype=tensor.dtype, device=tensor.device)  # `self.new_empty([])` in torch/_tensor.py
            copied = TensorBase.untyped_storage(base[1])
            made = made.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
            if (values := storage.__dict__.get("host_values")) is not None:
                copied.__dict__["host_values"] = values.copy()
            made.requires_grad_(tensor.requires_grad)
            if tensor.grad is not None:
                made.grad = deepcopy(tensor.grad, memo)
    for name, value in tensor.__dict__.items():
        made.__dict__.setdefault(name, value)
    memo[id(tensor)] = made
    return made


def legacy_tensor(dtype: torch.dtype, args: Any, device: Any = "cuda") -> Any:
    """`torch.cuda.FloatTensor(...)`: sizes, or values."""
    if len(args) == 1 and isinstance(args[0], list | tuple) and not isinstance(args[0], torch.Size):
        return torch.tensor(args[0], dtype=dtype, device=device)
    return torch.empty(*(args or (0,)), dtype=dtype, device=device)


class FakeCudaTensor(torch.Tensor):
    """A CUDA tensor to Python; it has sizes, a storage without memory, and autograd state."""

    __module__ = "torch"  # libraries ask it whose tensors they are (opt_einsum)
    __torch_function__ = no_torch_function
    to, cuda, __deepcopy__ = tensor_to, tensor_cuda, deepcopy
    is_pinned, is_shared = constant(False), constant(True)
    get_device: Any = lambda self: gpus.number_on(self)
    share_memory_: Any = lambda self: self

    @classmethod
    @without_frames
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operators that no mode saw: from other threads, and from rules."""
        if State.active is None:
            raise RuntimeError(f"{func} was called on a fake CUDA tensor after its prediction had ended.")
        return State.active.dispatcher.dispatch(func, types, args, kwargs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """A GPU to user code; to shape functions written in Python, the device that C++ sees."""
        if State.devices == 1:
            return META if meta_kernels.running else CUDA0
        number = gpus.number_on(self)
        return METAS[number] if meta_kernels.running else GPUS[number]

    is_cuda: Any = property(lambda self: not meta_kernels.running)
    is_meta: Any = property(lambda self: meta_kernels.running)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """`nn.Parameter(tensor)` marks tensors of other classes as parameters (torch/nn/parameter.py)."""
        if value:
            self.__class__ = FakeCudaParameter

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        kind = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        return f"{kind}tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype}{grad})"

    def __format__(self, spec: str) -> str:
        """A single element by value, as `torch.Tensor` does for tensors that are not on meta."""
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __setitem__(self, key, value):
        """`x[...] = number` makes its number on the host (torch/csrc/autograd/python_variable_indexing.cpp)."""
        if isinstance(value, bool | int | float | complex):
            value = torch.scalar_tensor(value, dtype=self.dtype, device="cpu")
        torch.Tensor.__setitem__(self, key, value)

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """The name of its class on CUDA, or a conversion."""
        if dtype is None:
            return f"torch.cuda.{next(name for name, kind in LEGACY_TYPES.items() if kind is self.dtype)}"
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        kind = LEGACY_TYPES[name.rpartition(".")[2]]
        return self.to(kind) if name.startswith("torch.cuda.") else self.to("cpu", kind)

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Any:
        """On its own device unless another is named."""
        dtype = dtype or (data.dtype if isinstance(data, torch.Tensor) else self.dtype)
        return torch.tensor(data, dtype=dtype, device=device or self.device, requires_grad=requires_grad)

    def as_subclass(self, cls: Any) -> Any:
        """The same data as a tensor of the user's class."""
        made = torch.ops.aten.alias.default(self)
        made.__class__ = subclass(cls)
        return made

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused in one line, as there is no memory to hand over."""
        raise PredictionError(NO_DLPACK)

    def __dlpack_device__(self) -> Any:
        """CUDA's, by DLPack's numbers (kDLCUDA)."""
        return 2, gpus.number_on(self)

    def new(self, *args, **kwargs):
        """The legacy constructor."""
        return legacy_tensor(self.dtype, args, self.device)

    def numpy(self, *, force: bool = False) -> Any:
        """As on CUDA: only from the host."""
        if not force:
            raise TypeError(_NO_NUMPY)
        return self.detach().cpu().numpy()

    def __array__(self, *args, **kwargs):
        raise TypeError(_NO_NUMPY)

    def tolist(self) -> Any:
        """The values that an unknown tensor reads as."""
        State.asked = "tolist"
        try:
            return self.detach().cpu().tolist()
        finally:
            State.asked = ""

    def data_ptr(self) -> int:
        """A number that identifies the storage, like an address."""
        base = State.active.log.address_of(TensorBase.untyped_storage(self)) if State.active is not None else 0
        return int(base + self.storage_offset() * self.element_size()) if base else 0

    def record_stream(self, stream):
        """Used on another stream."""
        if State.active is not None:
            State.active.log.record_stream(TensorBase.untyped_storage(self), stream.cuda_stream)

    def pin_memory(self, *args):
        """As on CUDA."""
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def __reduce_ex__(self, protocol):
        """The pickled form: geometry and storage, without data."""
        storage = TensorBase.untyped_storage(self)
        saved = _being_saved.get(id(storage))
        if saved is None:
            saved = _being_saved[id(storage)] = SavedStorage(storage)
        return rebuilt, (saved, *_geometry(self))


for _name, _method in vars(FakeCudaTensor).items():
    if isinstance(_method, FunctionType):
        # By its name Dynamo takes it for a method of Tensor, and calls it in a graph (variables/tensor.py, 2.11 to 2.15).
        _method.__name__ = _name


class FakeCudaParameter(FakeCudaTensor, torch.nn.Parameter):
    """The result of `nn.Parameter` for a fake CUDA tensor."""

    __module__ = "torch.nn.parameter"
    _is_param = True

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """As `nn.Parameter(...)`."""
        return torch.nn.Parameter(data, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


@functools.cache
def subclass(kind: Any) -> Any:
    """The class of fake CUDA tensors that are of a user's class, too; for `torch.Tensor` the plain one."""
    if issubclass(kind, FakeCudaTensor):
        return kind
    if kind in (torch.Tensor, torch.nn.Parameter):
        return FakeCudaTensor if kind is torch.Tensor else FakeCudaParameter
    made = type(kind)(kind.__name__, (kind, _Handled), {"__module__": kind.__module__})
    own = (name for one in kind.__mro__ if not issubclass(torch.Tensor, one) for name in vars(one))
    if "__torch_function__" not in own:
        made.__torch_function__ = _plain_torch_function  # not in the body, where PyTorch switches it off
    return made


_plain_torch_function: Any = vars(torch.Tensor)["__torch_function__"]


class _Handled(FakeCudaTensor):
    """What a user's `__torch_function__` finds by `super()`: results are of its class."""


_Handled.__torch_function__ = _plain_torch_function
graph.PLAIN.update((FakeCudaTensor, FakeCudaParameter))


def wrapped(tensor: Any) -> FakeCudaTensor:
    """A fake CUDA tensor on the storage of a meta tensor."""
    how = {"dispatch_device": False, "device_for_backend_keys": CUDA0}
    made: FakeCudaTensor = make_subclass(FakeCudaTensor, tensor, False, **how)
    return made


def new_tensor(shape: Any, stride: Any, dtype: torch.dtype) -> FakeCudaTensor:
    """A fake CUDA tensor on a storage of its own, on the current GPU; nothing is logged."""
    number = gpus.current()
    if not number:
        return wrapped(_empty_strided(shape, stride, dtype=dtype, device=META))
    with meta_kernels():  # no factory makes tensors on meta:1
        return wrapped(make_wrapper_subclass(FakeCudaTensor, shape, strides=stride, dtype=dtype, device=METAS[number]))


def swap(first, second):
    """Exchange two tensors' identity, weak references and all (torch.utils.swap_tensors refuses those)."""
    kinds = type(first), type(second)
    first.__class__ = _as_parameter(kinds[1], issubclass(kinds[0], torch.nn.Parameter))
    second.__class__ = _as_parameter(kinds[0], issubclass(kinds[1], torch.nn.Parameter))
    if kinds[0] is kinds[1]:
        slots: Any = vars(copyreg)["_slotnames"]
        for slot in slots(kinds[0]):  # what tensors keep that wrap others, as DTensors do
            mine, its = getattr(first, slot, None), getattr(second, slot, None)
            setattr(first, slot, its)
            setattr(second, slot, mine)
    swap_tensor_impl(first, second)


def _as_parameter(kind: Any, wanted: bool) -> Any:
    if issubclass(kind, FakeCudaTensor):
        return FakeCudaParameter if wanted else FakeCudaTensor
    if kind in (torch.Tensor, torch.nn.Parameter):
        return torch.nn.Parameter if wanted else torch.Tensor
    return kind


def set_data(tensor, value):
    """`tensor.data = value`, also between the host and the GPU, which C++ considers incompatible types."""
    if is_fake(tensor) == is_fake(value):
        TensorBase.data.__set__(tensor, value)
        tensor.__dict__.pop("known", None)
        return
    needs_grad = tensor.requires_grad
    other = value.detach()
    with torch.no_grad():
        other.requires_grad_(needs_grad)
    swap(tensor, other)
    if not needs_grad:
        return
    if other.grad is not None:  # the swap moved it too; it follows to the device, and so do hooks
        tensor.grad = other.grad.detach().to(tensor.device)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(tensor, name, None):
            setattr(tensor, name, hooks)  # which registers them with C++ again


class SavedStorage:
    """A storage in a pickle: pickle writes each object once, so sharing is preserved."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        number = gpus.number_on(self.storage)
        return restored, (self.storage.nbytes(), *([GPUS[number]] if number else []))


_being_saved: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()


def _geometry(tensor: Any) -> tuple[Any, ...]:
    layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype
    return *layout, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)


def restored(nbytes: int, device: Any = CUDA0) -> Any:
    """A storage again, as a tensor of bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def rebuilt(
    whole: Any, shape: Any, stride: Any, offset: int, dtype: Any, requires_grad: bool, is_parameter: bool
) -> Any:
    """A tensor of this geometry on a storage."""
    with torch.no_grad():
        made = torch.empty(0, dtype=dtype, device=whole.device)
        made = made.set_(TensorBase.untyped_storage(whole), offset, shape, stride)
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def loading(load):
    """`torch.load` of tensors saved from the fake GPU; only our rebuild function is added to its allowed globals."""

    def loaded(f, map_location=None, *args, **kwargs):
        where = with_index(map_location) if isinstance(map_location, str | torch.device | int) else map_location
        on_gpu = isinstance(where, torch.device) and where.type == "cuda"
        with torch.serialization.safe_globals([restored, rebuilt]):
            value = load(f, "cpu" if on_gpu else map_location, *args, **kwargs)
        return _moved(value, where, {}) if isinstance(where, torch.device) else value

    return loaded


def _moved(value: Any, device: Any, storages: dict[int, Any]) -> Any:
    """Tensors on another device, each storage moved once."""
    if isinstance(value, torch.Tensor) and value.device != device:
        storage = TensorBase.untyped_storage(value)
        if id(storage) not in storages:
            storages[id(storage)] = (storage, restored(storage.nbytes(), device))
        return rebuilt(storages[id(storage)][1], *_geometry(value))
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device, storages) for one in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device, storages)
    return value
