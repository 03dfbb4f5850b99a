"""A training step on fake tensors, in a child process: forward, saved tensors, gradients, optimizer state.

Limits: every output counts as part of the loss. What the backward of a custom function computes is not seen.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from memlab.allocator.rules import release
from memlab.analysis.step_size import ELEMENT_BYTES, OTHER, OUTPUT, SAVED, Kept, LayerOutput
from memlab.errors import MemlabError
from memlab.prediction.fake_model import (
    FakeCopies,
    FakeTensors,
    ModulePaths,
    plain_tensors,
    storage_bytes,
    tensors_in,
)
from memlab.references.memory import is_tensor
from memlab.torch_internals import dispatch, fakes, graph
from memlab.torch_internals.objects import storage_id

_aten = torch.ops.aten
# A number made into a tensor keeps its value, so that `.item()` works: these operators must get the real tensor.
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default, _aten.lift.default)
_SPARSE = {_aten.embedding.default: 4, _aten._embedding_bag.default: 5, _aten._embedding_bag_forward_only.default: 5}
"""Operators with sparse gradients -> position of their argument `sparse`."""
# The fifth result of cuDNN's recurrent layers is a flat copy of the weights. Those of a model on CUDA are flat already, and
# cuDNN uses them in place; without addresses it cannot see that.
_WEIGHTS_OF_RNN = 4
_CPU = torch.device("cpu")


class WrongIndices(Exception):
    """A call that a real operator would refuse and one on fakes does not: PyTorch's fake embedding takes any type (2.13)."""


class ForwardFailed(Exception):
    """The forward raised the error that is its argument."""


@dataclass(slots=True, eq=False)
class _Made:
    """A storage that an operator made, and what is told of it if nothing else keeps it."""

    storage: weakref.ref[torch.UntypedStorage]
    device: torch.device
    kept: Kept


def run_forward(
    paths: ModulePaths, fake: FakeTensors, args: tuple[Any, ...], kwargs: dict[str, Any], has_saved: bool
) -> Forward:
    """Run the forward once; the modules then hold fakes."""
    paths.exchange(FakeCopies(fake))
    watch = Forward(fake, paths, has_saved)
    as_written: Any = contextlib.nullcontext()
    hooks: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # if nothing was compiled, do not import the compiler
        as_written = torch.compiler.set_stance("force_eager")
    if has_saved:
        hooks = saved_tensors_hooks(watch.pack, lambda packed: packed)
    logging.getLogger(fakes.LOGGER).disabled = True  # for error messages
    # cuDNN's recurrent layers check whether their weights are contiguous in memory.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
    try:
        with as_written, hooks, fake.mode, watch:
            out = paths.modules[0](*args, **kwargs)
    except Exception as error:
        raise ForwardFailed(error) from None
    watch.end(tensors_in(out))
    return watch


