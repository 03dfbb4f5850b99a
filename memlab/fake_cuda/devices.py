"""The device as Python sees it: `torch.cuda`, `torch.accelerator`, memory, generators, answered from the GPU's data.

Where C++ decides by device or by tensor class it would treat fake CUDA tensors wrongly: those decisions are made here as for CUDA.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
import warnings
from collections import OrderedDict
from operator import attrgetter
from typing import Any

import torch
import torch.accelerator
import torch.amp.autocast_mode
import torch.amp.grad_scaler
import torch.cuda.amp.common
from torch.nn import parameter

from memlab.errors import PredictionError
from memlab.fake_cuda import deferred_init, gpus, tensors
from memlab.fake_cuda.cuda_graphs import PLUGGED, capture_graphs
from memlab.fake_cuda.gpus import GPUS, State, with_index
from memlab.fake_cuda.kernel_rules import CUDA_KERNELS, flat, operator
from memlab.fake_cuda.patches import Patches, constant, nothing
from memlab.fake_cuda.reductions import threads_per_multiprocessor
from memlab.fake_cuda.streams import Current, DeviceContext, Event, Stream, StreamContext
from memlab.fake_cuda.tensors import FakeCudaTensor, is_fake, set_data
from memlab.torch_internals import cuda_names
from memlab.torch_internals.cuda_names import fake_tensor
from memlab.torch_internals.dispatch import TensorBase
from memlab.torch_internals.fakes import LOGGER
from memlab.torch_internals.objects import destroy, local_part_or

ASKED = "the code asked how much memory is in use: on another GPU it may behave differently"
ASKED_FREE = "the code asked how much memory is free, which follows from the size of the CUDA context"
SCRIPTED = "TorchScript is predicted as the Python it was made of: torch.jit.script did nothing"
PARALLEL = (
    "nn.DataParallel on several GPUs cannot be predicted: use DistributedDataParallel, and predict it with world_size=2 "
    "(--nproc-per-node 2)."
)
_Generator = torch.Generator
_data_ptr = torch.UntypedStorage.data_ptr


def import_scripts() -> None:
    """Import what PyTorch imports and scripts on first use: that must not happen while names are patched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def exchange_devices(cuda: Any, patches: Patches) -> None:
    """Patch everything that queries the device."""
    import_scripts()
    _exchange_tensors(patches)
    _exchange_cuda(cuda, patches)
    capture_graphs(cuda, patches)
    _exchange_training(cuda, patches)
    _refuse(patches)


def _exchange_tensors(patches: Patches) -> None:
    patches.put(
        torch.Tensor,
        _make_subclass=staticmethod(_make_subclass),
        data=property(TensorBase.data.__get__, set_data),
        to=tensors.tensor_to,
        cuda=tensors.tensor_cuda,
        type_as=tensors.type_as,
        pin_memory=lambda tensor, *args: tensor,
    )
    for name in ("numpy", "tolist", "data_ptr", "__reduce_ex__", "__dlpack__", "share_memory_"):
        patches.put(torch.Tensor, **{name: _reading(getattr(torch.Tensor, name))})
    patches.put(fake_tensor.FakeTensorMode, avoid_device_init=property(lambda mode: True))
    patches.put(fake_tensor, init_gpu_context=nothing)
    # Before raising an operator's error it logs a traceback, which keeps the arguments alive.
    patches.put(logging.getLogger(LOGGER), disabled=True)
    # Modules move by `.data =`: host tensors and those of the GPU are compatible, as on CUDA; see `tensors.set_data`.
    patches.put(torch, _has_compatible_shallow_copy_type=_are_compatible, Generator=Generator)
    patches.put(torch, load=tensors.loading(torch.load))
    patches.put(torch.utils, swap_tensors=tensors.swap)
    patches.put(torch.UntypedStorage, data_ptr=_address_of)
    # Parameters that get their shape from the first input (`nn.LazyLinear`) remember that they were moved.
    lazy: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
    to_gpu = lambda self, device=None, **kwargs: _lazy_to(self, "cuda" if device is None else device)  # noqa: E731
    patches.put(lazy, to=_lazy_to, cuda=to_gpu, materialize=_materializing(lazy.materialize))


def _are_compatible(tensor: Any, other: Any) -> bool:
    """All tensors but those that wrap others, as DTensors do: `.data =` would leave what they wrap where it is."""
    wrapped = [local_part_or(one) for one in (tensor, other)]
    return None in wrapped or is_fake(wrapped[0]) == is_fake(wrapped[1])


