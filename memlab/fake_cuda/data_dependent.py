"""Reads of values that were never computed, shapes that depend on them, and copies between the host and the GPU.

What is known is read as it is (see `values`). An unknown value reads as 1 (True): it is harmless as a divisor, count or mask,
and a mask then selects everything, its maximum. Of a mask that is known in part it selects what is not certainly False. Once
read, a single value stays what it was read as, and comparisons with a number agree with it; a mask selects as many again. Tests
for inf and nan read as if all values were finite. Shapes that depend on values are the largest possible. Each is an assumption
of the prediction (see `assumed`), and names the line that asked.

Loops controlled by values must neither end at once nor run forever. LBFGS stops if a gradient is small, a step too short, or
a direction leads upwards; each would end it at its first iteration, without any history. So within its step the loss falls
with each read, and its comparisons make it continue: the largest number of iterations needs the most memory.
`nn.init.trunc_normal_` redraws what fell outside until nothing does; two rounds show all the memory it needs. Any other code
that reads the same condition over and over reads the opposite after a while.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
from typing import Any

import torch

from memlab.fake_cuda import deferred_init, index_bounds, program_length, values
from memlab.fake_cuda.assumed import FINITE, assumed
from memlab.fake_cuda.cuda_graphs import refuse_waiting
from memlab.fake_cuda.kernel_rules import flat, name_of, operators, rule
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.tensors import META, State, is_fake
from memlab.fake_cuda.values import follow, known
from memlab.torch_internals.cuda_names import truncated_normal
from memlab.torch_internals.dispatch import TensorBase

__all__ = ["AFTER", "answer_loops", "check_devices", "follow", "index"]

aten = torch.ops.aten
MOST_ROUNDS = 10_000

CHECKED = "a check that raises otherwise: a program that fails it is taken to end"
COMPARED = "the number it was compared from reads as 1"
FOLLOWED = "it follows from a value that was assumed"
SIZE = "a shape depends on it"
SEARCHED = "LBFGS was assumed to use all its iterations"
REDRAWN = "nn.init.trunc_normal_ was assumed to redraw twice"
ENDLESS = "after {:,} rounds, so that a loop ends"


@rule("_local_scalar_dense.default")
def item(cuda, func, tensor):
    """`.item()`, `bool(...)`, `if tensor:`."""
    refuse_waiting()
    found, is_assumed = known(tensor), values.is_assumed(tensor)
    if found is not None and not is_assumed:
        return func(found)
    if Loop.answer is not None:
        return Loop.answer(tensor)
    answer, why = (func(found), FOLLOWED) if found is not None else _reading(tensor)
    if tensor.dtype is torch.bool and Loop.is_endless():
        return assumed(cuda, "item", not answer, why=ENDLESS.format(MOST_ROUNDS), decides="length")
    answer = assumed(cuda, "item", answer, index_bounds.of(tensor), why)
    if found is None and tensor.dim() == 0 and values.of(tensor) is None:
        values.write(tensor, torch.scalar_tensor(answer, dtype=tensor.dtype, device="cpu"), assumed=True)
    return answer


def _reading(tensor: Any) -> tuple[Any, str]:
    """What an unknown value reads as, and why."""
    verdict, dtype = tensor.__dict__.get("verdict"), tensor.dtype
    if tensor.__dict__.get("is_finite"):
        return verdict, FINITE
    if dtype is torch.bool and (passes := program_length.without_error()) is not None:
        return passes, CHECKED
    if verdict is not None:
        return verdict, "" if verdict else COMPARED
    if dtype is torch.bool:
        return True, ""
    if dtype.is_floating_point or dtype.is_complex:
        return (1.0 if dtype.is_floating_point else complex(1)), ""
    _, most = index_bounds.of(tensor)
    return (1 if most is None else min(1, most)), ""


@rule("equal.default", "allclose.default")
def equal(cuda, func, tensor, other, *args):
    """`torch.equal`, `torch.allclose`."""
    found, wanted = (known(one) if is_fake(one) else one for one in (tensor, other))
    is_assumed = any(is_fake(one) and values.is_assumed(one) for one in (tensor, other))
    if found is not None and wanted is not None and not is_assumed:
        return func(found, wanted, *args)
    if tensor.dim() == 0 and other.dim() == 0 and func is aten.equal.default:
        read = aten._local_scalar_dense.default  # as `is_scalar_tensor_true` asks in C++, for `torch.istft`
        answers = [item(cuda, read, one) if is_fake(one) else one.item() for one in (tensor, other)]
        return bool(answers[0] == answers[1])
    return assumed(cuda, name_of(func), bool(tensor.shape == other.shape))


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
    """Comparisons with a number: a single value compares as it reads."""
    bound = args[1]
    if is_fake(bound) and bound.dim() == 0:
        found = known(bound)
        bound = None if found is None else found.item()
    if out.dim() == 0 and isinstance(bound, int | float) and is_fake(out):
        name = name_of(func)
        out.__dict__["compared"] = (name, bound)
        out.__dict__["verdict"] = bool(getattr(operator, name)(1, bound))
    elif isinstance(bound, int | float) and is_fake(out) and is_fake(args[0]) and name_of(func) == "eq":
        index_bounds.part(out, args[0], bound)


def judged(func, args, out):
    """Tests for finite values: isinf, isnan, and comparisons of a tensor with itself or with infinity."""
    is_test = len(args) == 1 or args[1] is args[0] or (isinstance(args[1], float) and math.isinf(args[1]))
    if is_test:
        out.__dict__["verdict"] = func in _TRUE_OF_FINITE
        out.__dict__["is_finite"] = True
    else:
        compared(func, args, out)


def passed_on(func, args, out):
    """Operators whose result inherits the verdict of their input: any, all, and, or, not."""
    if not is_fake(out) or out.dtype.is_floating_point:
        return
    if func in _DISJUNCTIONS and len(args) == 2 and isinstance(args[1], torch.Tensor):
        values.either(func, args, out)
    given = [one.__dict__ for one in args if is_fake(one)]
    if out.dtype is not torch.bool:
        if any("known" in one for one in given) and func in _CONJUNCTIONS:
            values.vanish(args, out)
        return
    verdicts = [one["verdict"] for one in given if "verdict" in one]
    if verdicts:
        is_finite = all("is_finite" in one for one in given if "verdict" in one)
        if not is_finite and len(verdicts) < len(given):
            verdicts.append(True)
        value = all(verdicts) if func in _CONJUNCTIONS else any(verdicts)
        out.__dict__["verdict"] = not value if func in values.NEGATIONS else value
        if is_finite:
            out.__dict__["is_finite"] = True
    if any("known" in one for one in given):
        values.reason(func, args, out)


_CONJUNCTIONS = operators((
    "mul.Tensor", "all.default", "all.dim", "all.dims", "_is_all_true.default", "logical_and.default", "bitwise_and.Tensor",
))  # fmt: skip
_TRUE_OF_FINITE = operators(("eq.Tensor", "ne.Scalar"))
_DISJUNCTIONS = operators((
    "any.default", "any.dim", "any.dims", "_is_any_true.default", "logical_or.default", "bitwise_or.Tensor",
))  # fmt: skip
_FALSE_OF_FINITE = operators(("ne.Tensor", "eq.Scalar", "isinf.default", "isnan.default"))
_COMPARISONS = operators((
    "le.Scalar", "gt.Scalar", "lt.Scalar", "ge.Scalar", "le.Tensor", "gt.Tensor", "lt.Tensor", "ge.Tensor",
))  # fmt: skip


class _Hooks(dict[Any, Any]):
    """What is recorded after an operator, by the operator: the verdict of its result, and which values are known."""

    def get(self, func: Any, default: Any = None) -> Any:
        """The hook of an operator; those that write have one."""
        return super().get(func) or values.hook_of(func)


AFTER = _Hooks({
    **dict.fromkeys(_COMPARISONS, compared),
    **dict.fromkeys(_TRUE_OF_FINITE | _FALSE_OF_FINITE, judged),
    **dict.fromkeys(_CONJUNCTIONS | values.NEGATIONS | _DISJUNCTIONS, passed_on),
})  # fmt: skip


@rule("nonzero.default")
def nonzero(cuda, func, tensor, what="nonzero"):
    """Indices of nonzero elements: of all of them that may be, unless the values are known."""
    refuse_waiting()
    found = known(tensor)
    is_assumed = found is None or values.is_assumed(tensor)
    found = values.possible(tensor) if found is None and tensor.dtype is torch.bool else found
    count = int(found.count_nonzero()) if found is not None else values.most_nonzero(tensor)
    if is_assumed:
        largest, count = count, _count(cuda, what, tensor, count)
        found = found if count == largest else None
    # CUDA makes it as (dimensions, found) and gives the transpose (aten/src/ATen/native/cuda/Nonzero.cu).
    out = cuda.empty((tensor.dim(), count), torch.int64, op=func).t()
    if found is not None and out.numel() <= values.MOST_NUMBERS:
        values.know(out, aten.nonzero.default(found), assumed=is_assumed)
    return out


def _count(cuda, what, mask, most):
    """How many elements of a mask are nonzero: of one that was read, what it was read as."""
    before = values.settled(mask)
    if before is not None:
        return assumed(cuda, what, before, (before, before), FOLLOWED, "size")
    count = assumed(cuda, what, most, values.count_bounds(mask), SIZE, "size", values.room(mask))
    values.settle(mask, count)
    return count


def index(cuda, func, tensor, given, *args, what="mask"):
    """`x[mask]`, `x[mask] = y`: masks become indices, as on CUDA; the rules of these operators call it."""
    indices: list[Any] = []
    for one in given:
        if one is not None and not is_fake(one):
            one = to_gpu(cuda, one)  # IndexingUtils.h: indices of the host are copied to the GPU
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            places = nonzero(cuda, aten.nonzero.default, one, what)
            indices += [places.select(1, dim) for dim in range(one.dim())]
        else:
            indices.append(one)
    return cuda.op(func, tensor, indices, *args)


@rule("masked_select.default")
def masked_select(cuda, func, tensor, mask):
    """As an index by the mask, broadcast (aten/src/ATen/native/cuda/IndexKernel.cpp)."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return tensor[mask]