class Forward(fakes.TorchDispatchMode):
    """The result of a forward on fakes; `kept` is by storage number, `has_saved` is False if hooks are forbidden.

    While it runs it records the storages that operators make, and replaces real tensors from outside by fakes.
    """

    supports_higher_order_operators = True

    def __init__(self, fake: FakeTensors, paths: ModulePaths, has_saved: bool) -> None:
        super().__init__()
        self.has_saved = has_saved
        self.outputs: list[Tensor] = []
        self.kept: dict[int, Kept] = {}
        self.elsewhere_bytes = 0
        self.operators: set[str] = set()
        self.read: set[int] = set()
        self.sparse_rows: Counter[int] = Counter()
        self.outside: dict[int, Tensor] = {}
        self.layer_outputs: list[LayerOutput] = []
        self.calls: Counter[str] = Counter()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._fakes, self._paths = fake, paths
        self._stack = [""]  # the paths of the modules that are being called
        self._made: dict[int, _Made] = {}
        self._all_made: list[_Made] = []
        self._saved: list[tuple[weakref.ref[Tensor], _Made, Kept]] = []
        self._counted: set[int] = set()
        for module in paths.modules:
            tables = module.__dict__
            if "_forward_hooks" not in tables:
                continue  # nn.Module.__init__ was not called: PyTorch raises its own error
            tables["_forward_pre_hooks"]["memlab.size"] = self._begin
            tables["_forward_pre_hooks"].move_to_end("memlab.size", last=False)
            tables["_forward_hooks"]["memlab.size"] = self._end
            tables["_forward_hooks_always_called"]["memlab.size"] = True

    # --- modules ---

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(self._paths.of(module, self._stack[-1]))

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        path = self._stack.pop()
        if output is None:
            return
        self.calls[path] += 1
        tensors = tensors_in(output)
        if tensors:
            self.shapes.setdefault(path, tuple(tensors[0].shape))
        if not path or any(True for _ in module.children()) or id(module) in self._counted:
            return
        self._counted.add(id(module))
        if isinstance(module, nn.ReLU) and module.inplace:
            return
        for tensor in tensors:
            made = tuple(id(one) for one in self._made_of(tensor))
            self.layer_outputs.append(LayerOutput(path, tensor.numel() * ELEMENT_BYTES, made))

    # --- operators ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SPARSE and len(args) > 1 and is_tensor(args[1]):
            dtype = args[1].dtype
            if dtype not in (torch.int64, torch.int32):
                operator = str(func).removesuffix(".default")
                got = str(dtype).removeprefix("torch.")
                raise WrongIndices(f"{operator} looks up rows by whole numbers, got {got}")
        if func not in _LIFTS:
            args, kwargs = fakes.tree_map(self._inside, (args, kwargs))
        before = set(storage_bytes(*filter(is_tensor, fakes.tree_leaves((args, kwargs)))))
        self.read |= before
        out = func(*args, **kwargs)
        self._note(func, args, out, before)
        return out

    def _inside(self, thing: Any) -> Any:
        """The fake of a real tensor. Scalars stay real: PyTorch knows those written in the code."""
        if not is_tensor(thing) or issubclass(type(thing), fakes.FakeTensor) or not thing.dim():
            return thing
        if type(thing).__torch_dispatch__ is not dispatch.plain_torch_dispatch:
            return thing  # it wraps others, which arrive by themselves
        self.outside.setdefault(id(thing), thing)
        return self._fakes.of(thing)

    def _note(self, func: Any, args: Any, out: Any, before: set[int]) -> None:
        self.operators.add(str(func))
        if func is _aten._cudnn_rnn.default:
            out = out[:_WEIGHTS_OF_RNN]
        leaves = fakes.tree_leaves(out)
        # The random state, which PyTorch's own fakes place on CUDA; without dropout it is there since 2.14.
        is_efficient = func is _aten._scaled_dot_product_efficient_attention.default
        on_cpu = leaves[2:] if is_efficient and (any(args[5:6]) or release(torch.__version__) < (2, 14)) else []
        for leaf in filter(is_tensor, leaves):
            for part in plain_tensors(leaf):
                device = _CPU if any(leaf is one for one in on_cpu) else part.device
                storage = part.untyped_storage()
                key = storage_id(storage)
                known = self._made.get(key)
                was_there = key in before or key in self._fakes.storage_keys
                if was_there or (known is not None and known.storage() is not None):
                    continue
                dtype, path = str(part.dtype).removeprefix("torch."), self._stack[-1]
                kept = Kept(OTHER, 0, tuple(part.shape), dtype, path, path, str(func))
                made = _Made(weakref.ref(storage), device, kept)
                self._made[key] = made
                self._all_made.append(made)
        place = _SPARSE.get(func)
        if place is not None and len(args) > place and args[place]:
            self.sparse_rows[storage_id(args[0].untyped_storage())] += args[1].numel()

    def _made_of(self, tensor: Tensor) -> list[_Made]:
        known = (self._made.get(key) for key in storage_bytes(tensor))
        return [made for made in known if made is not None and made.storage() is not None]

    def pack(self, tensor: Tensor) -> Tensor:
        """What the graph holds in place of a saved tensor: alive as long as the graph needs it."""
        # Detached, as the graph would keep it: an output that knows its node would keep itself alive.
        packed = tensor.detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        how: Any = {"why": SAVED, "shape": tuple(tensor.shape), "dtype": dtype, "layer": self._stack[-1]}
        with torch.no_grad():
            for made in self._made_of(tensor):
                self._saved.append((weakref.ref(packed), made, replace(made.kept, **how)))
        return packed

    def end(self, outputs: list[Tensor]) -> None:
        """Record the live storages, and the bytes on other devices than the model."""
        self.outputs = outputs
        known: set[int] = set()

        def keep(made: _Made, kept: Kept) -> None:
            storage = made.storage()
            if storage is None or id(made) in known:
                return
            known.add(id(made))
            nbytes = storage.nbytes()  # the current bytes, after any resize
            if made.device.type not in self._fakes.device_types:
                self.elsewhere_bytes += nbytes
            elif nbytes:
                self.kept[id(made)] = replace(kept, nbytes=nbytes)

        for packed, made, kept in self._saved:
            if packed() is not None:
                keep(made, kept)
        for made in (one for tensor in outputs for one in self._made_of(tensor)):
            keep(made, replace(made.kept, why=OUTPUT))
        for made in self._all_made:
            keep(made, made.kept if self.has_saved else replace(made.kept, why=SAVED))


# --- gradients ---

