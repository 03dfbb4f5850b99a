"""Large tensors on the host that carry no data until something reads them, so that a model of 70B parameters costs nothing.

They are ordinary CPU tensors whose pages were never touched: what would fill them is noted instead of run. An operator that
reads one runs the notes first; a copy to the card, a view or one more filling does not read. So `Model(config).to("cuda")`
takes address space and no memory.

Limits: random numbers are drawn when a value is first read, so their order is another than without pretend CUDA. What other
threads, other processes or C code read behind PyTorch's back is zeros.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memlab.predictor.pretend.rules import operator
from memlab.seams.dispatch import TensorBase

SMALLEST = 1 << 18
"""Tensors of fewer bytes than this are filled as always."""

_MOST_NOTES = 64


class Notes:
    """What is to be done before a storage is read: calls on views of it, or a copy of another blank."""

    __slots__ = ("calls", "ref")

    def __init__(self, storage: Any) -> None:
        self.ref = weakref.ref(storage)
        self.calls: list[Any] = []


_blank: dict[int, Notes] = {}


def notes_of(tensor: Any) -> Notes | None:
    """The notes of the storage behind a host tensor, None where it has its data."""
    if not _blank:
        return None
    storage = TensorBase.untyped_storage(tensor)
    notes = _blank.get(id(storage))
    return notes if notes is not None and notes.ref() is storage else None


def is_blank(tensor: Any) -> bool:
    """Whether a host tensor has no data yet."""
    return notes_of(tensor) is not None


def filled(tensor: Any, value: Any) -> Any:
    """Fill a new host tensor, when somebody reads it if it is large."""
    if tensor.numel() * tensor.element_size() < SMALLEST:
        return _plain(torch.ops.aten.fill_.Scalar, (tensor, value), {})
    _begin(tensor).calls.append((torch.ops.aten.fill_.Scalar, _view(tensor), (value,), {}))
    return tensor


def truncated(draw: Any) -> Any:
    """`nn.init._no_grad_trunc_normal_`, which looks at what it drew (2.13): of a host tensor without data, when it is read."""

    def trunc_normal_(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        notes = notes_of(tensor) if type(tensor) in _PLAIN else None
        if notes is None:
            return draw(tensor, mean, std, a, b, generator)
        notes.calls.append((draw, _view(tensor), (mean, std, a, b, generator), {}))
        return tensor

    return trunc_normal_


def forget() -> None:
    """Forget all notes; what was not read stays without data."""
    _blank.clear()


def host(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """One operator on host tensors."""
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}  # page-locked memory is no memory of the card
    birth = _BIRTHS.get(func)
    if birth is not None:
        return birth(func, args, kwargs, run)
    if not _blank or func in _VIEWS:
        return func(*args, **kwargs)
    first = notes_of(args[0]) if args and type(args[0]) in _PLAIN else None
    if func in _FILLS and first is not None and len(first.calls) < _MOST_NOTES and not _reads(args[1:]):
        if args[0].numel() * args[0].element_size() == first_bytes(args[0]) and func in _WHOLE:
            first.calls.clear()
        first.calls.append((func, _view(args[0]), args[1:], kwargs))
        return args[0]
    if func in _DERIVED and first is not None and not _reads(args[1:]):
        made = _derived(func, args, kwargs)
        if made is not None:
            return made
    read(args, run)
    read(list(kwargs.values()), run)
    return func(*args, **kwargs)


def first_bytes(tensor: Any) -> int:
    """The bytes of the storage behind a tensor."""
    return int(TensorBase.untyped_storage(tensor).nbytes())


def _reads(values: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and one.dim() > 0 for one in values)


def read(values: Any, run: Any = None) -> None:
    """Give the tensors among these their data, if they have none yet."""
    for one in values:
        if isinstance(one, list | tuple):
            read(one, run)
        elif type(one) in _PLAIN:
            notes = notes_of(one)
            if notes is not None:
                _give_data(one, notes)


def _give_data(tensor: Any, notes: Notes) -> None:
    storage: Any = notes.ref()
    _blank.pop(id(storage), None)
    with torch.no_grad():
        for func, view, args, kwargs in notes.calls:
            if isinstance(view, tuple):
                dtype, offset, shape, stride = view
                target = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
                _plain(func, (target, *args), kwargs)
            else:
                view(storage)


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._DisableTorchDispatch():
        return func(*args, **kwargs)


def _begin(tensor: Any) -> Notes:
    storage = TensorBase.untyped_storage(tensor)
    key = id(storage)
    notes = _blank[key] = Notes(storage)
    weakref.finalize(storage, _drop, key, notes).atexit = False
    return notes


def _drop(key: int, notes: Notes) -> None:
    if _blank.get(key) is notes:
        del _blank[key]


def _view(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


# --- operators that make tensors, and what fills them --------------------------------------------------------------------


def _empty(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Memory that nobody has touched: only a mark that it is so."""
    out = func(*args, **kwargs)
    if _is_large(out):
        _begin(out)
        run.assume(BLANK)
    return out


