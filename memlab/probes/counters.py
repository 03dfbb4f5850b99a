"""Memory counters: those of PyTorch's allocators, and those of the driver, through NVML.

Reading creates nothing: it initializes no backend, makes no CUDA context, and asks NVML only once the user's code has
initialized CUDA. No counter is reset. A counter that cannot be read becomes a Gap, never an error.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memlab import torch_internals
from memlab.trace import Gap

_CUDA = {
    "allocated": ("allocated_bytes", "current"),
    "reserved": ("reserved_bytes", "current"),
    "peak_allocated": ("allocated_bytes", "peak"),
    "peak_reserved": ("reserved_bytes", "peak"),
    "alloc_count": ("allocation", "allocated"),
    "free_count": ("allocation", "freed"),
}
CUDA_COUNTERS = (*_CUDA, "num_ooms", "num_alloc_retries")
NOT_READ = -1


def cuda_counters(device: int) -> dict[str, int]:
    """The allocator's counters of one device: 0 while CUDA is not initialized, -1 where the allocator has none (pluggable)."""
    if not torch.cuda.is_initialized():
        return dict.fromkeys(CUDA_COUNTERS, 0)
    try:
        stats = torch_internals.cuda_stats(device)
    except RuntimeError:
        return dict.fromkeys(CUDA_COUNTERS, NOT_READ)
    counters = {name: stats[of]["all"][what] for name, (of, what) in _CUDA.items()}
    return counters | {name: stats[name] for name in ("num_ooms", "num_alloc_retries")}


def cuda_devices() -> tuple[int, ...]:
    """The visible devices on which this process has a CUDA context."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(device for device in range(torch.cuda.device_count()) if has_context(device))


def has_context(device: int) -> bool:
    """Whether this process has a CUDA context on the device; most other queries would create one (500 MiB)."""
    if not torch.cuda.is_initialized():
        return False
    # HIP may work without a context in CUDA's sense; memory that PyTorch holds on the device counts as well.
    return torch_internals.has_primary_context(device) or cuda_counters(device)["reserved"] > 0


def runtime_memory(device: int) -> tuple[int, int] | None:
    """Free and total bytes of the device by the CUDA (or HIP) runtime; None if the query would create a context."""
    if not has_context(device):
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes, total_bytes


@dataclass(frozen=True, slots=True)
class CounterReading:
    """One reading of an accelerator's counters; None if this backend has no such counter."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


# Name -> key in a backend's statistics.
_STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
}
# MPS has no peaks of its own, and its second function also counts what Metal's frameworks hold.
_MPS_FUNCTIONS = {"allocated_bytes": "current_allocated_memory", "reserved_bytes": "driver_allocated_memory"}
_MPS_RESERVED = Gap(
    "mps reserved",
    "reserved memory on mps is what the Metal driver has given this process; it includes what Metal's own frameworks "
    "hold, not only PyTorch's allocator",
)


class AcceleratorCounters:
    """The counters of an accelerator other than CUDA (mps, xpu or any that `torch.accelerator` knows).

    They come from `torch.accelerator` or the backend's own module. A counter that neither has is None, and named in `gaps`.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._gaps: dict[str, Gap] = {}

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the readings so far could not see."""
        return tuple(self._gaps.values())

    def read(self, index: int = 0) -> CounterReading:
        """Read all counters once; all None, without a gap, while the backend is not initialized."""
        backend: Any = getattr(torch, self.device_type, None)
        is_mps = self.device_type == "mps"
        current = _attempt(torch.accelerator.current_accelerator)
        is_current = current is not None and current.type == self.device_type
        # mps cannot be queried; reading its counters creates at most the Metal device object, no memory pool.
        if not (backend.is_initialized() if hasattr(backend, "is_initialized") else is_current):
            return CounterReading()
        statistics = torch.accelerator.memory_stats if is_current else None
        if not is_mps:
            statistics = getattr(backend, "memory_stats", statistics)
        stats = _attempt(statistics, index) or {}
        found = {name: int(stats[key]) for name, key in _STATISTICS.items() if key in stats}
        for name in _MPS_FUNCTIONS.keys() - found.keys() if is_mps else ():
            value = _attempt(getattr(torch.mps, _MPS_FUNCTIONS[name], None))
            if value is not None:
                found[name] = int(value)
                if name == "reserved_bytes":
                    self._gaps["mps reserved"] = _MPS_RESERVED
        for name in _STATISTICS.keys() - found.keys():
            what = name.removesuffix("_bytes").replace("_", " ")
            hides = " (the sampled one is a lower bound)" if what.startswith("peak") else ""
            text = f"PyTorch {torch.__version__} has no counter of {what} memory on {self.device_type}{hides}"
            self._gaps.setdefault(name, Gap(f"{self.device_type} {what}", text))
        return CounterReading(**found)


def _attempt(read: Callable[..., Any] | None, *arguments: int) -> Any:
    # A backend without a counter may raise any error.
    try:
        return read(*arguments) if read is not None else None
    except Exception:
        return None


