"""Tensors without data: what C++ takes for meta tensors with the dispatch keys of CUDA, and Python for CUDA tensors.

C++ must not see a CUDA device, or it asks for device guards and a context, and backward aborts the process where there are
none (seen in 2.11 to 2.15); autograd takes a meta device as it takes the CPU's.
"""

from __future__ import annotations

from typing import Any

import torch

from memlab.seams.dispatch import TensorBase

CUDA0 = torch.device("cuda:0")
META = torch.device("meta")
_make_subclass = torch.Tensor._make_subclass
_AS_ON_CUDA = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
)
_KEPT_DATA = torch.preserve_format


class State:
    """What tensors have to know wherever they are met: the pretend CUDA that is on, and whether a meta kernel runs."""

    active: Any = None
    in_kernel = False
    keeps_tracebacks = False
    """For who looks for a mistake of ours."""


class PretendTensor(torch.Tensor):
    """A CUDA tensor to Python; it has sizes, a storage of no memory, and whatever autograd gives it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Operators that no mode saw: those of other threads, and of rules."""
        active = State.active
        if active is None:
            raise RuntimeError(f"{func} was called on a pretend CUDA tensor after its prediction had ended.")
        try:
            return active.run.dispatch(func, types, args, kwargs)
        except BaseException as problem:
            error = bare(problem)
        try:
            raise error
        finally:  # a frame that holds its own error keeps all frames alive until the garbage is collected
            del args, kwargs, error

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where user code finds it; shape functions written in Python are told what C++ sees."""
        return META if State.in_kernel else CUDA0

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """As on CUDA."""
        return not State.in_kernel

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """As on CUDA."""
        return State.in_kernel

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """`nn.Parameter(tensor)` marks what it made of a tensor of a class of its own (torch/nn/parameter.py)."""
        if value:
            self.__class__ = PretendParameter

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        kind = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        return f"{kind}tensor(..., device='cuda:0', size={shape}, dtype={self.dtype}{grad})"

    def __format__(self, spec: str) -> str:
        """A single number as its value, as `torch.Tensor` does with tensors that are not on meta."""
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def get_device(self) -> int:
        """As on CUDA."""
        return 0

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """C++ would copy what is there already, as it thinks it is on another device."""
        device, dtype, copy, memory_format, rest = parse_to(args, kwargs)
        if device is not None and device.type != "cuda":
            return TensorBase.to(self, device, dtype or self.dtype, copy=copy, memory_format=memory_format, **rest)
        return TensorBase.to(self, dtype or self.dtype, copy=copy, memory_format=memory_format, **rest)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = _KEPT_DATA) -> Any:
        """It is there already."""
        return self.to(CUDA0 if device is None else device, memory_format=memory_format)

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
        known = dtype or (data.dtype if isinstance(data, torch.Tensor) else self.dtype)
        return torch.tensor(data, dtype=known, device=device or CUDA0, requires_grad=requires_grad)

    def new(self, *args: Any, **kwargs: Any) -> Any:
        """The legacy constructor."""
        if len(args) == 1 and isinstance(args[0], list | tuple) and not isinstance(args[0], torch.Size):
            return torch.tensor(args[0], dtype=self.dtype, device=CUDA0)
        return torch.empty(*(args or (0,)), dtype=self.dtype, device=CUDA0)

    def numpy(self, *, force: bool = False) -> Any:
        """As on CUDA: only from the host."""
        if not force:
            raise TypeError(_AS_ON_CUDA)
        return self.detach().cpu().numpy()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_AS_ON_CUDA)

    def tolist(self) -> Any:
        """The values that an unknown tensor reads as."""
        return self.detach().cpu().tolist()

    def data_ptr(self) -> int:
        """A number that tells storages apart, as an address does."""
        active = State.active
        base = active.log.address_of(TensorBase.untyped_storage(self)) if active is not None else 0
        return int(base + self.storage_offset() * self.element_size()) if base else 0

    def record_stream(self, stream: Any) -> None:
        """Used on another stream."""
        if State.active is not None:
            State.active.log.record_stream(TensorBase.untyped_storage(self), stream.cuda_stream)

    def pin_memory(self, *args: Any) -> Any:
        """As on CUDA."""
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def is_pinned(self, *args: Any) -> bool:
        """As on CUDA."""
        return False

    def is_shared(self) -> bool:
        """As on CUDA."""
        return True

    def share_memory_(self) -> Any:
        """As on CUDA, nothing."""
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        from memlab.predictor.pretend.copies import deepcopy

        return deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        from memlab.predictor.pretend.copies import reduced

        return reduced(self)


class PretendParameter(PretendTensor, torch.nn.Parameter):
    """What `nn.Parameter` makes of a pretend tensor."""

    _is_param = True

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """As `nn.Parameter(...)`."""
        return torch.nn.Parameter(data, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return PretendTensor.__repr__(self)


def wrapped(tensor: Any) -> PretendTensor:
    """A pretend CUDA tensor on the storage of a meta tensor."""
    made: PretendTensor = _make_subclass(
        PretendTensor, tensor, False, dispatch_device=False, device_for_backend_keys=CUDA0
    )
    return made


def bare(error: BaseException) -> BaseException:
    """An error without the frames that it came through: they keep the arguments of operators alive."""
    error.__context__ = error.__cause__ = None
    return error if State.keeps_tracebacks else error.with_traceback(None)


def is_pretend(thing: Any) -> bool:
    """Whether it is a pretend CUDA tensor."""
    return issubclass(type(thing), PretendTensor)


def to_meta(device: Any) -> bool:
    """Whether a device names the meta device."""
    return device is not None and torch.device(device).type == "meta"


def with_index(device: Any) -> torch.device:
    """'cuda', 0 and cuda without an index all mean cuda:0; there is no other."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda":
        if device.index not in (None, 0):
            raise RuntimeError(f"CUDA error: invalid device ordinal. The pretend card is cuda:0, got {device}.")
        return CUDA0
    return device


