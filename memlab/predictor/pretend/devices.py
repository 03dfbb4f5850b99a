"""What Python sees of the device: `torch.cuda`, `torch.accelerator`, generators, pinning, all answered from the card."""

from __future__ import annotations

import importlib
import logging
import sys
import types
import warnings
from typing import Any

import torch
import torch.accelerator
import torch.amp.autocast_mode
import torch.amp.grad_scaler
import torch.cuda.amp.common
from torch._subclasses import fake_tensor
from torch.utils import _device

from memlab.errors import PredictionError
from memlab.predictor.pretend import blanks, copies, lazy, streams
from memlab.predictor.pretend.memory import Memory, nothing
from memlab.predictor.pretend.mode import device_context, factories
from memlab.predictor.pretend.patches import Patches
from memlab.predictor.pretend.tensors import (
    CUDA0,
    LEGACY_TYPES,
    PretendParameter,
    PretendTensor,
    State,
    host_to,
    host_to_cuda,
    set_data,
    swap,
    type_as,
    with_index,
)
from memlab.seams.dispatch import TensorBase
from memlab.seams.fakes import LOGGER

COMPILED = "compiled code is predicted as eager: torch.compile did nothing"
SCRIPTED = "TorchScript is predicted as the Python it was made of: torch.jit.script did nothing"
_Generator = torch.Generator
_data_ptr = torch.UntypedStorage.data_ptr
_make_subclass = torch.Tensor._make_subclass


def constant(value: Any) -> Any:
    """A function that answers the same whatever it is asked."""
    return lambda *args, **kwargs: value


def refused(what: str, instead: str) -> Any:
    """A function that cannot be predicted, and what to do."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PredictionError(f"{what} cannot be predicted: {instead}")

    return refuse


def _load_late() -> None:
    """What PyTorch loads when it is first needed, and scripts then: that must not happen while names are exchanged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def put(patches: Patches, card: Any, memory: Memory, assumptions: Any) -> None:
    """Exchange everything that asks for the device."""
    _load_late()
    _tensors(patches)
    _cuda(patches, card, memory)
    _accelerator(patches, card, memory)
    _training(patches, assumptions)
    _refusals(patches)