# --- the driver -------------------------------------------------------------------------------------------------------

_HIDES = "device-used memory is asked of the GPU runtime instead, so this process and others cannot be distinguished"
_REASONS = {
    "ModuleNotFoundError": "the Python package nvidia-ml-py (module pynvml) is not installed",
    "NVMLError_LibraryNotFound": "NVIDIA's management library (libnvidia-ml) is not on this machine",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded",
    "NVMLError_LibRmVersionMismatch": "NVIDIA's library and kernel driver differ in version (restart the machine)",
    "NVMLError_NoPermission": "the driver denied access to NVML",
    "NVMLError_Uninitialized": "other code in this process shut NVML down",
    "NVMLError_GpuIsLost": "the driver has lost the device",
}
# Errors that mean "not supported here", not "permission denied".
_NOT_THERE = {
    "AttributeError",
    "NVMLError_FunctionNotFound",
    "NVMLError_InvalidArgument",
    "NVMLError_NotFound",
    "NVMLError_NotSupported",
    "NVMLLibraryMismatchError",
}
_NOT_LISTED = "this process is not in the driver's list (in a container it may carry the host's pids)"
_NO_SIZE = "the driver lists this process without a size (WDDM, MIG or missing permission)"
_IMPLAUSIBLE = "the size the driver lists for this process's pid cannot be its own"
_MAX_FAILURES = 3
_LOOKS = 2  # inconsistent sizes may have changed between two calls: retry once before reporting them
_MIG_ENABLED = 1


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One reading of a device; None if it could not be read.

    Neither `used_bytes` nor `total_bytes` includes what driver and firmware reserve (615 MiB of an H200), as CUDA and nvidia-smi
    count. `own_bytes` is this process with its context, `others_bytes` the other processes that the driver lists; the two need
    not add up to `used_bytes`.
    """

    used_bytes: int | None = None
    total_bytes: int | None = None
    own_bytes: int | None = None
    others_bytes: int | None = None


class Nvml:
    """NVML, opened for this process; `open` and `read` never raise.

    After a fork the child's readings are empty and its `close` does nothing: the handles belong to the parent.
    """

    def __init__(self, library: Any | None, gap: Gap | None = None) -> None:
        self._library: Any = library
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._version: tuple[Any, ...] = ()
        self._failures: Counter[int] = Counter()
        self._gaps: dict[Gap, None] = {gap: None} if gap else {}

    @classmethod
    def open(cls) -> Nvml:
        """Load and initialize NVML; if that fails, the result reads the GPU runtime and has a gap."""
        if getattr(torch.version, "hip", None):
            return cls(None, Gap("nvml", f"NVML is NVIDIA's and this PyTorch is built for ROCm: {_HIDES}"))
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # ImportError, NVMLError, OSError from a broken library: all the same to the user
            return cls(None, Gap("nvml", f"NVML is absent: {_reason(error)}; {_HIDES}"))
        return cls(pynvml)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the readings so far could not see."""
        return tuple(self._gaps)

    def close(self) -> None:
        """Release our reference to NVML; other users of pynvml in this process keep theirs."""
        if os.getpid() != self._pid:
            return
        with self._closing:
            library, self._library = self._library, None
        if library is not None:
            try:
                library.nvmlShutdown()
            except Exception as error:
                self._note("nvml", f"NVML was gone before it was closed: {_reason(error)}")

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, device_index: int) -> DeviceReading:
        """Read the device that torch calls `cuda:device_index`; empty while CUDA is not initialized."""
        if os.getpid() != self._pid or not torch.cuda.is_initialized():
            return DeviceReading()
        reading = self._look(device_index)
        if reading is not None:
            return reading
        try:
            memory = runtime_memory(device_index)
        except Exception as error:
            text = f"the GPU runtime does not say what cuda:{device_index} has free: {_reason(error)}"
            self._note("device used", text)
            memory = None
        return DeviceReading(memory[1] - memory[0], memory[1]) if memory is not None else DeviceReading()

    def _look(self, device_index: int) -> DeviceReading | None:
        doing, own, others, why = "finding the device", None, None, None
        memory: Any = None
        used_bytes = 0
        if self._library is None or self._failures[device_index] >= _MAX_FAILURES:
            return None
        try:
            handle = self._handle(device_index)
            if handle is None:
                return None
            doing = "reading memory"
            for _ in range(_LOOKS):
                reserved_bytes = cuda_counters(device_index)["reserved"]
                listed, why = self._processes(handle)
                # The total is read after its parts, so that a process that grows meanwhile does not seem larger than it.
                memory = self._library.nvmlDeviceGetMemoryInfo(handle, *self._version)
                used_bytes = int(memory.used)
                self._failures[device_index] = 0
                if listed is not None:
                    at_least = 1 if has_context(device_index) else listed.setdefault(os.getpid(), 0) or 0
                    at_least = max(at_least, min(reserved_bytes, cuda_counters(device_index)["reserved"]))
                    own, others, why = self._split(listed, at_least, used_bytes)
                if why != _IMPLAUSIBLE:
                    break
        except Exception as error:
            if type(error).__name__ == "NVMLError_Uninitialized":
                # Our reference is gone with all others; releasing it later could take one from the next user.
                self._library = None
            self._failures[device_index] += 1
            self._note("nvml", f"NVML failed while {doing} of cuda:{device_index}: {_reason(error)}; {_HIDES}")
            return None
        if why is not None:
            hides = "this process's part of the device's memory is unknown, and so are the other processes'"
            self._note("own process", f"{why}: {hides}")
        return DeviceReading(used_bytes, int(memory.total) - int(getattr(memory, "reserved", 0)), own, others)

    def _handle(self, device_index: int) -> Any | None:
        if device_index in self._handles:
            return self._handles[device_index]
        self._handles[device_index] = None
        # Indices mean other devices to NVML than to CUDA, which renumbers by CUDA_VISIBLE_DEVICES; ids do not.
        properties = torch.cuda.get_device_properties(device_index)
        uuid = str(getattr(properties, "uuid", "")).lower().removeprefix("gpu-").removeprefix("mig-")
        asked = [("nvmlDeviceGetHandleByUUID", f"{kind}-{uuid}") for kind in ("MIG", "GPU") if uuid]
        if hasattr(properties, "pci_bus_id"):
            domain, bus, slot = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
            asked.append(("nvmlDeviceGetHandleByPciBusId", f"{domain:08X}:{bus:02X}:{slot:02X}.0"))
        found = (self._try(function, name) for function, name in asked)
        handle = next((one for one in found if one is not None), None)
        # A process runs on one MIG slice, but may only know the id of the whole GPU, whose figures would be wrong.
        if handle is not None and not self._try("nvmlDeviceIsMigDeviceHandle", handle):
            mode = self._try("nvmlDeviceGetMigMode", handle)
            if mode and mode[0] == _MIG_ENABLED:
                slots = range(self._try("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
                slices = [self._try("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
                slices = [one for one in slices if one is not None]
                handle = slices[0] if len(slices) == 1 else None
        if handle is None:
            self._note("nvml", f"NVML has no device with the identity of cuda:{device_index}: {_HIDES}")
            return None
        version = getattr(self._library, "nvmlMemory_v2", None)
        if version and self._try("nvmlDeviceGetMemoryInfo", handle, version) is not None:
            self._version = (version,)  # drivers before 510 have the first only, which counts the driver's own as used
        self._handles[device_index] = handle
        return handle

    def _processes(self, handle: Any) -> tuple[dict[int, int | None] | None, str | None]:
        """Process id -> bytes (None if the driver does not say), or why there is no list."""
        try:
            lists = [self._library.nvmlDeviceGetComputeRunningProcesses(handle)]
        except Exception as error:
            return None, f"the driver does not list processes ({_reason(error)})"
        for function in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            lists.append(self._try(function, handle) or ())
        together: dict[int, int | None] = {}
        for processes in lists:
            # One process can have several entries in a list (one for each MIG slice); one without a size hides its sum.
            sums: dict[int, int | None] = {}
            for process in processes:
                size, before = process.usedGpuMemory, sums.get(process.pid, 0)
                sums[process.pid] = None if size is None or before is None else before + int(size)
            # A process that both computes and draws is in two lists with the same bytes: the larger counts, not the sum.
            for pid, count in sums.items():
                known = together.get(pid)
                together[pid] = count if known is None else max(known, count or 0)
        return together, None

    def _split(
        self, listed: dict[int, int | None], at_least: int, used_bytes: int
    ) -> tuple[int | None, int | None, str | None]:
        """Own and others' bytes, and why they are unknown, if they are."""
        own = listed.get(os.getpid())
        if own is None:
            return None, None, _NO_SIZE if os.getpid() in listed else _NOT_LISTED
        # Our pid with less than PyTorch holds: another process's pid or a driver that lost count, as in containers.
        if not at_least <= own <= used_bytes:
            return None, None, _IMPLAUSIBLE
        others = [size for pid, size in listed.items() if pid != os.getpid()]
        if None in others:
            self._note("other processes", "the driver does not say how much memory some other processes hold")
            return own, None, None
        return own, sum(size or 0 for size in others), None

    def _try(self, function: str, *arguments: Any) -> Any | None:
        try:
            return getattr(self._library, function)(*arguments)
        except Exception as error:
            if type(error).__name__ not in _NOT_THERE:
                self._note("nvml", f"NVML's {function} failed: {_reason(error)}")
            return None

    def _note(self, name: str, text: str) -> None:
        self._gaps.setdefault(Gap(name, text))


def _reason(error: Exception) -> str:
    name = type(error).__name__
    if name in _REASONS:
        return _REASONS[name]
    try:
        return f"{name}: {error}"[:200]
    except Exception:  # nvmlErrorString is itself a call into a library that may be gone
        return name