@rule("torchvision::nms.default")
def nms(cuda, func, boxes, scores, threshold):
    """In the order of their scores, with a bit for each pair (torchvision/csrc/ops/cuda/nms_kernel.cu); at most all are kept."""
    if not boxes.numel():
        return cuda.empty((0,), torch.int64, op=func)
    count, order = len(boxes), scores.sort(0, descending=True)[1]
    ordered = boxes.index_select(0, order).contiguous()
    pairs = cuda.empty((count * math.ceil(count / 64),), torch.int64, op=func)
    kept = index(cuda, aten.index.Tensor, order, [cuda.empty((count,), torch.bool, op=func)], what="nms")
    del ordered, pairs
    return kept


@rule("_unique2.default", "unique_consecutive.default", "unique_dim.default", "unique_dim_consecutive.default")
def unique(cuda, func, tensor, *args):
    """What is known, or everything; its inverse and its counts."""
    found, by_dim = known(tensor), "dim" in name_of(func)
    if found is not None:
        results = func(found, *args)
        return tuple(cuda.empty(one.shape, one.dtype, op=func) for one in results)
    length = tensor.shape[args[0]] if by_dim else tensor.numel()
    count = assumed(cuda, "unique", length, (min(length, 1), length), SIZE, "size")
    shape = list(tensor.shape) if by_dim else [count]
    shape[args[0] if by_dim else 0] = count
    out = cuda.empty(shape, tensor.dtype, op=func)
    return out, *(cuda.empty((size,), torch.int64, op=func) for size in (length, count))


