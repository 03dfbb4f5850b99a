"""Reads of values that were never computed, shapes that depend on them, and copies between the host and the GPU.

Known values stay known: small tensors copied from the host, and results computed from them alone. An unknown value reads as 1
(True): it is harmless as a divisor, count or mask, and a mask then selects everything, its maximum. Tests for inf and nan
read as if all values were finite. Shapes that depend on values are the largest possible. Each is an assumption of the
prediction.

Loops controlled by values must neither end at once nor run forever. LBFGS stops if a gradient is small, a step too short, or
a direction leads upwards; each would end it at its first iteration, without any history. So within its step the loss falls
with each read, and its comparisons make it continue: the largest number of iterations needs the most memory.
`nn.init.trunc_normal_` redraws what fell outside until nothing does; two rounds show all the memory it needs. Any other code
that reads the same condition over and over reads False after a while.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from typing import Any

import torch

from memlab.fake_cuda import deferred_init
from memlab.fake_cuda.kernel_rules import name_of, operators, rule
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.tensors import META, is_fake
from memlab.torch_internals.cuda_names import tree_map_only, truncated_normal
from memlab.torch_internals.dispatch import TensorBase

aten = torch.ops.aten
MOST_NUMBERS, MOST_FLOATS = 65536, 64
"""Larger tensors do not keep their values."""
MOST_ROUNDS = 10_000

READ = "a value of a CUDA tensor was read: it was assumed to be 1 (True)"
COPIED = "the values of a CUDA tensor were copied to the host: they were assumed to be 1 (True)"
FINITE = "a check for inf or nan was assumed to pass"
LARGEST = "{}: its shape depends on values, the largest possible was assumed"
SEARCHED = "LBFGS was assumed to use all its iterations"
REDRAWN = "nn.init.trunc_normal_ was assumed to redraw twice"
ENDLESS = "a loop that waited for a value was ended after {} rounds"


def know(tensor, source, changes=0):
    """Record that a fake CUDA tensor has the values of this host tensor; PyTorch still counts so many changes of it."""
    most = MOST_FLOATS if source.dtype.is_floating_point or source.dtype.is_complex else MOST_NUMBERS
    if source.numel() <= most and source.layout == torch.strided:
        tensor.__dict__["known"] = (source.detach().to(tensor.dtype, copy=True), _version(tensor) + changes)


def _version(tensor: Any) -> int:
    """Its version counter; inference tensors have none."""
    return -1 if tensor.is_inference() else int(tensor._version)


def known(tensor):
    """The known values of a fake CUDA tensor, on the host; None if unknown."""
    found = tensor.__dict__.get("known")
    return found[0] if found is not None and found[1] == _version(tensor) else None


_NEVER_KNOWN = operators(("empty_like.default", "new_empty.default", "new_empty_strided.default"))


def follow(func, args, kwargs, out):
    """If all inputs are known, compute the result too."""
    if not is_fake(out):
        return
    if out is args[0]:
        if known(out) is not None:  # from before this change
            del out.__dict__["known"]
        return
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags
    if func in _NEVER_KNOWN or is_drawn or out.numel() > MOST_NUMBERS:
        return

    def value(one):
        found = known(one) if is_fake(one) else one
        if found is None:
            raise LookupError
        return found

    kwargs = {name: given for name, given in kwargs.items() if name not in ("device", "pin_memory")}
    try:
        args, kwargs = tree_map_only(torch.Tensor, value, (args, kwargs))
        out.__dict__["known"] = (func(*args, **kwargs), _version(out))
    except Exception:  # an unknown argument, or an operator that the host lacks: the result is unknown
        return


@rule("_local_scalar_dense.default")
def item(cuda, func, tensor):
    """`.item()`, `bool(...)`, `if tensor:`."""
    values = known(tensor)
    if values is not None:
        return func(values)
    if Loop.answer is not None:
        return Loop.answer(tensor)
    verdict, is_truth = tensor.__dict__.get("verdict"), tensor.dtype is torch.bool
    if is_truth and Loop.is_endless():
        cuda.assume(ENDLESS.format(MOST_ROUNDS))
        return False
    cuda.assume(READ if verdict is None else FINITE)
    if is_truth or verdict is not None:
        return verdict is None or verdict
    return 1.0 if tensor.dtype.is_floating_point else complex(1) if tensor.dtype.is_complex else 1


@rule("equal.default", "allclose.default")
def equal(cuda, func, tensor, other, *args):
    """`torch.equal`, `torch.allclose`."""
    cuda.assume(READ)
    return bool(tensor.shape == other.shape)


class Loop:
    """The known loop that is reading values."""

    answer: Any = None
    """Answers reads within a PyTorch function that is known to loop."""
    place: Any = None
    times = 0
    """The last place of the user's code that read a truth value, and how often in a row."""

    @classmethod
    def is_endless(cls) -> bool:
        """Whether this place in the user's code has read too often."""
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("memlab", "torch"):
            frame = frame.f_back
        place = (id(frame), frame.f_code, frame.f_lasti) if frame is not None else None
        cls.times = cls.times % MOST_ROUNDS + 1 if place == cls.place else 1
        cls.place = place
        return cls.times == MOST_ROUNDS

    @classmethod
    def within(cls, answer, function):
        """Wrap a function so that its reads are answered this way; None means as everywhere else."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            before, cls.answer = cls.answer, answer
            try:
                return function(*args, **kwargs)
            finally:
                cls.answer = before

        return call


def answer_loops(cuda: Any, patches: Patches) -> None:
    """LBFGS, but not the closure that it calls, and truncated normal numbers (torch/optim/lbfgs.py, torch/nn/init.py)."""
    readings, step = itertools.count(1), torch.optim.LBFGS.step

    def search(tensor):
        cuda.assume(SEARCHED)
        if tensor.__dict__.get("compared") is None:
            return 1.0 + 1.0 / next(readings)
        # `grad.abs().max() <= tolerance` ends it, so does `gtd > -tolerance`; `ys > 1e-10` lets it remember a step, and
        # `1 / sum < 1` (in a min) makes the first step a tensor.
        name, bound = tensor.__dict__["compared"]
        return name == "lt" or (name == "gt" and bound >= 0)

    @functools.wraps(step)
    def searching(self, closure):
        return Loop.within(search, step)(self, Loop.within(None, closure))

    @functools.wraps(truncated_normal)
    def redrawing(*args, **kwargs):
        asked = itertools.count(1)

        def again(tensor: Any) -> bool:
            cuda.assume(REDRAWN)
            return next(asked) % 3 != 0

        return Loop.within(again, truncated_normal)(*args, **kwargs)

    patches.put(torch.optim.LBFGS, step=searching)
    patches.put(torch.nn.init, _no_grad_trunc_normal_=deferred_init.deferred(redrawing))


def compared(func, args, out):
    """The number that a tensor is compared with."""
    if isinstance(args[1], int | float) and out.dim() == 0:
        out.__dict__["compared"] = (name_of(func), args[1])


def judged(func, args, out):
    """Tests for finite values: isinf, isnan, and comparisons of a tensor with itself or with infinity."""
    is_test = len(args) == 1 or args[1] is args[0] or (isinstance(args[1], float) and math.isinf(args[1]))
    if is_test:
        out.__dict__["verdict"] = func in _TRUE_OF_FINITE


def passed_on(func, args, out):
    """Operators whose result inherits the verdict of their input: any, all, and, or, not."""
    verdicts = [one.__dict__["verdict"] for one in args if is_fake(one) and "verdict" in one.__dict__]
    if verdicts and is_fake(out):
        value = all(verdicts) if func in _CONJUNCTIONS else any(verdicts)
        out.__dict__["verdict"] = not value if func in _NEGATIONS else value


_CONJUNCTIONS = operators(
    ("mul.Tensor", "all.default", "_is_all_true.default", "logical_and.default", "bitwise_and.Tensor")
)
_NEGATIONS = operators(("logical_not.default", "bitwise_not.default"))
_TRUE_OF_FINITE = operators(("eq.Tensor", "ne.Scalar"))
_DISJUNCTIONS = operators(("any.default", "_is_any_true.default", "logical_or.default", "bitwise_or.Tensor"))
_FALSE_OF_FINITE = operators(("ne.Tensor", "eq.Scalar", "isinf.default", "isnan.default"))
AFTER: dict[Any, Any] = {
    **dict.fromkeys(operators(("le.Scalar", "gt.Scalar", "lt.Scalar")), compared),
    **dict.fromkeys(_TRUE_OF_FINITE | _FALSE_OF_FINITE, judged),
    **dict.fromkeys(_CONJUNCTIONS | _NEGATIONS | _DISJUNCTIONS, passed_on),
}
"""The verdict recorded for a result."""


@rule("nonzero.default")
def nonzero(cuda, func, tensor):
    """Indices of nonzero elements: of all of them, unless the values are known."""
    values = known(tensor)
    count = int(values.count_nonzero()) if values is not None else tensor.numel()
    if values is None:
        cuda.assume(LARGEST.format("nonzero, a boolean mask"))
    # CUDA makes it as (dimensions, found) and gives the transpose (aten/src/ATen/native/cuda/Nonzero.cu).
    out = cuda.empty((tensor.dim(), count), torch.int64, op=func).t()
    if values is not None:
        out.__dict__["known"] = (aten.nonzero.default(values), _version(out))
    return out


def index(cuda, func, tensor, given, *args):
    """`x[mask]`, `x[mask] = y`: masks become indices, as on CUDA; the rules of these operators call it."""
    indices: list[Any] = []
    for one in given:
        if one is not None and not is_fake(one):
            one = _to_gpu(cuda, one)  # IndexingUtils.h: indices of the host are copied to the GPU
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            places = one.nonzero()
            indices += [places.select(1, dim) for dim in range(one.dim())]
        else:
            indices.append(one)
    return cuda.op(func, tensor, indices, *args)


@rule("masked_select.default")
def masked_select(cuda, func, tensor, mask):
    """As an index by the mask, broadcast (aten/src/ATen/native/cuda/IndexKernel.cpp)."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return tensor[mask]


