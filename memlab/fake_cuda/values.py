"""Which values of fake CUDA tensors are known.

Values are known of what the host copied in or what a factory made (`torch.zeros`, `arange`, ...), within `MOST_NUMBERS` and
`MOST_FLOATS`, and of what follows from known values alone: each operator on them also runs on the host.

They belong to the storage, so that a view knows what its base knows and a write through either is seen by both. A write of
unknown values makes the whole storage unknown. A boolean of which only some elements are known has two readings: `host`, where
the unknown ones are True, and `certain`, where they are False (Kleene's logic); operators other than and, or, not, any and
all lose both.

`__dict__["known"]` of a tensor tells the dispatcher to call `follow`; it may outlive what is known. It is True, or a pair: the
storage's values, and how the tensor sees them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from memlab.fake_cuda import index_bounds
from memlab.fake_cuda.kernel_rules import flat, operators
from memlab.fake_cuda.tensors import FakeCudaTensor, is_fake
from memlab.torch_internals.dispatch import TensorBase
from memlab.torch_internals.objects import schema_of

aten = torch.ops.aten
MOST_NUMBERS, MOST_FLOATS = 65536, 64
"""Larger tensors do not keep their values: elements of what is computed, of integers and booleans; of new floats."""
MOST_INPUTS = 16 * MOST_NUMBERS
"""Nothing is computed from larger ones, which are expanded."""
KEY = "host_values"
"""Where a storage keeps them."""
_storage = TensorBase.untyped_storage
_empty, _Storage = torch.empty, torch.UntypedStorage


class Values:
    """The contents of a storage, on the host."""

    __slots__ = ("assumed", "certain", "host")

    def __init__(self, host: Any, certain: Any = None, assumed: bool = False) -> None:
        self.host, self.certain, self.assumed = host, certain, assumed
        host.__dict__["is_shadow"] = True

    def copy(self) -> Values:
        """The same for a copy of the storage."""
        certain = None if self.certain is None else self.certain.clone()
        return Values(self.host.clone(), certain, self.assumed)


def of(tensor: Any) -> Values | None:
    """What is known of a fake CUDA tensor's storage."""
    storage = _storage(tensor)
    values: Values | None = storage.__dict__.get(KEY)
    return values if values is not None and values.host.nbytes() == storage.nbytes() else None


def _seen(tensor: Any, host: Any) -> Any:
    """A storage on the host as this tensor sees its own."""
    view = _empty(0, dtype=tensor.dtype, device="cpu")
    view.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())
    return view.conj() if tensor.dtype.is_complex and tensor.is_conj() else view


def known(tensor: Any) -> Any:
    """The values of a fake CUDA tensor, on the host, not to be changed; None if some are unknown."""
    values = of(tensor)
    return None if values is None else _read(tensor, values)


def _read(tensor: Any, values: Values) -> Any:
    mark = tensor.__dict__.get("known")
    if type(mark) is tuple and mark[0] is values:
        return mark[1]
    if tensor.dtype.is_floating_point and tensor.is_neg():
        return None
    seen = _seen(tensor, values.host)
    if values.certain is None:
        tensor.__dict__["known"] = (values, seen)
    elif not torch.equal(seen, _seen(tensor, values.certain)):
        return None
    return seen


def possible(tensor: Any) -> Any:
    """The values where the unknown ones of some booleans are True; None if nothing is known."""
    values = of(tensor)
    return None if values is None else _seen(tensor, values.host)


def count_bounds(tensor: Any) -> tuple[int, int]:
    """How many elements of a tensor that is not known are nonzero, at least and at most."""
    values = of(tensor) if tensor.dtype is torch.bool else None
    if values is None or values.certain is None:
        return 0, most_nonzero(tensor)
    return int(_seen(tensor, values.certain).count_nonzero()), int(_seen(tensor, values.host).count_nonzero())


def most_nonzero(tensor: Any) -> int:
    """How many elements are nonzero at most: known ones, and as many as indices have been written to."""
    storage = _storage(tensor)
    written = storage.__dict__.get(index_bounds.MOST)
    if written is None and (found := known(tensor)) is not None:
        return int(found.count_nonzero())
    return int(tensor.numel() if written is None else min(written, tensor.numel()))


def settled(mask: Any) -> int | None:
    """How many of its elements were assumed to be nonzero; None if nobody has read it yet."""
    count: int | None = _storage(mask).__dict__.get(index_bounds.COUNT) if _covers(mask) else None
    return count


def settle(mask: Any, count: int) -> None:
    """Record how many elements of a mask were assumed to be nonzero, if it is all of its storage."""
    if _covers(mask):
        index_bounds.settle(mask, count)


def room(mask: Any) -> int | None:
    """How many elements may be nonzero beside those of other parts of one tensor; None if that is not known."""
    return index_bounds.room(mask) if _covers(mask) else None


