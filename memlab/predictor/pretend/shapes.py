"""What comes out of an operator: sizes, strides and types, by PyTorch's own shape functions, remembered per call.

An operator that makes new tensors is asked once for each combination of what goes in: `FakeTensorMode` says what comes out.
After that the results are made from memory, which is several times faster than that mode's own cache. Views and operators in
place run their meta kernels on the pretend tensors themselves, since those share their storage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from memlab.predictor.pretend.tensors import CUDA0, META, PretendTensor, State, wrapped
from memlab.seams.dispatch import TensorBase

_empty_strided = torch.empty_strided
_SCALARS = (int, float, bool, complex, str)
_HASHABLE = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class Uncacheable(Exception):
    """An argument that a call cannot be remembered by."""


class Fresh:
    """A result to be made anew; `is_host` for those that land on the host."""

    __slots__ = ("dtype", "is_host", "nbytes", "shape", "stride")

    def __init__(self, tensor: Any) -> None:
        self.shape, self.stride, self.dtype = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        self.is_host = tensor.device.type == "cpu"
        self.nbytes = TensorBase.untyped_storage(tensor).nbytes()


class Same:
    """A result that is one of the arguments."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class _Mode(FakeTensorMode):
    """C++ asks for new tensors on meta, the device it believes in, and gets them on the card."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = kwargs.get("device") if kwargs else None
        if device is not None and torch.device(device).type == "meta":
            kwargs = {**kwargs, "device": CUDA0}
        return super().dispatch(func, types, args, kwargs or {})


ALIAS = object()
"""The answer for an operator whose result shares the storage of an argument, though its schema does not say so."""


class Shapes:
    """Answers for operators that make new tensors."""

    def __init__(self) -> None:
        self.mode = _Mode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._known: dict[Any, Any] = {}

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results as `Fresh`, `Same` or plain values, in lists and tuples as the operator returns them."""
        try:
            key = (func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items())) if kwargs else ())
            known = self._known.get(key)
        except (Uncacheable, TypeError):
            return self._ask(func, args, kwargs)
        if known is None:
            known = self._known[key] = self._ask(func, args, kwargs)
        return known

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        twins: dict[int, tuple[Any, int]] = {}
        twin_args, twin_kwargs = self._twin(args, twins), self._twin(kwargs, twins)
        with _disable_current_modes():  # a rule may ask from above, where the user's modes and ours are on
            out = self.mode.dispatch(func, (FakeTensor,), twin_args, twin_kwargs)
        storages = {TensorBase.untyped_storage(twin)._cdata for twin, _ in twins.values()}
        return _described(out, {id(twin): place for twin, place in twins.values()}, storages)

    def _twin(self, value: Any, twins: dict[int, tuple[Any, int]]) -> Any:
        """Arguments with tensors for the shape functions in place of pretend ones."""
        if isinstance(value, PretendTensor):
            if id(value) not in twins:
                twins[id(value)] = (self._fake(value), len(twins))
            return twins[id(value)][0]
        if isinstance(value, list | tuple):
            return type(value)(self._twin(one, twins) for one in value)
        if isinstance(value, dict):
            return {name: self._twin(one, twins) for name, one in value.items()}
        return value

    def _fake(self, tensor: Any) -> Any:
        """A tensor of the same looks; on a storage of its own, as fake tensors make theirs warn when asked for an address."""
        with meta_kernels():
            elem = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
            if tensor.dtype.is_complex and tensor.is_conj():
                elem = elem.conj()
        return FakeTensor(self.mode, elem, CUDA0)


def made(answer: Any, args: Any, kwargs: Any, born: Any) -> Any:
    """The results of an answer; `born(tensor, fresh)` is told of each new one."""
    kind = type(answer)
    if kind is Fresh:
        if answer.is_host:
            return torch.zeros(answer.shape, dtype=answer.dtype)
        tensor = wrapped(_empty_strided(answer.shape, answer.stride, dtype=answer.dtype, device=META))
        born(tensor, answer)
        return tensor
    if kind is Same:
        return _tensors((args, kwargs), {})[answer.place]
    if kind is tuple or kind is list:
        return kind(made(one, args, kwargs, born) for one in answer)
    return answer


def _tensors(value: Any, found: dict[int, Any]) -> list[Any]:
    """The pretend tensors in arguments, in the order of `Shapes._twin`."""
    if isinstance(value, PretendTensor):
        found.setdefault(id(value), value)
    elif isinstance(value, list | tuple):
        for one in value:
            _tensors(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _tensors(one, found)
    return list(found.values())


def _described(out: Any, places: dict[int, int], storages: set[int]) -> Any:
    if isinstance(out, torch.Tensor):
        if id(out) in places:
            return Same(places[id(out)])
        return ALIAS if TensorBase.untyped_storage(out)._cdata in storages else Fresh(out)
    if isinstance(out, list | tuple):
        items = [_described(one, places, storages) for one in out]
        if any(one is ALIAS for one in items):
            return ALIAS
        return items if isinstance(out, list) else tuple(items)
    return out


def _key(value: Any) -> Any:
    """What tells one call from another: looks of tensors, values and types of the rest."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        if value.dtype.is_complex and (value.is_conj() or value.is_neg()):
            raise Uncacheable
        where = "" if issubclass(kind, PretendTensor) else "cpu"
        return value.shape, value.stride(), value.dtype, where
    if kind in _SCALARS:
        return kind, value
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple([_key(one) for one in value])
    if kind in _HASHABLE:
        return value
    if kind is torch.Generator:
        return None
    raise Uncacheable


class meta_kernels:
    """Within it, operators on pretend tensors run their meta kernels (torch._subclasses.fake_tensor, 2.11 to 2.15)."""

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        off, keep = torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard()
        off.__enter__()
        keep.__enter__()
        torch._C._set_meta_in_tls_dispatch_include(True)
        State.in_kernel = True
        self._guards = (keep, off)

    def __exit__(self, *error: Any) -> None:
        State.in_kernel = False
        for guard in self._guards:
            guard.__exit__(*error)