def _made(fill: str, values: Any = lambda args: ()) -> Any:
    """The rule of a factory that is `empty` and a filling with these values of its arguments."""
    filling = operator(fill)

    def rule(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
        size = args[0] if not isinstance(args[0], torch.Tensor) else args[0].shape
        if not isinstance(args[0], torch.Tensor) and _product(size) * 8 < SMALLEST:
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            looks = func(*args, **{**kwargs, "device": "meta"} | _no_generator(kwargs))
        if looks.numel() * looks.element_size() < SMALLEST or kwargs.get("pin_memory"):
            read(args, run)
            return func(*args, **kwargs)
        out = torch.empty_strided(looks.shape, looks.stride(), dtype=looks.dtype)
        run.assume(BLANK)
        _begin(out).calls.append((filling, _view(out), values(args), {}))
        return out

    return rule


def _one(args: Any) -> tuple[Any, ...]:
    return (1,)


def _second(args: Any) -> tuple[Any, ...]:
    return (args[1],)


def _no_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"generator": None} if kwargs.get("generator") is not None else {}


def _product(size: Any) -> int:
    count = 1
    for one in size if isinstance(size, list | tuple) else (size,):
        count *= int(one)
    return count


def _is_large(tensor: Any) -> bool:
    return bool(tensor.numel() * tensor.element_size() >= SMALLEST and tensor.device.type == "cpu")


def _derived(func: Any, args: Any, kwargs: Any) -> Any:
    """A copy or conversion of a blank is a blank; it gets its data from the other's."""
    source = args[0]
    if kwargs.get("device") is not None and kwargs["device"].type != "cpu":
        return None
    with torch._C._DisableTorchDispatch():
        looks = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        out_looks = func(looks, *args[1:], **{name: value for name, value in kwargs.items() if name != "device"})
    out = torch.empty_strided(out_looks.shape, out_looks.stride(), dtype=out_looks.dtype)
    view, rest = _view(out), args[1:]

    def fill(storage: Any) -> None:
        read([source])
        dtype, offset, shape, stride = view
        torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride).copy_(func(source, *rest, **kwargs))

    _begin(out).calls.append((func, fill, (), {}))
    return out


BLANK = "large tensors made on the host hold no data until a value is read"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BIRTHS = {
    func: rule
    for name, rule in {
        "aten.empty.memory_format": _empty,
        "aten.empty_strided.default": _empty,
        "aten.empty_like.default": _empty,
        "aten.new_empty.default": _empty,
        "aten.zeros.default": _made("aten.zero_.default"),
        "aten.zeros_like.default": _made("aten.zero_.default"),
        "aten.new_zeros.default": _made("aten.zero_.default"),
        "aten.ones.default": _made("aten.fill_.Scalar", _one),
        "aten.ones_like.default": _made("aten.fill_.Scalar", _one),
        "aten.full.default": _made("aten.fill_.Scalar", _second),
        "aten.randn.default": _made("aten.normal_.default"),
        "aten.rand.default": _made("aten.uniform_.default"),
        "aten.randn_like.default": _made("aten.normal_.default"),
        "aten.rand_like.default": _made("aten.uniform_.default"),
    }.items()
    if (func := operator(name)) is not None
}
_FILLS = {
    func
    for name in (
        "zero_.default", "fill_.Scalar", "normal_.default", "uniform_.default", "random_.default", "random_.to",
        "random_.from", "bernoulli_.float", "exponential_.default", "erfinv_.default", "mul_.Scalar", "mul_.Tensor",
        "add_.Scalar", "add_.Tensor", "sub_.Tensor", "div_.Tensor", "clamp_.default", "clamp_min_.default", "neg_.default",
        "cauchy_.default", "log_normal_.default",
    )
    if (func := operator(f"aten.{name}")) is not None
}  # fmt: skip
_WHOLE = {operator(f"aten.{name}") for name in ("zero_.default", "fill_.Scalar", "normal_.default", "uniform_.default")}
_DERIVED = {operator(f"aten.{name}") for name in ("_to_copy.default", "clone.default")}
_VIEWS = {
    func
    for name in (
        "detach.default", "alias.default", "view.default", "t.default", "transpose.int", "permute.default", "slice.Tensor",
        "select.int", "unsqueeze.default", "squeeze.default", "squeeze.dim", "expand.default", "as_strided.default",
        "_reshape_alias.default", "split.Tensor", "unbind.int", "view_as.default", "_unsafe_view.default",
        "set_.source_Storage_storage_offset", "is_pinned.default", "requires_grad_.default", "lift_fresh.default",
    )
    if (func := operator(f"aten.{name}")) is not None
}  # fmt: skip