def bound_nonzero(out: Any, most: int) -> None:
    """Record that a tensor has so many nonzero elements at most."""
    if is_fake(out) and most < out.numel():
        _storage(out).__dict__[index_bounds.MOST] = most


def _most_after(args: Any) -> int | None:
    """The same for a tensor after `tensor[indices] = value`, each element by an index; None if nothing is known."""
    tensor, indices = args[:2]
    if len(indices) != tensor.dim() or not all(is_fake(one) and one.dtype is torch.int64 for one in indices):
        return None
    return most_nonzero(tensor) + math.prod(torch.broadcast_shapes(*(one.shape for one in indices)))


def is_assumed(tensor: Any) -> bool:
    """Whether what is known of it follows from a value that was assumed."""
    values = of(tensor)
    return values is not None and values.assumed


def is_small(tensor: Any) -> bool:
    """Whether a new tensor keeps its values."""
    dtype = tensor.dtype
    return bool(tensor.numel() <= (MOST_FLOATS if dtype.is_floating_point or dtype.is_complex else MOST_NUMBERS))


def _covers(tensor: Any) -> bool:
    """Whether it is all of its storage."""
    return bool(tensor.numel() * tensor.element_size() == _storage(tensor).nbytes())


def know(tensor: Any, source: Any, certain: Any = None, assumed: bool = False) -> None:
    """Record that a fake CUDA tensor, which is all of its storage, has the values of this host tensor."""
    storage = _storage(tensor)
    host = _Storage(storage.nbytes())
    _seen(tensor, host).copy_(source.detach())
    if certain is not None:
        low = _Storage(storage.nbytes())
        _seen(tensor, low).copy_(certain)
        certain = low
    storage.__dict__[KEY] = Values(host, certain, assumed)
    tensor.__dict__["known"] = True


def _adopt(tensor: Any, result: Any, assumed: bool) -> None:
    """The same for a result that nobody else holds."""
    storage, host = _storage(tensor), result.untyped_storage()
    fits = result.stride() == tensor.stride() and not result.storage_offset() and host.nbytes() == storage.nbytes()
    if fits and result.dtype is tensor.dtype and "is_shadow" not in host.__dict__ and not result.is_conj():
        storage.__dict__[KEY] = Values(host, None, assumed)
        tensor.__dict__["known"] = True
    elif result.shape == tensor.shape:
        know(tensor, result, assumed=assumed)


def forget(tensor: Any) -> None:
    """Its values have become unknown."""
    _storage(tensor).__dict__.pop(KEY, None)
    tensor.__dict__.pop("known", None)


def write(tensor: Any, source: Any, assumed: bool = False) -> None:
    """Record that these values of the host, None for unknown ones, were copied into a fake CUDA tensor."""
    values = of(tensor)
    if source is None or (values is not None and values.certain is not None and not _covers(tensor)):
        forget(tensor)
    elif values is not None and values.certain is None:
        _seen(tensor, values.host).copy_(source)
        values.assumed |= assumed
        tensor.__dict__["known"] = True
    elif _covers(tensor) and is_small(tensor):
        know(tensor, source, assumed=assumed)
    else:
        forget(tensor)