def _make_subclass(cls: Any, data: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
    """The tensors of shape functions must not be on CUDA for C++ either (see `tensors`)."""
    if isinstance(cls, type) and issubclass(cls, fake_tensor.FakeTensor):
        kwargs["dispatch_device"] = False
    if is_fake(data) and cls not in (torch.nn.Parameter, torch.Tensor):
        made = data.detach().as_subclass(cls)
        return made.requires_grad_(requires_grad)
    return cuda_names.make_subclass(cls, data, requires_grad, **kwargs)


def _reading(function):
    """Access to the values of host tensors without dispatch: pending ones are filled first."""

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        deferred_init.read((self.detach() if type(self) is torch.nn.Parameter else self,))
        return function(self, *args, **kwargs)

    return method


def _address_of(storage: Any) -> int:
    """Storages on the GPU are identified by address, as code does that looks for shared weights."""
    if storage.device.type == "meta" and State.active is not None:
        return int(State.active.log.address_of(storage))
    return int(_data_ptr(storage))


def _lazy_to(self, *args, **kwargs):
    device = kwargs.get("device", args[0] if args else None)
    if isinstance(device, str | int | torch.device):
        self.__dict__["fake_device"] = with_index(device)
    return self


def _materializing(materialize):
    def materialized(self, shape, device=None, dtype=None):
        """As PyTorch's, on the host; then on the GPU if it was moved there (torch/nn/parameter.py, 2.11 to 2.15)."""
        target = self.__dict__.pop("fake_device", None) if device is None else with_index(device)
        is_for_gpu = target is not None and target.type == "cuda"
        materialize(self, shape, torch.device("cpu") if is_for_gpu else target, dtype)
        if is_for_gpu:
            set_data(self, torch.empty(shape, device=target, dtype=self.dtype))

    return materialized


class _GeneratorKind(type(_Generator)):  # type: ignore[misc]
    """`isinstance(g, torch.Generator)` is still true for all generators."""

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, _Generator)


class Generator(_Generator, metaclass=_GeneratorKind):
    """A host generator that claims to be on the GPU."""

    def __new__(cls, device="cpu"):
        """A host generator whatever the device."""
        return _Generator.__new__(cls, "cpu")  # type: ignore[call-arg]

    def __init__(self, device: Any = "cpu") -> None:
        self._fake_device = with_index(device)

    device: Any = property(lambda self: self._fake_device)


class _LegacyKind(type):
    """`torch.cuda.FloatTensor`, and `isinstance(x, torch.cuda.FloatTensor)`."""

    dtype: torch.dtype

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.dtype

    def __call__(cls, *args: Any) -> Any:
        return tensors.legacy_tensor(cls.dtype, args)


def _set_device(device: Any) -> None:
    if not (type(device) is int and device < 0):  # which is nothing
        gpus.choose(with_index(device).index)


def _memory(cuda: Any) -> dict[str, Any]:
    """The functions of `torch.cuda.memory`, answered by the simulated allocator."""
    log = cuda.log

    def allocator_of(device):
        return log.allocators[with_index("cuda" if device is None else device).index]

    def asked(figure, what=ASKED):
        def answer(device=None):
            cuda.assume(what)
            log.record_frees()
            return figure(allocator_of(device))

        return answer

    def reset_peaks(device=None):
        log.record_frees()
        allocator_of(device).reset_peaks()

    reserved, peak_reserved = asked(attrgetter("reserved_bytes")), asked(attrgetter("peak_reserved_bytes"))
    return {
        "memory_allocated": asked(attrgetter("allocated_bytes")),
        "max_memory_allocated": asked(attrgetter("peak_allocated_bytes")),
        "memory_reserved": reserved, "memory_cached": reserved,
        "max_memory_reserved": peak_reserved, "max_memory_cached": peak_reserved,
        "mem_get_info": asked(lambda allocator: (int(allocator.free_bytes), int(allocator.total_bytes)), ASKED_FREE),
        "memory_stats": asked(lambda allocator: OrderedDict(sorted(allocator.memory_stats().items()))),
        "reset_peak_memory_stats": reset_peaks, "reset_max_memory_allocated": reset_peaks,
        "reset_max_memory_cached": reset_peaks,
        "reset_accumulated_memory_stats": lambda device=None: allocator_of(device).reset_accumulated(),
        "empty_cache": log.empty_cache,
        "set_per_process_memory_fraction": lambda share, device=None: allocator_of(device).set_memory_fraction(share),
        "memory_snapshot": lambda *args, **kwargs: [],
        "list_gpu_processes": constant("no processes are running"),
        "_record_memory_history": nothing, "_dump_snapshot": nothing,
        "_snapshot": lambda *args, **kwargs: {"segments": [], "device_traces": [[]]},
    }  # fmt: skip