def parse_to(args: Any, kwargs: Any) -> tuple[Any, Any, bool, Any, dict[str, Any]]:
    """(device, dtype, copy, memory_format, the rest) of the arguments of `Tensor.to`."""
    kwargs = dict(kwargs)
    device, dtype, copy = kwargs.pop("device", None), kwargs.pop("dtype", None), kwargs.pop("copy", False)
    memory_format = kwargs.pop("memory_format", None) or _KEPT_DATA
    other, args = kwargs.pop("other", None), list(args)
    kwargs.pop("non_blocking", None)
    if args and isinstance(args[0], torch.Tensor):
        other = args.pop(0)
    elif args and isinstance(args[0], torch.dtype):
        dtype = args.pop(0)
    elif args and (args[0] is None or isinstance(args[0], str | int | torch.device)):
        device = args.pop(0)
        dtype = args.pop(0) if args and (args[0] is None or isinstance(args[0], torch.dtype)) else dtype
    if other is not None:
        device, dtype = other.device, other.dtype
    args.pop(0) if args else None  # non_blocking
    copy = args.pop(0) if args else copy
    return None if device is None else with_index(device), dtype, copy, memory_format, kwargs


def swap(first: Any, second: Any) -> None:
    """Exchange two tensors' identity, weak references and all (torch.utils.swap_tensors refuses those)."""
    first_kind, second_kind = type(first), type(second)
    first_is, second_is = issubclass(first_kind, torch.nn.Parameter), issubclass(second_kind, torch.nn.Parameter)
    first.__class__ = _as_parameter(second_kind, first_is)
    second.__class__ = _as_parameter(first_kind, second_is)
    torch._C._swap_tensor_impl(first, second)


def _as_parameter(kind: Any, wanted: bool) -> Any:
    """The class for a tensor of this kind, as a parameter or not."""
    if issubclass(kind, PretendTensor):
        return PretendParameter if wanted else PretendTensor
    if kind in (torch.Tensor, torch.nn.Parameter):
        return torch.nn.Parameter if wanted else torch.Tensor
    return kind


def set_data(tensor: Any, value: Any) -> None:
    """`tensor.data = value`, also between the host and the card, which C++ takes for incompatible types."""
    if is_pretend(tensor) == is_pretend(value):
        TensorBase.data.__set__(tensor, value)
        return
    needs_grad = tensor.requires_grad
    other = value.detach()
    with torch.no_grad():
        other.requires_grad_(needs_grad)
    swap(tensor, other)
    _keep_hooks(tensor, other)


def _keep_hooks(tensor: Any, other: Any) -> None:
    """What the swap took along: the gradient, which follows to the device, and hooks."""
    if not tensor.requires_grad:
        return
    if other.grad is not None:
        tensor.grad = other.grad.detach().to(tensor.device)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        found = getattr(tensor, hooks, None)
        if found:
            setattr(tensor, hooks, found)  # which tells C++ of them again


def host_to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.to` of tensors on the host.

    C++ would ask the driver for the index of "cuda" (ATen/native/TensorConversions.cpp, ensure_has_index), and take the
    device of a pretend tensor for meta.
    """
    device, dtype, copy, memory_format, rest = parse_to(args, kwargs)
    if device is None or device.type != "cuda":
        return TensorBase.to(self, *args, **kwargs)
    return TensorBase.to(self, device, dtype or self.dtype, copy=copy, memory_format=memory_format, **rest)


def host_to_cuda(self: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = _KEPT_DATA) -> Any:
    """`Tensor.cuda` of tensors on the host."""
    return self.to(CUDA0 if device is None else with_index(device), memory_format=memory_format)


def type_as(self: Any, other: Any) -> Any:
    """`Tensor.type_as`, for the same reason."""
    return self.to(other.device, other.dtype)


LEGACY_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
    "ComplexFloatTensor": torch.complex64,
    "ComplexDoubleTensor": torch.complex128,
}