def _fake_subclass(cls: Any, data: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
    """The tensors that shape functions work with must not be on CUDA for C++ either (see `tensors`)."""
    if isinstance(cls, type) and issubclass(cls, fake_tensor.FakeTensor):
        kwargs["dispatch_device"] = False
    return _make_subclass(cls, data, requires_grad, **kwargs)


def _tensors(patches: Patches) -> None:
    patches.put(
        torch.Tensor,
        _make_subclass=staticmethod(_fake_subclass),
        data=property(TensorBase.data.__get__, set_data),
        to=host_to,
        cuda=host_to_cuda,
        type_as=type_as,
        pin_memory=lambda tensor, *args: tensor,
        **_host_reads(),
    )
    patches.put(fake_tensor.FakeTensorMode, avoid_device_init=property(lambda mode: True))
    patches.put(fake_tensor, init_gpu_context=nothing)
    # Before it raises the error of an operator it writes a traceback to the log, which keeps the arguments alive.
    patches.put(logging.getLogger(LOGGER), disabled=True)
    patches.put(torch, **factories(), _has_compatible_shallow_copy_type=_compatible)
    patches.put(torch.utils, swap_tensors=swap)
    patches.put(torch.UntypedStorage, data_ptr=_address_of)
    patches.put(_device.DeviceContext, **device_context())
    patches.put(torch, Generator=Generator, load=_loader(torch.load))
    lazy.put(patches)


def _address_of(storage: Any) -> int:
    """Storages on the card are told apart by their address, as code does that looks for shared weights."""
    if storage.device.type == "meta" and State.active is not None:
        return int(State.active.log.address_of(storage))
    return int(_data_ptr(storage))


def _compatible(first: Any, second: Any) -> bool:
    """Host tensors and those of the card are, as on CUDA; see `tensors.set_data`."""
    return True


def _host_reads() -> dict[str, Any]:
    """Ways to the values of host tensors that no dispatch sees: those without data get it first."""

    def reading(function: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            blanks.read((self.detach() if type(self) is torch.nn.Parameter else self,))
            return function(self, *args, **kwargs)

        return method

    names = ("numpy", "tolist", "data_ptr", "__reduce_ex__", "__dlpack__", "share_memory_")
    return {name: reading(getattr(torch.Tensor, name)) for name in names}


def properties(card: Any) -> Any:
    """As `torch.cuda.get_device_properties`."""
    major, minor = card.compute_capability
    return types.SimpleNamespace(
        name=card.name, major=major, minor=minor, total_memory=card.total_bytes,
        multi_processor_count=card.multiprocessors, is_integrated=False, is_multi_gpu_board=False, warp_size=32,
        max_threads_per_multi_processor=2048 if major in (8, 9) and minor == 0 else 1536,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400, L2_cache_size=32 << 20, gcnArchName="", uuid="", pci_bus_id=0,
        pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _cuda(patches: Patches, card: Any, memory: Memory) -> None:
    capability = tuple(card.compute_capability)
    current = streams.Current
    patches.put_where_present(
        torch.cuda,
        is_available=constant(True), is_initialized=constant(True), init=nothing, _lazy_init=nothing,
        device_count=constant(1), current_device=constant(0), set_device=with_index, synchronize=nothing,
        get_device_properties=constant(properties(card)), get_device_capability=constant(capability),
        get_device_name=constant(card.name), is_bf16_supported=_bf16(capability),
        is_tf32_supported=constant(capability >= (8, 0)), get_arch_list=constant([f"sm_{capability[0]}{capability[1]}"]),
        can_device_access_peer=constant(False), ipc_collect=nothing, device=_DeviceContext, device_of=_DeviceContext,
        utilization=constant(0), temperature=constant(40), power_draw=constant(0), clock_rate=constant(0),
        memory_usage=constant(0), Stream=streams.Stream, ExternalStream=streams.Stream, Event=streams.Event,
        StreamContext=streams.StreamContext, stream=streams.StreamContext, current_stream=current.get,
        default_stream=constant(current.default), set_stream=current.set, is_current_stream_capturing=constant(False),
        FloatTensor=_legacy("FloatTensor"), HalfTensor=_legacy("HalfTensor"), LongTensor=_legacy("LongTensor"),
        ByteTensor=_legacy("ByteTensor"), BoolTensor=_legacy("BoolTensor"), IntTensor=_legacy("IntTensor"),
        **memory.names(), **_random(),
    )  # fmt: skip
    patches.put_where_present(torch.cuda.memory, **memory.names())
    patches.put_where_present(torch.cuda.random, **_random())
    patches.put_where_present(torch.cuda.streams, Stream=streams.Stream, Event=streams.Event)
    patches.put_where_present(torch.version, cuda=torch.version.cuda or "13.0")
    patches.put_where_present(torch.backends.cuda, is_built=constant(True))
    patches.put_where_present(
        torch.backends.cudnn,
        is_available=constant(True),
        version=constant(_cudnn_version()),
        is_acceptable=lambda tensor: tensor.is_cuda and tensor.dtype.is_floating_point,
    )
    patches.put_where_present(torch, _use_cudnn_rnn_flatten_weight=constant(True))


def _bf16(capability: tuple[int, ...]) -> Any:
    """`torch.cuda.is_bf16_supported`: by emulation everywhere."""

    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    return is_supported


def _cudnn_version() -> int:
    """That of this build, or what comes with the CUDA builds of 2.12 to 2.15."""
    try:
        major, minor, patch = torch._C._cudnn.getCompileVersion()
    except AttributeError:  # not built with it
        return 92000
    return int(major * 10_000 + minor * 100 + patch)


class _DeviceContext:
    """`with torch.cuda.device(0):`."""

    def __init__(self, device: Any = None) -> None:
        if not isinstance(device, torch.Tensor) and device is not None:
            with_index(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def refused_class(name: str, what: str, instead: str) -> Any:
    """The same as a class, which annotations and `isinstance` may name."""

    def refuse(kind: Any, *args: Any, **kwargs: Any) -> Any:
        raise PredictionError(f"{what} cannot be predicted: {instead}")

    return type(name, (), {"__new__": refuse, "__module__": "torch.cuda"})


class _LegacyKind(type):
    """`isinstance(x, torch.cuda.FloatTensor)`."""

    dtype: torch.dtype

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.dtype


def _legacy(name: str) -> Any:
    """`torch.cuda.FloatTensor(...)`."""
    dtype = LEGACY_TYPES[name]

    def make(kind: Any, *args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], list | tuple):
            return torch.tensor(args[0], dtype=dtype, device=CUDA0)
        return torch.empty(*(args or (0,)), dtype=dtype, device=CUDA0)

    return _LegacyKind(name, (), {"__new__": make, "__module__": "torch.cuda", "dtype": dtype})


def _random() -> dict[str, Any]:
    def state(*args: Any, **kwargs: Any) -> Any:
        return torch.zeros(16, dtype=torch.uint8)

    return {
        "manual_seed": nothing, "manual_seed_all": nothing, "seed": nothing, "seed_all": nothing,
        "initial_seed": constant(0), "get_rng_state": state, "get_rng_state_all": lambda: [state()],
        "set_rng_state": nothing, "set_rng_state_all": nothing,
    }  # fmt: skip


class _GeneratorKind(type(_Generator)):  # type: ignore[misc]
    """`isinstance(g, torch.Generator)` goes on to mean all generators."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, _Generator)


class Generator(_Generator, metaclass=_GeneratorKind):
    """A generator that may be said to be on the card; it is a host one."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """A host generator whatever the device."""
        return _Generator.__new__(cls, "cpu")  # type: ignore[call-arg]

    def __init__(self, device: Any = "cpu") -> None:
        self._pretend_device = with_index(device)

    @property
    def device(self) -> Any:  # type: ignore[override]
        """Where it is said to be."""
        return self._pretend_device


def _accelerator(patches: Patches, card: Any, memory: Memory) -> None:
    patches.put_where_present(
        torch.accelerator,
        is_available=constant(True), device_count=constant(1), synchronize=nothing,
        current_device_index=constant(0), current_device_idx=constant(0), set_device_index=nothing,
        set_device_idx=nothing, current_accelerator=constant(torch.device("cuda")),
        current_stream=streams.Current.get, set_stream=streams.Current.set, device_index=_DeviceContext,
        get_device_capability=constant({"supported_dtypes": set()}), **memory.accelerator_names(),
    )  # fmt: skip
    patches.put_where_present(torch, Stream=streams.Stream, Event=streams.Event)


def _training(patches: Patches, assumptions: Any) -> None:
    for module in (torch.cuda.amp.common, torch.amp.autocast_mode, torch.amp.grad_scaler):
        patches.put_where_present(module, amp_definitely_not_available=constant(False))
    patches.put(torch.amp.GradScaler, _maybe_opt_step=_step)
    patches.put(torch.optim.Optimizer, _accelerator_graph_capture_health_check=nothing)
    # torch/optim/__init__.py takes the module's name away, the module stays.
    patches.add(sys.modules["torch.optim.optimizer"]._foreach_supported_types, PretendTensor, PretendParameter)

    def compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        assumptions[COMPILED] += 1
        return model if model is not None else (lambda function: function)

    def scripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
        assumptions[SCRIPTED] += 1
        return obj

    patches.put_where_present(
        torch.nn.init, _no_grad_trunc_normal_=blanks.truncated(torch.nn.init._no_grad_trunc_normal_)
    )
    patches.put(torch, compile=compiled)
    patches.put(torch.jit, script=scripted)
    patches.put(torch.nn.Module, compile=lambda module, *args, **kwargs: compiled(module) and None)


def _step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """GradScaler finds no infinity (torch/amp/grad_scaler.py asks the device)."""
    return optimizer.step(*args, **kwargs)


def _loader(load: Any) -> Any:
    """`torch.load` of what was saved from the card; only our own rebuilding is added to what it may call."""

    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        where = map_location
        if isinstance(where, str | torch.device | int):
            where = with_index(where)
        on_card = isinstance(where, torch.device) and where.type == "cuda"
        with torch.serialization.safe_globals(list(copies.SAFE)):
            value = load(f, "cpu" if on_card else map_location, *args, **kwargs)
        return copies.moved(value, where) if isinstance(where, torch.device) else value

    return loading


def _on_one_card(parallel: Any, *inputs: Any, **kwargs: Any) -> Any:
    """`nn.DataParallel` where there is one card: it moves the inputs (torch/nn/parallel/data_parallel.py)."""
    inputs, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: one.to(CUDA0), (inputs, kwargs))
    return parallel.module(*inputs, **kwargs)


def _refusals(patches: Patches) -> None:
    graph = ("a captured CUDA graph", "run the step without it; its memory is that of the same step in a private pool.")
    pool = ("a memory pool of the user's", "leave it out of the prediction.")
    patches.put_where_present(torch.cuda, make_graphed_callables=refused(*graph), use_mem_pool=refused(*pool))
    for name in ("CUDAGraph", "graph"):
        patches.put_where_present(torch.cuda, **{name: refused_class(name, *graph)})
    for name in ("MemPool", "CUDAPluggableAllocator"):
        patches.put_where_present(torch.cuda, **{name: refused_class(name, *pool)})
    raw = refused("memory taken past tensors (caching_allocator_alloc)", "make a tensor of that size instead.")
    patches.put_where_present(torch.cuda, caching_allocator_alloc=raw)
    if torch.distributed.is_available():
        ranks = refused(
            "a distributed run", "predict one rank without process groups; DDP adds a copy of the gradients."
        )
        patches.put_where_present(torch.distributed, init_process_group=ranks)
        patches.put(torch.nn.parallel.DistributedDataParallel, __init__=ranks)
    patches.put(torch.nn.DataParallel, forward=_on_one_card)