_SPARSE_NODES = ("EmbeddingBackward", "EmbeddingBagBackward")
_RECOMPUTES = "CheckpointFunctionBackward"


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one leaf; if sparse, the rows that this input selects."""

    nbytes: int
    rows: int = 0


class Graph:
    """The graph of a forward's outputs: its leaves, with the names of the nodes that produce their gradients."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        leaves = [one for one in forward.outputs if one.requires_grad and one.grad_fn is None]
        self._senders: dict[int, set[str]] = {id(leaf): set() for leaf in leaves}
        self.recomputes = False
        for node in graph.nodes_behind(*forward.outputs):
            self.recomputes |= _RECOMPUTES in node.name()
            for following, _ in node.next_functions:
                if (leaf := getattr(following, "variable", None)) is not None:
                    self._senders.setdefault(id(leaf), set()).add(node.name())

    def gradient(self, leaf: Tensor, real: Tensor) -> Gradient | None:
        """The gradient that backward will compute for `leaf`, the fake of `real`; None if there is none."""
        key = storage_id(leaf.untyped_storage()) if leaf.layout == torch.strided else 0
        # A forward may access the real one in another way.
        senders = self._senders.get(id(leaf), self._senders.get(id(real)))
        if not leaf.requires_grad or (senders is None and not (self.recomputes and key in self._forward.read)):
            return None
        rows = self._forward.sparse_rows.get(key, 0)
        if rows and senders and all(name.startswith(_SPARSE_NODES) for name in senders):
            row_bytes = leaf.element_size() * (leaf.numel() // max(leaf.shape[0], 1))
            return Gradient(rows * (torch.int64.itemsize + row_bytes), rows)
        if real.layout == torch.strided:
            return Gradient(real.numel() * real.element_size())
        return Gradient(sum(storage_bytes(real).values()))


# --- the optimizer ---

_NAMES = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}


@dataclass(slots=True)
class OptimizerState:
    """The optimizer state in bytes by parameter (id of its fake, None: of no parameter), and its device."""

    name: str
    was_asked: bool
    here: Counter[int | None] = field(default_factory=Counter)
    elsewhere_bytes: int = 0


class _AnyNumber(fakes.TorchDispatchMode):
    """Returns 1 when an optimizer reads a tensor's value: sizes do not depend on it."""

    was_asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except fakes.DataDependentOutputException:
            if func is not _aten._local_scalar_dense.default:
                raise
        self.was_asked = True
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def run_step(
    choice: Any, parameters: list[Tensor], fake: FakeTensors, grads: Mapping[int, Tensor | None]
) -> OptimizerState:
    """Run one step of the chosen optimizer on fakes of parameters, some of which may belong to other models.

    `grads` has the gradients of the model's parameters by id of the fake; None if there is none.
    """
    name = type(choice).__name__ if isinstance(choice, Optimizer) else choice
    name = name if isinstance(name, str) else str(getattr(choice, "__name__", type(choice).__name__))
    ask, reason = _AnyNumber(), ""
    try:
        with fake.mode, ask, torch.no_grad():
            optimizer = _optimizer(choice, parameters, fake)
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter in mine:
                # Parameters of other models are assumed to have a gradient.
                missing = torch.empty_like(parameter) if parameter.requires_grad else None
                parameter.grad = grads.get(id(parameter), missing)
            if any(parameter.grad is not None for parameter in mine):
                # Bypass the wrapper that runs all step hooks.
                inspect.unwrap(type(optimizer).step)(optimizer)
            found = OptimizerState(type(optimizer).__name__, ask.was_asked)
            # The state, then whatever else the optimizer holds, each storage once; Adam's step counters are on the CPU.
            seen = set(storage_bytes(*(t for p in mine for t in (p, p.grad) if t is not None)))
            holders: list[tuple[int | None, Any]] = [(id(key), value) for key, value in optimizer.state.items()]
            for owner, holder in [*holders, (None, optimizer.__dict__)]:
                for tensor in tensors_in(holder):
                    new = {key: size for key, size in storage_bytes(tensor).items() if key not in seen}
                    seen |= set(new)
                    if tensor.device.type in fake.device_types:
                        found.here[owner] += sum(new.values())
                    else:
                        found.elsewhere_bytes += sum(new.values())
            return found
    except MemlabError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    advice = "Leave optimizer out, or measure a real step with memlab.track()."
    raise MemlabError(f"one step of {name} cannot be run without data ({reason[:200]}). {advice}")


def _optimizer(choice: Any, parameters: list[Tensor], fake: FakeTensors) -> Optimizer:
    if isinstance(choice, Optimizer):  # itself on fakes, as before its first step and without hooks
        own = choice.__dict__
        own.pop("step", None)  # a scheduler replaces it
        own |= {"state": defaultdict(dict), **{name: OrderedDict() for name in own if name.endswith("_hooks")}}
        FakeCopies(fake).of(own)
        return choice
    if isinstance(choice, str):
        if choice.lower() not in _NAMES:
            known = ", ".join(kind.__name__ for kind in _NAMES.values())
            raise MemlabError(f"torch.optim has no optimizer {choice[:60]!r}. It has {known}.")
        choice = _NAMES[choice.lower()]
    if not callable(choice):
        wanted = "a class or a name of torch.optim, an optimizer, or a function that makes one of parameters"
        raise MemlabError(f"optimizer is {wanted}; got {type(choice).__name__}.")
    made = choice([fake.of(parameter) for parameter in parameters])
    if not isinstance(made, Optimizer):
        kind = type(made).__name__
        raise MemlabError(f"optimizer must make a torch.optim.Optimizer of parameters, it made {kind}.")
    return made
