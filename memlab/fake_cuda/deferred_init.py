"""Large host tensors without data until something reads them, so that a model of 70B parameters costs nothing.

They are ordinary CPU tensors whose pages were never touched: the operators that would fill them are recorded instead of
run. An operator that reads one runs them first; a copy to the GPU, a view or another fill does not read. So
`Model(config).to("cuda")` takes address space and no memory.

Limits: random numbers are drawn when a value is first read, so their order differs from that without fake CUDA. Other
threads, other processes and C code that bypasses PyTorch read zeros.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memlab.fake_cuda.kernel_rules import bytes_of, flat, operator, operators
from memlab.torch_internals.cuda_names import without_dispatch
from memlab.torch_internals.dispatch import TensorBase

SMALLEST = 1 << 18
"""Smaller tensors are filled at once."""
DEFERRED = "large tensors made on the host hold no data until a value is read"
_MOST_FILLS = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)


Fill = Callable[[Any], None]
every_pending: weakref.WeakKeyDictionary[Any, list[Fill]] = weakref.WeakKeyDictionary()
"""Storage -> pending fills, functions of the storage."""


def pending(tensor: Any) -> list[Fill] | None:
    """The pending fills of a host tensor's storage; None if it has its data."""
    return every_pending.get(TensorBase.untyped_storage(tensor)) if every_pending else None


def forget() -> None:
    """Drop all pending fills; unread tensors stay without data."""
    every_pending.clear()


def _defer(tensor: Any, *fills: Fill) -> Any:
    """A tensor whose storage is filled later."""
    every_pending[TensorBase.untyped_storage(tensor)] = [*fills]
    return tensor


def _fill(func: Any, tensor: Any, args: Any = (), kwargs: Any = None) -> Fill:
    """A deferred call on this view of a storage."""
    dtype, offset, shape, stride = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def fill(storage):
        view = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        with without_dispatch():
            func(view, *args, **(kwargs or {}))

    return fill


def read(values):
    """Fill the tensors among these that are pending."""
    for one in flat(values):
        if type(one) in _PLAIN and (fills := pending(one)) is not None:
            storage = TensorBase.untyped_storage(one)
            every_pending.pop(storage, None)
            with torch.no_grad():
                for fill in fills:
                    fill(storage)


def filled(tensor, value):
    """Fill a new host tensor; if it is large, when it is read."""
    if bytes_of(tensor) < SMALLEST:
        with without_dispatch():
            return torch.ops.aten.fill_.Scalar(tensor, value)
    return _defer(tensor, _fill(torch.ops.aten.fill_.Scalar, tensor, (value,)))


def deferred(draw):
    """Wrap a function that fills a tensor and inspects the values: deferred if the host tensor has no data yet."""

    def drawing(tensor, *args, **kwargs):
        known = pending(tensor) if type(tensor) in _PLAIN else None
        if known is None:
            return draw(tensor, *args, **kwargs)
        known.append(_fill(draw, tensor, args, kwargs))
        return tensor

    return drawing


def on_host(func, args, kwargs, cuda):
    """One operator on host tensors."""
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}  # pinned memory is not GPU memory
    if func in _FACTORIES:
        return _created(func, args, kwargs, cuda)
    if not every_pending or func in _VIEWS:
        return func(*args, **kwargs)
    first = pending(args[0]) if args and type(args[0]) in _PLAIN else None
    if first is not None and not any(isinstance(one, torch.Tensor) and one.dim() > 0 for one in args[1:]):
        if func in _FILLS and len(first) < _MOST_FILLS:
            if func in _WHOLE and bytes_of(args[0]) == TensorBase.untyped_storage(args[0]).nbytes():
                first.clear()
            first.append(_fill(func, args[0], args[1:], kwargs))
            return args[0]
        if func in _COPIES and (kwargs.get("device") is None or kwargs["device"].type == "cpu"):
            return _copied(func, *args, **kwargs)
    read((*args, *kwargs.values()))
    return func(*args, **kwargs)