def follow(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """If all inputs are known, compute the result too; called if the first argument was known once."""
    if func in _SETTLED:
        return
    values = of(args[0])
    if values is None:
        args[0].__dict__.pop("known", None)
        return
    if schema_of(func).is_mutable:
        _change(values, func, args, kwargs)
        return
    if out is args[0]:  # a formula of autograd that continues in place on its own result (`gradient_accumulation`)
        forget(out)
        return
    fresh = []
    for one in _tensors(out):
        if KEY in _storage(one).__dict__:
            one.__dict__["known"] = True  # a view
        else:
            fresh.append(one)
    if not fresh or func in _NEVER_KNOWN or any(one.numel() > MOST_NUMBERS for one in fresh):
        return
    if torch.Tag.nondeterministic_seeded in func.tags:
        return
    try:
        inputs, options, assumed = _inputs(args, kwargs)
        results = func(*inputs, **options)
        for one, result in zip(_tensors(out), _tensors(results, torch.Tensor), strict=True):
            _adopt(one, result, assumed)
    except Exception:  # an unknown argument, or an operator that the host lacks: the result is unknown
        return


def _tensors(out: Any, kind: Any = FakeCudaTensor) -> Any:
    """The tensors of a result."""
    if isinstance(out, kind):
        return (out,)
    return [one for one in out if isinstance(one, kind)] if isinstance(out, list | tuple) else ()


def _inputs(args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """The arguments on the host, and whether any follows from an assumption; LookupError if one is unknown."""
    assumed = False

    def value(one: Any) -> Any:
        nonlocal assumed
        if is_fake(one):
            values = of(one)
            found = None if values is None or one.numel() > MOST_INPUTS else _read(one, values)
            if values is None or found is None:
                raise LookupError
            assumed |= values.assumed
            return found
        return [value(inner) for inner in one] if type(one) in (list, tuple) else one

    options = {name: value(given) for name, given in kwargs.items() if name not in ("device", "pin_memory")}
    return [value(one) for one in args], options, assumed


def _change(values: Values, func: Any, args: Any, kwargs: Any) -> None:
    """An operator in place, also on the host; `written` has dealt with results elsewhere than in the first argument."""
    if torch.Tag.nondeterministic_seeded in func.tags or values.certain is not None or "out" in kwargs:
        forget(args[0])
        return
    try:
        inputs, options, assumed = _inputs(args, kwargs)
        with torch.no_grad():
            func(*inputs, **options)
        values.assumed |= assumed
    except Exception:
        forget(args[0])


@functools.cache
def _writes(func: Any) -> tuple[tuple[int, ...], bool]:
    """The places of the arguments that an operator writes to, and whether it does so to results given by name."""
    arguments = enumerate(schema_of(func).arguments)
    written = [pair for pair in arguments if pair[1].alias_info is not None and pair[1].alias_info.is_write]
    places = tuple(place for place, one in written if not one.kwarg_only)
    return places, len(places) < len(written)


def written(func: Any, args: Any, out: Any) -> None:
    """Before `follow`, which changes the first argument if that is known; other tensors that are written to are unknown."""
    places, is_by_name = _writes(func)
    most = _most_after(args) if func in _INDEX_PUTS and is_fake(args[0]) else None
    for place in places:
        given = args[place] if place < len(args) else None
        if type(given) is FakeCudaTensor and place == 0:
            index_bounds.forget(given)
            if KEY in _storage(given).__dict__ and (func in _RESHAPERS or "known" not in given.__dict__):
                given.__dict__["known"] = True
        else:
            lose(given)
    if is_by_name:
        lose(out)
    if most is not None:
        bound_nonzero(args[0], most)


def lose(given: Any) -> None:
    """The values of these tensors have become unknown."""
    for one in given if type(given) in (list, tuple) else (given,):
        if issubclass(type(one), FakeCudaTensor):
            index_bounds.forget(one)
            if KEY in _storage(one).__dict__:
                forget(one)


def filled(func: Any, args: Any, out: Any) -> None:
    """Factories that fill with a number, and `fill_`."""
    if not is_fake(out):
        return
    index_bounds.forget(out)
    values = of(out)
    if values is None and not (is_small(out) and _covers(out)):
        return
    number = _FILLS[func]
    number = args[-1] if number is None else number
    if isinstance(number, torch.Tensor):
        write(out, known(number) if is_fake(number) else number)
    elif _covers(out):
        _fill(out, number)
    else:
        write(out, torch.scalar_tensor(number, dtype=out.dtype, device="cpu"))


def _fill(tensor: Any, number: Any) -> None:
    """A tensor that is all of its storage has this value everywhere."""
    storage = _storage(tensor)
    host = _Storage(storage.nbytes())
    seen = _seen(tensor, host)
    seen.fill_(number)
    values = storage.__dict__[KEY] = Values(host)
    tensor.__dict__["known"] = (values, seen)


def computed(func: Any, args: Any, out: Any) -> None:
    """Other factories."""
    if is_fake(out) and is_small(out):
        know(out, func(*args, dtype=out.dtype, device="cpu"))


def reason(func: Any, args: Any, out: Any) -> None:
    """Boolean operators some of whose inputs are unknown: False and anything is False, True or anything is True."""
    given = [one for one in args if is_fake(one)]
    bounds = [_bounds(one) for one in given]
    if out.dtype is not torch.bool or not is_fake(out) or out.numel() > MOST_NUMBERS or not any(bounds):
        return
    if KEY in _storage(out).__dict__:
        return
    unknown = torch.zeros((), dtype=torch.bool), torch.ones((), dtype=torch.bool)
    shape = torch.broadcast_shapes(*(one.shape for one in given))

    def answer(end: int) -> Any:
        ends = [(found or unknown)[end] for found in bounds]
        replaced = iter([one.expand(shape) for one in ends] if len(ends) > 1 else ends)
        return func(*[next(replaced) if is_fake(one) else one for one in args])

    low, high = answer(0), answer(1)
    if func in NEGATIONS:
        low, high = high, low
    if low.shape == high.shape == out.shape:
        is_settled = torch.equal(low, high)
        know(out, high, None if is_settled else low, any(is_assumed(one) for one in given))


def vanish(args: Any, out: Any) -> None:
    """Zero times anything is zero, as is zero and anything: products of integers, one of which is unknown."""
    if out.numel() > MOST_NUMBERS or KEY in _storage(out).__dict__:
        return
    for one in args:
        found = known(one) if is_fake(one) and not one.dtype.is_floating_point else None
        if found is not None and not found.any():
            know(out, torch.zeros((), dtype=out.dtype, device="cpu"), assumed=is_assumed(one))
            return


def _bounds(tensor: Any) -> Any:
    """Where it is certainly True, and where it may be."""
    values = of(tensor)
    if values is None:
        return None
    high = _seen(tensor, values.host)
    low = high if values.certain is None else _seen(tensor, values.certain)
    return low.bool(), high.bool()


NEGATIONS = operators(("logical_not.default", "bitwise_not.default"))
_NEVER_KNOWN = operators(("empty_like.default", "new_empty.default", "new_empty_strided.default"))
_FILLS: dict[Any, Any] = {
    func: number
    for number, names in (
        (0, ("zeros.default", "zeros_like.default", "new_zeros.default", "zero_.default")),
        (1, ("ones.default", "ones_like.default", "new_ones.default")),
        (None, ("full.default", "full_like.default", "new_full.default", "fill_.Scalar", "fill_.Tensor")),
    )
    for func in operators(names)
}
"""What they fill with; None for their last argument."""
_COMPUTED = operators((
    "arange.default", "arange.start", "arange.start_step", "eye.default", "eye.m", "linspace.default", "logspace.default",
    "scalar_tensor.default", "tril_indices.default", "triu_indices.default",
))  # fmt: skip
_RESIZERS = operators((
    "resize_.default", "resize_as_.default", "set_.source_Storage_storage_offset", "set_.source_Tensor",
    "set_.source_Storage", "set_.default",
))  # fmt: skip
_RESHAPERS = _RESIZERS | operators((
    "squeeze_.default", "squeeze_.dim", "squeeze_.dims", "unsqueeze_.default", "t_.default", "transpose_.default",
    "as_strided_.default", "swapaxes_.default", "swapdims_.default", "detach_.default",
))  # fmt: skip
"""Operators in place that change how a tensor sees its storage."""
_SETTLED = frozenset(_FILLS) | _COMPUTED | _RESHAPERS | operators(("copy_.default", "_local_scalar_dense.default"))
"""Operators that are followed elsewhere, or move no values."""
_INDEX_PUTS = operators(("index_put_.default", "_index_put_impl_.default"))
_BATCH_NORMS = operators(("native_batch_norm.default", "cudnn_batch_norm.default", "miopen_batch_norm.default"))
_JOINED = operators((
    "cat.default", "stack.default", "block_diag.default", "pow.Scalar", "remainder.Scalar_Tensor", "bucketize.Scalar",
    "bitwise_left_shift.Scalar_Tensor", "bitwise_right_shift.Scalar_Tensor", "searchsorted.Scalar",
))  # fmt: skip
"""Those whose first argument is no tensor."""


def joined(func: Any, args: Any, out: Any) -> None:
    """Operators on a list of tensors, or on a number and a tensor."""
    given = args[0] if isinstance(args[0], list | tuple) else args[1:]
    either(func, (given,), out)
    if not any(is_fake(one) and "known" in one.__dict__ for one in given):
        return
    if not is_fake(out) or out.numel() > MOST_NUMBERS:
        return
    try:
        inputs, _, assumed = _inputs(args, {})
        _adopt(out, func(*inputs), assumed)
    except Exception:
        return


def either(func: Any, args: Any, out: Any) -> None:
    """A mask of what is in one or another has as many as both at most."""
    given = list(flat(args))
    if is_fake(out) and any(is_fake(one) and index_bounds.MOST in _storage(one).__dict__ for one in given):
        bound_nonzero(out, sum(most_nonzero(one) if is_fake(one) else out.numel() for one in given))


_HOOKS: dict[Any, Callable[..., None]] = {
    **dict.fromkeys(_FILLS, filled),
    **dict.fromkeys(_COMPUTED, computed),
    **dict.fromkeys(_JOINED, joined),
    # They change their running mean and variance, although their schema does not say so.
    **dict.fromkeys(_BATCH_NORMS, lambda func, args, out: lose(list(args[3:5]))),
}
_SENDS = ("broadcast", "allreduce", "reduce_", "send", "barrier")
"""Collectives after which a rank is taken to have what it had: the others have the same."""


def hook_of(func: Any) -> Callable[..., None] | None:
    """What to record after an operator."""
    namespace, _, name = schema_of(func).name.rpartition("::")
    if namespace == "c10d":  # they write to their first argument, although their schema does not say so
        return None if name.startswith(_SENDS) else lambda func, args, out: lose(args[0])
    return _HOOKS.get(func) or (written if schema_of(func).is_mutable else index_bounds.HOOKS.get(func))