@rule("repeat_interleave.Tensor")
def repeat_interleave(cuda, func, repeats, *, output_size=None):
    """Repeat each as often as is known, or once."""
    count, found = output_size, known(repeats)
    if count is None and found is None:
        each = assumed(cuda, "repeat_interleave", 1, (0, None), "repeats of each; a shape depends on it", "size")
        count = each * repeats.numel()
    elif count is None:
        count = int(found.sum())
    return cuda.empty((count,), repeats.dtype, op=func)


@rule("bincount.default")
def bincount(cuda, func, tensor, weights=None, minlength=0):
    """As many bins as is known, or the minimum."""
    found = known(tensor)
    least = int(found.max()) + 1 if found is not None and found.numel() else minlength
    count = max(minlength, least, 1)
    if found is None:
        _, most = index_bounds.of(tensor)
        count = assumed(cuda, "bincount", count, (count, most and max(count, most + 1)), SIZE, "size")
    dtype = torch.int64 if weights is None else torch.float64
    return cuda.empty((count,), dtype, op=func)


def looks_like(tensor: Any, dtype: torch.dtype, form: torch.memory_format | None = None) -> Any:
    """The geometry of `tensor.to(dtype)`: dimensions keep their order, gaps are closed."""
    looks = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return torch.empty_like(looks, dtype=dtype, memory_format=form or torch.preserve_format)


def to_gpu(cuda, tensor, dtype=None, memory_format=None):
    """A host tensor copied to the GPU."""
    like = looks_like(tensor, dtype or tensor.dtype, memory_format)
    made = cuda.empty(like.shape, like.dtype, like.stride(), aten._to_copy.default)
    if values.is_small(tensor) and has_data(tensor):
        values.know(made, tensor)
    return made


def has_data(tensor: Any) -> bool:
    """Whether a tensor of the host can be read; C++ makes a list that is an index on meta."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and deferred_init.pending(tensor) is None


def on_host(cuda: Any, tensor: Any, dtype: torch.dtype) -> Any:
    """A fake CUDA tensor copied to the host."""
    refuse_waiting()
    found = known(tensor)
    if found is None or values.is_assumed(tensor):
        is_new = found is None
        if is_new and tensor.dtype is torch.bool:
            found = values.possible(tensor)
        reading, why = _reading(tensor) if is_new else (found.max().item() if found.numel() else 0, FOLLOWED)
        value = assumed(cuda, State.asked or "copy to the host", reading, index_bounds.of(tensor), why)
        if found is None or value != reading:
            return deferred_init.filled(torch.empty(tensor.shape, dtype=dtype, device="cpu"), value)
    return found.to(dtype, copy=True)


_MIXED = operators((
    "_foreach_copy_.default", "index_put_.default", "_index_put_impl_.default", "set_.source_Storage_storage_offset",
    "index_put.default",
))  # fmt: skip


def check_devices(func, args):
    """Refuse host tensors of more than one element among those of the GPU, as CUDA does."""
    for one in flat(args) if func not in _MIXED else ():
        if isinstance(one, torch.Tensor) and not is_fake(one) and one.dim() and not TensorBase.is_meta.__get__(one):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"(when checking arguments of {func})"
            )