@rule("_unique2.default", "unique_consecutive.default", "unique_dim.default", "unique_dim_consecutive.default")
def unique(cuda, func, tensor, dim=None, *args):
    """Everything, its inverse and its counts."""
    cuda.assume(LARGEST.format("unique"))
    by_dim = "dim" in name_of(func)
    shape, length = (tensor.shape, tensor.shape[dim]) if by_dim else ((tensor.numel(),), tensor.numel())
    out = cuda.empty(shape, tensor.dtype, op=func)
    return out, *(cuda.empty((length,), torch.int64, op=func) for _ in range(2))


@rule("repeat_interleave.Tensor")
def repeat_interleave(cuda, func, repeats, *, output_size=None):
    """Repeat each as often as is known, or once."""
    count, values = output_size, known(repeats)
    if count is None and values is None:
        cuda.assume("repeat_interleave: its shape depends on values, every count was assumed to be 1")
        count = repeats.numel()
    elif count is None:
        count = int(values.sum())
    return cuda.empty((count,), repeats.dtype, op=func)


@rule("bincount.default")
def bincount(cuda, func, tensor, weights=None, minlength=0):
    """As many bins as is known, or the minimum."""
    values = known(tensor)
    if values is None:
        cuda.assume("bincount: its length depends on values, minlength was assumed")
    least = int(values.max()) + 1 if values is not None and values.numel() else minlength
    dtype = torch.int64 if weights is None else torch.float64
    return cuda.empty((max(minlength, least, 1),), dtype, op=func)


