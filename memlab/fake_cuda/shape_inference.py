"""The results of operators: sizes, strides and dtypes, by PyTorch's own shape functions, cached per call signature.

An operator that makes new tensors runs under `FakeTensorMode` once per combination of inputs. After that the results come
from a cache, which is several times faster than that mode's own. Views and in-place operators run their meta kernels on the
fake CUDA tensors themselves, since those share their storage.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from memlab.fake_cuda.gpus import CUDA0, META
from memlab.fake_cuda.tensors import FakeCudaTensor, is_fake, new_tensor
from memlab.torch_internals.cuda_names import _disable_current_modes, meta_kernels, tree_map_only
from memlab.torch_internals.dispatch import TensorBase
from memlab.torch_internals.fakes import FakeTensor, FakeTensorMode
from memlab.torch_internals.objects import storage_id

_SCALARS = (int, float, bool, complex, str)
_HASHABLE = (torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class Uncacheable(Exception):
    """An argument that cannot be part of a cache key."""


class Fresh(NamedTuple):
    """A new result; `is_host` for those on the host."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    is_host: bool


class Same(NamedTuple):
    """A result that is one of the arguments."""

    place: int


ALIAS = object()
"""The result of an operator that shares the storage of an argument, although its schema does not say so."""


class FakeGpuMode(FakeTensorMode):
    """C++ requests new tensors on meta, the device it sees, and gets them on the GPU."""

    def dispatch(self, func, types, args=(), kwargs=None):
        """Run an operator for its shapes."""
        device = kwargs.get("device") if kwargs else None
        if device is not None and torch.device(device).type == "meta":
            kwargs = {**kwargs, "device": CUDA0}
        return super().dispatch(func, types, args, kwargs or {})


class Shapes:
    """Cached results of operators that make new tensors."""

    def __init__(self) -> None:
        self.mode = FakeGpuMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._known: dict[Any, Any] = {}
        # The mode keeps in an attribute that it is at work, and takes no second thread.
        self._asking = threading.RLock()

    def answer(self, func, args, kwargs):
        """The results as `Fresh`, `Same` or plain values, in lists and tuples as the operator returns them."""
        try:
            key = (func, torch.get_default_dtype(), _key(args), _key(tuple(kwargs.items())) if kwargs else ())
            known = self._known.get(key)
        except (Uncacheable, TypeError):
            return self._ask(func, args, kwargs)
        if known is None:
            known = self._known[key] = self._ask(func, args, kwargs)
        return known

    def _ask(self, func, args, kwargs):
        twins = {key: twin(one, self.mode) for key, one in _fakes(args, kwargs).items()}
        args, kwargs = tree_map_only(FakeCudaTensor, lambda one: twins[id(one)], (args, kwargs))
        # A rule may call this from above, where the user's modes and ours are active.
        with self._asking, _disable_current_modes():
            out = self.mode.dispatch(func, (FakeTensor,), args, kwargs)
        places = {id(one): place for place, one in enumerate(twins.values())}
        storages = {storage_id(TensorBase.untyped_storage(one)) for one in twins.values()}
        return _described(out, places, storages)


def twin(tensor: Any, mode: FakeTensorMode) -> FakeTensor:
    """A tensor of the same geometry; on its own storage, as fake tensors make theirs warn when their address is read."""
    with meta_kernels():
        inner = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
        if tensor.dtype.is_complex and tensor.is_conj():
            inner = inner.conj()
    return FakeTensor(mode, inner, CUDA0 if is_fake(tensor) else torch.device("cpu"))


def _fakes(args: Any, kwargs: Any) -> dict[int, Any]:
    """The fake CUDA tensors in arguments by their id, each once."""
    found: dict[int, Any] = {}
    tree_map_only(FakeCudaTensor, lambda one: found.setdefault(id(one), one), (args, kwargs))
    return found


def _described(out: Any, places: dict[int, int], storages: set[int]) -> Any:
    if isinstance(out, torch.Tensor):
        if id(out) in places:
            return Same(places[id(out)])
        storage = TensorBase.untyped_storage(out)
        if storage_id(storage) in storages:
            return ALIAS
        return Fresh(tuple(out.shape), tuple(out.stride()), out.dtype, storage.nbytes(), out.device.type == "cpu")
    if isinstance(out, list | tuple):
        items = [_described(one, places, storages) for one in out]
        if any(one is ALIAS for one in items):
            return ALIAS
        return items if isinstance(out, list) else tuple(items)
    return out


def made(answer, args, kwargs, born):
    """The results of an answer; `born(tensor, fresh)` is called with each new one."""
    kind = type(answer)
    if kind is Fresh:
        if answer.is_host:
            return torch.zeros(answer.shape, dtype=answer.dtype)
        tensor = new_tensor(answer.shape, answer.stride, answer.dtype)
        born(tensor, answer)
        return tensor
    if kind is Same:
        return list(_fakes(args, kwargs).values())[answer.place]
    if kind is tuple or kind is list:
        return kind(made(one, args, kwargs, born) for one in answer)
    return answer


def _key(value):
    """The cache key of a call: geometry of tensors, values and types of other arguments."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        if value.dtype.is_complex and (value.is_conj() or value.is_neg()):
            raise Uncacheable
        return value.shape, value.stride(), value.dtype, "" if issubclass(kind, FakeCudaTensor) else "cpu"
    if kind in _SCALARS:
        return kind, value
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple([_key(one) for one in value])
    if kind in _HASHABLE:
        return value
    if kind is torch.Generator:
        return None
    raise Uncacheable