def _created(func, args, kwargs, cuda):
    """A new tensor: `empty` with a pending fill."""
    filling, values = _FACTORIES[func]
    model = args[0] if args and isinstance(args[0], torch.Tensor) and kwargs.get("device") is None else None
    if model is not None and TensorBase.is_meta.__get__(model):
        return func(*args, **kwargs)  # like a tensor of the meta device, and so there
    if filling is None:
        out = func(*args, **kwargs)
        if bytes_of(out) < SMALLEST or out.device.type != "cpu":
            return out
    else:
        size = args[0] if isinstance(args[0], list | tuple) else (args[0],)
        if not isinstance(args[0], torch.Tensor) and math.prod(map(int, size)) * 8 < SMALLEST:
            return func(*args, **kwargs)
        on_meta = {"device": "meta"} | ({"generator": None} if kwargs.get("generator") is not None else {})
        with without_dispatch():
            looks = func(*args, **{**kwargs, **on_meta})
        if bytes_of(looks) < SMALLEST:
            read(args)
            return func(*args, **kwargs)
        out = torch.empty_strided(looks.shape, looks.stride(), dtype=looks.dtype)
    cuda.assume(DEFERRED)
    return _defer(out, *([] if filling is None else [_fill(filling, out, values(args))]))


def _copied(func, source, *args, **kwargs):
    """A copy or conversion of a deferred tensor is deferred; it is filled from the source's data."""
    with without_dispatch():
        looks = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        looks = func(looks, *args, **{name: value for name, value in kwargs.items() if name != "device"})
    out = torch.empty_strided(looks.shape, looks.stride(), dtype=looks.dtype)

    def copy(view):
        read([source])
        view.copy_(func(source, *args, **kwargs))

    return _defer(out, _fill(copy, out))


def copied_to(target, source):
    """`target.copy_(source)` of host tensors: later, if both have no data, as when a tensor is moved to pinned memory."""
    fills = pending(target)
    if fills is None or pending(source) is None or len(fills) >= _MOST_FILLS:
        return target.copy_(source)
    if bytes_of(target) == TensorBase.untyped_storage(target).nbytes():
        fills.clear()

    def copy(view):
        read([source])
        view.copy_(source)

    fills.append(_fill(copy, target))
    return target


_NOTHING: Any = lambda args: ()  # noqa: E731
_FACTORIES: dict[Any, tuple[Any, Any]] = {
    func: (operator(filling) if filling else None, values)
    for filling, values, names in (
        ("", _NOTHING, ("empty.memory_format", "empty_strided.default", "empty_like.default", "new_empty.default")),
        ("zero_.default", _NOTHING, ("zeros.default", "zeros_like.default", "new_zeros.default")),
        ("fill_.Scalar", lambda args: (1,), ("ones.default", "ones_like.default")),
        ("fill_.Scalar", lambda args: (args[1],), ("full.default",)),
        ("normal_.default", _NOTHING, ("randn.default", "randn_like.default")),
        ("uniform_.default", _NOTHING, ("rand.default", "rand_like.default")),
    )
    for func in operators(names)
}
"""Operator -> (what fills its result, with which of its arguments)."""
_FILLS = operators((
    "zero_.default", "fill_.Scalar", "normal_.default", "uniform_.default", "random_.default", "random_.to", "random_.from",
    "bernoulli_.float", "exponential_.default", "erfinv_.default", "mul_.Scalar", "mul_.Tensor", "add_.Scalar", "add_.Tensor",
    "sub_.Tensor", "div_.Tensor", "clamp_.default", "clamp_min_.default", "neg_.default", "cauchy_.default",
    "log_normal_.default",
))  # fmt: skip
_WHOLE = operators(("zero_.default", "fill_.Scalar", "normal_.default", "uniform_.default"))
"""Operators that overwrite the whole tensor."""
_COPIES = operators(("_to_copy.default", "clone.default"))
_VIEWS = operators((
    "detach.default", "alias.default", "view.default", "t.default", "transpose.int", "permute.default", "slice.Tensor",
    "select.int", "unsqueeze.default", "squeeze.default", "squeeze.dim", "expand.default", "as_strided.default",
    "_reshape_alias.default", "split.Tensor", "unbind.int", "view_as.default", "_unsafe_view.default",
    "set_.source_Storage_storage_offset", "is_pinned.default", "requires_grad_.default", "lift_fresh.default",
))  # fmt: skip