def _properties(gpu: Any) -> Any:
    """What `torch.cuda.get_device_properties` returns."""
    capability = major, minor = tuple(gpu.compute_capability)
    return types.SimpleNamespace(
        name=gpu.name, major=major, minor=minor, total_memory=gpu.total_bytes,
        multi_processor_count=gpu.multiprocessors, is_integrated=False, is_multi_gpu_board=False, warp_size=32,
        max_threads_per_multi_processor=threads_per_multiprocessor(capability),
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400, L2_cache_size=32 << 20, gcnArchName="", uuid="", pci_bus_id=0,
        pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def _exchange_cuda(cuda: Any, patches: Patches) -> None:
    gpu, memory = cuda.gpu, _memory(cuda)
    capability = major, minor = tuple(gpu.compute_capability)
    random = {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"), nothing),
        "initial_seed": constant(0), "get_rng_state": lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
    }  # fmt: skip
    legacy = {
        name: _LegacyKind(name, (), {"__module__": "torch.cuda", "dtype": tensors.LEGACY_TYPES[name]})
        for name in ("FloatTensor", "HalfTensor", "LongTensor", "ByteTensor", "BoolTensor", "IntTensor")
    }
    patches.put_where_present(
        torch.cuda,
        is_available=constant(True), is_initialized=constant(True), init=nothing, _lazy_init=nothing,
        device_count=lambda: State.device_count, current_device=gpus.current, set_device=_set_device, synchronize=nothing,
        get_device_properties=constant(_properties(gpu)), get_device_capability=constant(capability),
        get_device_name=constant(gpu.name), is_tf32_supported=constant(capability >= (8, 0)),
        is_bf16_supported=lambda including_emulation=True: including_emulation or capability >= (8, 0),
        get_arch_list=constant([f"sm_{major}{minor}"]), can_device_access_peer=constant(State.devices > 1),
        ipc_collect=nothing, device=DeviceContext, device_of=DeviceContext, _DeviceGuard=DeviceContext, utilization=constant(0),
        temperature=constant(40), power_draw=constant(0), clock_rate=constant(0), memory_usage=constant(0),
        Stream=Stream, ExternalStream=Stream, Event=Event, StreamContext=StreamContext, stream=StreamContext,
        current_stream=Current.get, default_stream=Current.default, set_stream=Current.set,
        **legacy, **memory, **random,
    )  # fmt: skip
    patches.put_where_present(torch.cuda.memory, **memory)
    patches.put_where_present(torch.cuda.random, **random)
    patches.put_where_present(torch.cuda.streams, Stream=Stream, Event=Event)
    patches.put_where_present(torch, Stream=Stream, Event=Event)
    patches.put_where_present(torch.version, cuda=torch.version.cuda or "13.0")
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        patches.put(torch._C, _cuda_getCurrentRawStream=constant(0))
    patches.put_where_present(torch.backends.cuda, is_built=constant(True))
    for name in ("preferred_blas_library", "preferred_linalg_library"):
        patches.put_where_present(torch.backends.cuda, **{name: _preferring(getattr(torch.backends.cuda, name, None))})
    version = constant(cuda_names.compiled_cudnn_version())
    patches.put_where_present(torch.backends.cudnn, is_available=constant(True), version=version)
    _exchange_accelerator(memory, patches)


def _exchange_accelerator(memory: dict[str, Any], patches: Patches) -> None:
    shared = (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
        "reset_peak_memory_stats", "empty_cache", "reset_accumulated_memory_stats",
    )  # fmt: skip
    patches.put_where_present(
        torch.accelerator,
        is_available=constant(True), device_count=lambda: State.device_count, synchronize=nothing,
        current_device_index=gpus.current, current_device_idx=gpus.current, set_device_index=_set_device,
        set_device_idx=_set_device, current_accelerator=constant(torch.device("cuda")),
        current_stream=Current.get, set_stream=Current.set, device_index=DeviceContext,
        get_device_capability=constant({"supported_dtypes": set()}), get_memory_info=memory["mem_get_info"],
        empty_host_cache=nothing, **{name: memory[name] for name in shared},
    )  # fmt: skip
    if (module := sys.modules.get("torch.accelerator.memory")) is not None:
        patches.put_where_present(
            module, get_memory_info=memory["mem_get_info"], empty_host_cache=nothing,
            **{name: memory[name] for name in shared},
        )  # fmt: skip


def _preferring(prefer):
    """A switch between libraries that this build may lack: it stores its value."""
    said: list[Any] = []

    def preferred(backend=None):
        if backend is not None:
            said.append(backend)
        return said[-1] if said else prefer()

    return preferred


def _exchange_training(cuda: Any, patches: Patches) -> None:
    for module in (torch.cuda.amp.common, torch.amp.autocast_mode, torch.amp.grad_scaler):
        patches.put_where_present(module, amp_definitely_not_available=constant(False))
    # GradScaler finds no infinity (torch/amp/grad_scaler.py asks the device).
    patches.put(
        torch.amp.GradScaler, _maybe_opt_step=lambda scaler, optimizer, state, *args, **kw: optimizer.step(*args, **kw)
    )
    patches.put(torch.optim.Optimizer, _accelerator_graph_capture_health_check=nothing)
    # torch/optim/__init__.py deletes the module's name, the module stays.
    supported = sys.modules["torch.optim.optimizer"]._foreach_supported_types
    for kind in (FakeCudaTensor, tensors.FakeCudaParameter):
        supported.append(kind)
        patches.callback(supported.remove, kind)
    # Gradients are clipped by the multi-tensor kernels (torch/utils/_foreach_utils.py, _has_foreach_support).
    clipping = sys.modules["torch.nn.utils.clip_grad"]
    has_foreach = clipping._has_foreach_support
    patches.put(clipping, _has_foreach_support=lambda found, device: _are_fake(found) or has_foreach(found, device))
    # Optimizers make new scalars on the device of their groups, which C++ takes for the meta device (ASGD, a learning rate in a
    # tensor; torch/utils/_foreach_utils.py, _group_tensors_by_device_and_dtype).
    for name in ("torch.optim.optimizer", "torch.optim.swa_utils", "torch.nn.utils.clip_grad"):
        module = sys.modules[name]
        patches.put(module, _group_tensors_by_device_and_dtype=_grouping(module._group_tensors_by_device_and_dtype))

    def scripted(obj, *args, **kwargs):
        cuda.assume(SCRIPTED)
        return obj

    def on_one_gpu(parallel, *inputs, **kwargs):
        """`nn.DataParallel` with one GPU: it moves the inputs (torch/nn/parallel/data_parallel.py)."""
        if State.devices > 1 and len(parallel.device_ids) > 1:
            raise PredictionError(PARALLEL)
        inputs, kwargs = cuda_names.tree_map_only(torch.Tensor, lambda one: one.to("cuda"), (inputs, kwargs))
        return parallel.module(*inputs, **kwargs)

    patches.put(torch.jit, script=scripted)
    patches.put(torch.nn.DataParallel, forward=on_one_gpu)


def _are_fake(found: Any) -> bool:
    """Whether all are on the fake GPU, DTensors too."""
    return bool(found) and all(one is None or is_fake(local_part_or(one, one)) for one in found)


def _grouping(group):
    def grouped(columns: Any, with_indices: bool = False) -> Any:
        groups = group(columns, with_indices)
        if not _are_fake([one for column in columns[:1] for one in column]):
            return groups

        def seen(device: Any) -> Any:
            return GPUS[device.index or 0] if device.type == "meta" else device

        return {(seen(device), dtype): rest for (device, dtype), rest in groups.items()}

    return grouped


def put_composite_rules(cuda: Any, patches: Patches) -> None:
    """For fake CUDA tensors, the rules of composite operators replace their decomposition."""
    library = torch.library.Library("aten", "IMPL")
    patches.callback(destroy(library))
    for func in map(operator, CUDA_KERNELS):
        # Let autograd differentiate an operator as a whole, as if CUDA had a kernel for it (Dispatcher: computeDispatchTableEntry).
        if func is not None and not cuda_names.has_kernel(func.name(), "CUDA"):
            library.impl(func, func.decompose, "CUDA")

    def kernel(func, function):
        @tensors.without_frames
        def run(*args, **kwargs):
            if not any(map(is_fake, flat((*args, *kwargs.values())))):
                return func.decompose(*args, **kwargs)  # for the tensors of shape functions
            return function(cuda, func, *args, **kwargs)

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's kernel is overridden on purpose
        for func, function in cuda.composite_rules.items():
            library.impl(func, kernel(func, function), "AutogradCUDA", allow_override=True)


def _refused(text: str, name: str = "") -> Any:
    """A function that cannot be predicted; with a name it is a class, for annotations and `isinstance`."""

    def refuse(*args, **kwargs):
        raise PredictionError(text)

    return type(name, (), {"__new__": refuse, "__module__": "torch.cuda"}) if name else refuse


def _refuse(patches: Patches) -> None:
    raw = "memory allocated without a tensor (caching_allocator_alloc) cannot be predicted: make a tensor of that size instead."
    patches.put_where_present(
        torch.cuda,
        caching_allocator_alloc=_refused(raw),
        CUDAPluggableAllocator=_refused(PLUGGED, "CUDAPluggableAllocator"),
    )