@rule("_to_copy.default")
def to_copy(cuda, func, tensor, **kwargs):
    """`.to(...)` that copies: to the GPU, on the GPU, or to the host."""
    device = kwargs.get("device")
    if not is_fake(tensor):
        return _to_gpu(cuda, tensor, kwargs.get("dtype"), kwargs.get("memory_format"))
    if device is not None and device.type != "cuda":
        return on_host(cuda, tensor, kwargs.get("dtype") or tensor.dtype)
    return cuda.op(func, tensor, **{name: kwargs[name] for name in kwargs if name not in ("device", "pin_memory")})


def _to_gpu(cuda, tensor, dtype=None, memory_format=None):
    dtype, memory_format = dtype or tensor.dtype, memory_format or torch.preserve_format
    looks = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    like = torch.empty_like(looks, dtype=dtype, memory_format=memory_format)
    made = cuda.empty(like.shape, dtype, like.stride(), aten._to_copy.default)
    if deferred_init.pending(tensor) is None:
        know(made, tensor)
    return made


def on_host(cuda: Any, tensor: Any, dtype: torch.dtype) -> Any:
    """A fake CUDA tensor copied to the host."""
    values = known(tensor)
    if values is not None:
        return values.to(dtype, copy=True)
    cuda.assume(COPIED)
    return deferred_init.filled(torch.empty(tensor.shape, dtype=dtype), 1)


@rule("copy_.default")
def copy_(cuda, func, target, source, *args):
    """`target.copy_(source)`, either of them on the host."""
    if not is_fake(target):
        return target.copy_(on_host(cuda, source, target.dtype))
    torch.broadcast_shapes(target.shape, source.shape)
    target.__dict__.pop("known", None)
    if not is_fake(source) and target.shape == source.shape and deferred_init.pending(source) is None:
        know(target, source, changes=1)
    return target


_MIXED = operators((
    "_foreach_copy_.default", "index_put_.default", "_index_put_impl_.default", "set_.source_Storage_storage_offset",
    "index_put.default",
))  # fmt: skip


def check_devices(func, args):
    """Refuse host tensors of more than one element among those of the GPU, as CUDA does."""
    if func in _MIXED:
        return
    for one in args:
        if type(one) is list:
            check_devices(func, one)
        elif (
            isinstance(one, torch.Tensor) and not is_fake(one) and one.dim() and not TensorBase.is_meta.__get__(one)
        ):  # fmt: skip
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(when checking arguments of {func})"
            )
