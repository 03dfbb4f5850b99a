"""What a forward makes and what autograd keeps of it, seen while it runs on stand-ins."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from memlab.seams import dispatch
from memlab.sizes.layers import Layers
from memlab.sizes.refusal import WrongIndices
from memlab.sizes.standins import StandIns, is_standin
from memlab.sizes.storages import is_tensor, parts

_aten = torch.ops.aten
# A number that becomes a tensor keeps its value, by which PyTorch can answer `.item()`: these must see the real one.
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default)
_SPARSE = {_aten.embedding.default: 4, _aten._embedding_bag.default: 5, _aten._embedding_bag_forward_only.default: 5}
"""Operators that give sparse gradients -> at which position their `sparse` stands."""
_INDICES = (torch.int64, torch.int32)
# The fifth result of cuDNN's recurrent layers are their weights in one piece. Those of a model on CUDA are so already, and
# cuDNN takes them as they are; without addresses it cannot see that.
_WEIGHTS_OF_RNN = 4
_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Made:
    """A storage that an operator made."""

    storage: weakref.ref[torch.UntypedStorage]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layer: str
    operator: str

    @property
    def is_alive(self) -> bool:
        """Whether anybody still holds it."""
        return self.storage() is not None

    @property
    def nbytes(self) -> int:
        """Its bytes as they are now, after what resized it."""
        storage = self.storage()
        return storage.nbytes() if storage is not None else 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Packed:
    """What autograd's graph holds in place of a saved tensor: alive as long as the graph wants it."""

    tensor: Tensor


@dataclass(slots=True, eq=False)
class Saved:
    """One wish of autograd to keep a storage that the forward made."""

    packed: weakref.ref[Packed]
    made: Made
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: str


@dataclass(slots=True)
class Seen:
    """All that was noted of one forward."""

    made: list[Made] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    operators: set[str] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    sparse_rows: Counter[int] = field(default_factory=Counter)
    outside: dict[int, Tensor] = field(default_factory=dict)


class Watch(TorchDispatchMode):
    """Notes the storages that operators make, and stands between stand-ins and real tensors that a forward brings in."""

    supports_higher_order_operators = True

    def __init__(self, standins: StandIns, layers: Layers) -> None:
        super().__init__()
        self.seen = Seen()
        self._standins = standins
        self._layers = layers
        self._made: dict[int, Made] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator, run on stand-ins alone."""
        kwargs = kwargs or {}
        if func in _SPARSE and len(args) > 1 and is_tensor(args[1]) and args[1].dtype not in _INDICES:
            raise WrongIndices(str(func).removesuffix(".default"), args[1].dtype)
        if func not in _LIFTS:
            args, kwargs = tree_map(self._inside, (args, kwargs))
        before = self._read((args, kwargs))
        out = func(*args, **kwargs)
        self._note(func, args, out, before)
        return out

    def _inside(self, thing: Any) -> Any:
        """A real tensor's stand-in. Single numbers pass: PyTorch knows those that were written in the code."""
        if not is_tensor(thing) or is_standin(thing) or not thing.dim():
            return thing
        if type(thing).__torch_dispatch__ is not dispatch.plain_torch_dispatch:
            return thing  # it wraps others, which come by themselves
        self.seen.outside.setdefault(id(thing), thing)
        return self._standins.of(thing)

    def _read(self, arguments: Any) -> set[int]:
        given = (part for leaf in tree_leaves(arguments) if is_tensor(leaf) for part in parts(leaf))
        keys = {part.untyped_storage()._cdata for part in given}
        self.seen.read |= keys
        return keys

    def _note(self, func: Any, args: Any, out: Any, before: set[int]) -> None:
        self.seen.operators.add(str(func))
        if func is _aten._cudnn_rnn.default:
            out = out[:_WEIGHTS_OF_RNN]
        # The state of its random numbers, which PyTorch's own stand-ins place on CUDA.
        on_cpu = tree_leaves(out)[2:] if func is _aten._scaled_dot_product_efficient_attention.default else []
        for leaf in tree_leaves(out):
            if is_tensor(leaf):
                for part in parts(leaf):
                    device = _CPU if any(leaf is one for one in on_cpu) else part.device
                    self._note_storage(part, str(func), before, device)
        place = _SPARSE.get(func)
        if place is not None and len(args) > place and args[place]:
            self.seen.sparse_rows[args[0].untyped_storage()._cdata] += args[1].numel()

    def _note_storage(self, part: Tensor, operator: str, before: set[int], device: torch.device) -> None:
        storage = part.untyped_storage()
        known = self._made.get(storage._cdata)
        was_there = storage._cdata in before or self._standins.has_storage(storage._cdata)
        if was_there or (known is not None and known.is_alive):
            return
        shape = tuple(part.shape)
        made = Made(weakref.ref(storage), shape, part.dtype, device, self._layers.current, operator)
        self._made[storage._cdata] = made
        self.seen.made.append(made)

    def made_of(self, tensor: Tensor) -> list[Made]:
        """The storages of a tensor, as far as the forward made them."""
        found = ((part.untyped_storage(), part) for part in parts(tensor))
        known = (self._made.get(storage._cdata) for storage, _ in found)
        return [made for made in known if made is not None and made.is_alive]

    def pack(self, tensor: Tensor) -> Packed:
        """What `saved_tensors_hooks` calls for each tensor that backward will want."""
        # Detached, as the graph would keep it: an output that knows its node would keep itself alive.
        packed = Packed(tensor.detach())
        with torch.no_grad():
            for made in self.made_of(tensor):
                saved = Saved(weakref.ref(packed), made, tuple(tensor.shape), tensor.dtype, self._layers.current)
                self.seen.saved.append(saved)
        return packed


def unpack(packed: Packed) -> Tensor:
    """The way back for those who run a backward inside of their forward."""
    return packed.tensor
