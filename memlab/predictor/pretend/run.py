"""How an operator runs on pretend tensors: its rule if it has one, else its shape function, and what it made is logged."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from memlab.allocator import OutOfMemory
from memlab.errors import PredictionError
from memlab.predictor.pretend import answers, transfers
from memlab.predictor.pretend.log import Log
from memlab.predictor.pretend.rules import is_composite, resolved
from memlab.predictor.pretend.shapes import ALIAS, Fresh, Shapes, made, meta_kernels
from memlab.predictor.pretend.tensors import CUDA0, META, PretendTensor, is_pretend, wrapped
from memlab.seams import dispatch
from memlab.seams.dispatch import TensorBase

OF_INTEREST = frozenset(
    f"aten.{name}"
    for name in (
        "mm.default", "mm.dtype", "addmm.default", "bmm.default", "baddbmm.default", "addmv.default", "mv.default",
        "dot.default", "_addmm_activation.default", "addbmm.default", "_scaled_mm.default", "_int_mm.default",
        "convolution.default", "convolution_backward.default", "_cudnn_rnn.default", "_cudnn_rnn_backward.default",
        "linalg_vector_norm.default",
    )
)  # fmt: skip
"""Operators for which a library may take memory of its own: their rows are kept for the extras."""

_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Facts:
    """What is known of an operator: asked once."""

    __slots__ = (
        "above",
        "after",
        "is_alias",
        "is_composite",
        "is_foreach_in_place",
        "is_in_place",
        "of_interest",
        "refusal",
        "resizes",
        "rule",
    )

    def __init__(self, func: Any, below: dict[Any, Any], above: dict[Any, Any]) -> None:
        schema, name = func._schema, func._schema.name.rpartition("::")[2]
        arguments = [one.alias_info for one in schema.arguments]
        results = [one.alias_info for one in schema.returns]
        writes = any(one is not None and one.is_write for one in arguments)
        self.rule = below.get(func)
        self.after = answers.AFTER.get(func)
        self.above = above.get(func)
        self.is_composite = is_composite(func)
        self.is_in_place = writes
        self.is_alias = any(one is not None for one in arguments) and all(one is not None for one in results)
        self.is_foreach_in_place = writes and not results and name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.resizes = writes and (name in _RESIZERS or any(one.is_out for one in schema.arguments))
        self.of_interest = str(func) in OF_INTEREST
        self.refusal = next((text for prefixes, text in _REFUSED if name.startswith(prefixes)), "")


_REFUSED = (
    (
        ("_sparse", "sparse_", "to_sparse", "_to_sparse", "_coalesce", "_embedding_bag_sparse"),
        "sparse tensors cannot be predicted: use dense ones (sparse=False in an embedding)",
    ),
    (("_nested", "nested_"), "nested tensors cannot be predicted: use padded ones with a mask"),
    (
        ("quantize_", "_make_per_", "fake_quantize_", "dequantize"),
        "quantised tensors cannot be predicted: leave them out",
    ),
)
_RESIZERS = ("resize_", "resize_as_", "set_", "resize", "_resize_output_", "set_data")


class Run:
    """The desk that every operator on pretend tensors comes to; rules are given it."""

    def __init__(self, card: Any, log: Log, assumptions: Counter[str]) -> None:
        self.card, self.log, self.assumptions = card, log, assumptions
        self.shapes = Shapes()
        self.mode: Any = None
        self.below, self.above = resolved()
        self.below = {**transfers.RULES, **answers.RULES, **self.below}
        self._facts: dict[Any, Facts] = {}

    # --- for rules ----------------------------------------------------------------------------------------------------

    def op(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """An operator by its shape function; what it made is logged in the order of its results."""
        facts = self.facts(func)
        if facts.of_interest:
            self._note(func, args, kwargs)
        if facts.is_foreach_in_place:
            return None
        if facts.is_alias or facts.is_in_place:
            return self._direct(func, facts, args, kwargs)
        answer = self.shapes.answer(func, args, kwargs)
        if answer is ALIAS:
            facts.is_alias = True
            return self._direct(func, facts, args, kwargs)
        if type(answer) is Fresh and not answer.is_host:
            return self._new(answer, func)
        return made(answer, args, kwargs, lambda tensor, fresh: self._born(tensor, fresh, func))

    def plain(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's own decomposition of a composite operator."""
        return func.decompose(*args, **kwargs)

    def empty(self, shape: Any, dtype: Any, stride: Any = None, op: Any = "aten.empty") -> Any:
        """A new pretend tensor, logged."""
        strides = stride or torch._prims_common.make_contiguous_strides_for(tuple(shape))
        tensor = wrapped(torch.empty_strided(tuple(shape), strides, dtype=dtype, device=META))
        storage = TensorBase.untyped_storage(tensor)
        self.log.birth(storage, storage.nbytes(), op, dtype)
        return tensor

    def to_card(self, tensor: Any) -> Any:
        """A copy of a host tensor on the card."""
        return transfers.to_card(tensor, {}, self)

    def hold(self, nbytes: int, op: Any = "scratch") -> int:
        """Memory of no tensor, until it is released."""
        return self.log.hold(int(nbytes), op)

    def release(self, block: int) -> None:
        """Give it back."""
        self.log.release(block)

    def scratch(self, *sizes: int, op: Any = "scratch") -> None:
        """Memory of no tensor that a kernel takes and gives back, several at once in this order."""
        blocks = [self.hold(size, op) for size in sizes]
        for block in reversed(blocks):
            self.release(block)

    def assume(self, text: str) -> None:
        """Say what had to be assumed."""
        self.assumptions[text] += 1

    @property
    def in_backward(self) -> bool:
        """Whether autograd's engine runs; on CUDA that is another thread, with handles of its own."""
        return torch._C._current_autograd_node() is not None

    @property
    def seen(self) -> list[Any]:
        """The operators that came so far."""
        return list(self._facts)

    def facts(self, func: Any) -> Facts:
        """What is known of an operator."""
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = Facts(func, self.below, self.above)
        return facts

    # --- how operators come -------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """One operator, with the errors that code written for CUDA knows."""
        try:
            return self._dispatch(func, types, args, kwargs)
        except OutOfMemory as full:
            raise torch.OutOfMemoryError(str(full)) from None
        except _UNKNOWN as unknown:
            raise PredictionError(_unforeseeable(func, unknown)) from None

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = _on_card(kwargs) if kwargs else {}
        facts = self._facts.get(func) or self.facts(func)
        if facts.refusal:
            raise PredictionError(f"{facts.refusal} ({func}).")
        if facts.is_composite:
            return self._composite(func, facts, args, kwargs)
        out = self.op(func, *args, **kwargs) if facts.rule is None else facts.rule(func, args, kwargs, self)
        if facts.after is not None:
            facts.after(func, args, out, self)
        if args and type(args[0]) is PretendTensor and "known" in args[0].__dict__:
            answers.follow(func, args, kwargs, out)
        return out

    def _composite(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """In inference mode nothing decomposes operators before they come here."""
        dispatch.push_mode(self.mode)
        try:
            if facts.above is not None:
                return facts.above(func, args, kwargs, self)
            return func.decompose(*args, **kwargs)
        finally:
            dispatch.remove_mode(self.mode)

    # --- running ------------------------------------------------------------------------------------------------------

    def _new(self, fresh: Fresh, func: Any) -> Any:
        tensor = wrapped(torch.empty_strided(fresh.shape, fresh.stride, dtype=fresh.dtype, device=META))
        self.log.birth(TensorBase.untyped_storage(tensor), fresh.nbytes, func, fresh.dtype)
        return tensor

    def _born(self, tensor: Any, fresh: Fresh, func: Any) -> None:
        self.log.birth(TensorBase.untyped_storage(tensor), fresh.nbytes, func, fresh.dtype)

    def _direct(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Any:
        """Views and operators in place, on the storages themselves."""
        if facts.is_in_place:
            transfers.check_devices(func, args)
        try:
            with meta_kernels():
                out = func._op(*args, **kwargs)
        except NotImplementedError:
            if facts.is_alias and facts.is_in_place:
                return args[0]  # no meta kernel: it changes values alone
            return self._functional(func, args, kwargs)
        out = self._wrapped(out, func, args, kwargs)
        if facts.resizes:
            self._look_at_sizes(func, args, kwargs)
        return out

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        answer = self.shapes.answer(func, args, kwargs)
        return made(answer, args, kwargs, lambda tensor, fresh: self._born(tensor, fresh, func))

    def _wrapped(self, out: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Results of a meta kernel as pretend tensors; those that own a new storage are logged."""
        kind = type(out)
        if kind is tuple or kind is list:
            return kind([self._wrapped(one, func, args, kwargs) for one in out])
        if not issubclass(kind, torch.Tensor) or issubclass(kind, PretendTensor) or not TensorBase.is_meta.__get__(out):
            return out
        tensor = wrapped(out)
        storage = TensorBase.untyped_storage(tensor)
        if not self.facts(func).is_alias and not self.log.is_known(storage):
            self.log.birth(storage, storage.nbytes(), func, tensor.dtype)
        return tensor

    def _look_at_sizes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Storages that an operator may have resized."""
        for one in (*args, *kwargs.values()):
            if is_pretend(one):
                storage = TensorBase.untyped_storage(one)
                self.log.resized(storage, storage.nbytes(), func, one.dtype)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        self.log.note(str(func), self.in_backward, tuple(tuple(one.shape) for one in tensors), dtype)


def _on_card(kwargs: dict[str, Any]) -> dict[str, Any]:
    """C++ asks for new tensors on meta, the device it believes in: that is the card."""
    device = kwargs.get("device")
    if device is not None and device.type in ("meta", "cuda") and device != CUDA0:
        if device.type == "cuda" and device.index:
            raise RuntimeError(f"CUDA error: invalid device ordinal. The pretend card is cuda:0, got {device}.")
        return {**kwargs, "device": CUDA0}
    return kwargs


def _unforeseeable(func: Any, error: Exception) -> str:
    return (
        f"{func} cannot be predicted: its result depends on values, or PyTorch has no shape function for it "
        f"({type(error).__name__}). Leave this part out of the prediction, or register one with torch.library.register_fake."
    )
