"""What the driver says about a device through NVML: memory used in all, by this process, by other processes.

Whatever goes wrong ends as a Gap, never as an error. NVML is not asked before the user's code has initialised CUDA, and
nothing here initialises it. *Used* is NVML's first memory call, in which used + free = total: it includes what driver
and firmware set aside (`driver_bytes`, where the second call tells it apart). It keeps no history and draws nothing.

After a fork the child's readings are empty and its `close` does nothing: NVML's handles belong to the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from memlab.probes.counters import cuda_counters, has_context, runtime_memory
from memlab.trace import Gap

_HIDES = (
    "device-used memory is asked of the GPU runtime instead, and what this process and others hold cannot be told apart"
)
_REASONS = {
    "ModuleNotFoundError": "the Python package nvidia-ml-py (module pynvml) is not installed",
    "NVMLError_LibraryNotFound": "NVIDIA's management library (libnvidia-ml) is not on this machine",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded",
    "NVMLError_LibRmVersionMismatch": "NVIDIA's library and kernel driver differ in version (restart the machine)",
    "NVMLError_NoPermission": "the driver denied access to NVML",
    "NVMLError_Uninitialized": "other code in this process shut NVML down",
    "NVMLError_GpuIsLost": "the driver has lost the device",
}
# Answers that mean "there is nothing of that sort here", not "you may not know".
_NOT_THERE = {
    "AttributeError",
    "NVMLError_FunctionNotFound",
    "NVMLError_InvalidArgument",
    "NVMLError_NotFound",
    "NVMLError_NotSupported",
    "NVMLLibraryMismatchError",
}
_OWN_HIDES = "this process's part of the device's memory is unknown, and so are the other processes'"
_IMPLAUSIBLE = "the size the driver lists for this process's pid cannot be its own"
_MAX_FAILURES = 3
_LOOKS = 2  # sizes that do not fit together may have changed between two calls: once more before saying so
_MIG_ENABLED = 1

Sizes = dict[int, int | None]
"""Process id -> bytes, None where the driver does not say."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One look at a device; None is what could not be seen.

    `own_bytes` is this process (context included), `others_bytes` the other processes that the driver lists; with
    `driver_bytes` they need not add up to `used_bytes`.
    """

    used_bytes: int | None = None
    total_bytes: int | None = None
    own_bytes: int | None = None
    others_bytes: int | None = None
    own_known: bool = False
    driver_bytes: int | None = None


_NOTHING = DeviceReading()


class Nvml:
    """NVML opened once for this process; `open` and `read` never raise, `gaps` says what they could not see."""

    def __init__(self, library: Any | None, gap: Gap | None = None) -> None:
        self._library: Any = library
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._driver_bytes: dict[int, int | None] = {}
        self._failures: dict[int, int] = {}
        self._gaps: dict[Gap, None] = {gap: None} if gap else {}

    @classmethod
    def open(cls) -> Nvml:
        """Load and initialise NVML; where that fails the result reads the GPU runtime's counters and names the gap."""
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
        """What the readings so far could not see, each once."""
        return tuple(self._gaps)

    def read(self, device_index: int) -> DeviceReading:
        """Look at the device that torch calls `cuda:device_index`; empty while CUDA is not initialised."""
        if os.getpid() != self._pid or not torch.cuda.is_initialized():
            return _NOTHING
        handle = self._handle(device_index)
        reading = self._look(device_index, handle) if handle is not None else None
        return reading if reading is not None else self._runtime_reading(device_index)

    def close(self) -> None:
        """Give back our reference to NVML, once; other users of pynvml in this process keep theirs."""
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

    def _handle(self, device_index: int) -> Any | None:
        if self._library is None or self._failures.get(device_index, 0) >= _MAX_FAILURES:
            return None
        if device_index not in self._handles:
            self._handles[device_index] = self._resolve(device_index)
        return self._handles[device_index]

    def _resolve(self, device_index: int) -> Any | None:
        try:
            # Indices mean other devices to NVML than to CUDA, which renumbers by CUDA_VISIBLE_DEVICES; ids do not.
            properties = torch.cuda.get_device_properties(device_index)
            handle = self._by_identity(properties)
            handle = self._own_slice(handle) if handle is not None else None
        except Exception as error:
            self._failed(device_index, "finding the device", error)
            return None
        if handle is None:
            self._note("nvml", f"NVML has no device with the identity of cuda:{device_index}: {_HIDES}")
            return None
        self._driver_bytes[device_index] = self._reserved_by_driver(handle)
        return handle

    def _by_identity(self, properties: Any) -> Any | None:
        uuid = str(getattr(properties, "uuid", "")).lower().removeprefix("gpu-").removeprefix("mig-")
        names = [f"MIG-{uuid}", f"GPU-{uuid}"] if uuid else []
        for name in names:
            handle = self._try("nvmlDeviceGetHandleByUUID", name)
            if handle is not None:
                return handle
        if not hasattr(properties, "pci_bus_id"):
            return None
        domain, bus, slot = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
        return self._try("nvmlDeviceGetHandleByPciBusId", f"{domain:08X}:{bus:02X}:{slot:02X}.0")

    def _own_slice(self, handle: Any) -> Any | None:
        # A process runs on one MIG slice, but the card's id may be all it knows; the card's numbers would be wrong.
        if self._try("nvmlDeviceIsMigDeviceHandle", handle):
            return handle
        mode = self._try("nvmlDeviceGetMigMode", handle)
        if not mode or mode[0] != _MIG_ENABLED:
            return handle
        slots = range(self._try("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
        slices = [self._try("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in slots]
        slices = [found for found in slices if found is not None]
        return slices[0] if len(slices) == 1 else None

    def _reserved_by_driver(self, handle: Any) -> int | None:
        version = getattr(self._library, "nvmlMemory_v2", None)
        memory = self._try("nvmlDeviceGetMemoryInfo", handle, version) if version else None
        return int(memory.reserved) if memory is not None else None

    def _look(self, device_index: int, handle: Any, looks: int = _LOOKS) -> DeviceReading | None:
        reserved_bytes = cuda_counters(device_index)["reserved"]
        listed, why = self._processes(handle)
        # The total is read after its parts, so that a process that grows meanwhile does not seem larger than it.
        memory = self._memory(device_index, handle)
        if memory is None:
            return None
        own_bytes = others_bytes = None
        if listed is not None:
            at_least = 1 if has_context(device_index) else listed.setdefault(os.getpid(), 0) or 0
            at_least = max(at_least, min(reserved_bytes, cuda_counters(device_index)["reserved"]))
            own_bytes, others_bytes, why = self._split(listed, at_least, int(memory.used))
        if why == _IMPLAUSIBLE and looks > 1:
            return self._look(device_index, handle, looks - 1)
        if why is not None:
            self._note("own process", f"{why}: {_OWN_HIDES}")
        driver_bytes, known = self._driver_bytes.get(device_index), own_bytes is not None
        return DeviceReading(int(memory.used), int(memory.total), own_bytes, others_bytes, known, driver_bytes)

    def _memory(self, device_index: int, handle: Any) -> Any | None:
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        except Exception as error:
            self._failed(device_index, "reading memory", error)
            return None
        self._failures[device_index] = 0
        return memory

    def _split(self, listed: Sizes, at_least: int, used_bytes: int) -> tuple[int | None, int | None, str | None]:
        """Own and others' bytes, and why they are unknown, if they are."""
        if os.getpid() not in listed:
            return None, None, "this process is not in the driver's list (in a container it may carry the host's pids)"
        own_bytes = listed[os.getpid()]
        if own_bytes is None:
            return None, None, "the driver lists this process without a size (WDDM, MIG or missing permission)"
        # Our pid with less than PyTorch holds: a stranger's number or a driver that lost count, as in containers.
        if not at_least <= own_bytes <= used_bytes:
            return None, None, _IMPLAUSIBLE
        others = [size for pid, size in listed.items() if pid != os.getpid()]
        known = [size for size in others if size is not None]
        if len(known) == len(others):
            return own_bytes, sum(known), None
        self._note("other processes", "the driver does not say how much memory some other processes hold")
        return own_bytes, None, None

    def _processes(self, handle: Any) -> tuple[Sizes | None, str | None]:
        try:
            return self._listed(handle), None
        except Exception as error:
            return None, f"the driver does not list processes ({_reason(error)})"

    def _listed(self, handle: Any) -> Sizes:
        lists = [_by_pid(self._library.nvmlDeviceGetComputeRunningProcesses(handle))]
        for function in ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"):
            lists.append(_by_pid(self._try(function, handle) or ()))
        # A process that both computes and draws is in two lists with the same bytes: the larger counts, not the sum.
        together: Sizes = {}
        for pid, count in (entry for listed in lists for entry in listed.items()):
            before = together.get(pid)
            together[pid] = count if before is None else max(before, count or 0)
        return together

    def _runtime_reading(self, device_index: int) -> DeviceReading:
        try:
            memory = runtime_memory(device_index)
        except Exception as error:
            text = f"the GPU runtime does not say what cuda:{device_index} has free: {_reason(error)}"
            self._note("device used", text)
            return _NOTHING
        if memory is None:
            return _NOTHING
        free_bytes, total_bytes = memory
        return DeviceReading(total_bytes - free_bytes, total_bytes)

    def _try(self, function: str, *arguments: Any) -> Any | None:
        try:
            return getattr(self._library, function)(*arguments)
        except Exception as error:
            if type(error).__name__ not in _NOT_THERE:
                self._note("nvml", f"NVML's {function} failed: {_reason(error)}")
            return None

    def _failed(self, device_index: int, doing: str, error: Exception) -> None:
        if type(error).__name__ == "NVMLError_Uninitialized":
            # Our reference is gone with everybody's; giving it back later could take one from whoever opens NVML again.
            self._library = None
        self._failures[device_index] = self._failures.get(device_index, 0) + 1
        self._note("nvml", f"NVML failed while {doing} of cuda:{device_index}: {_reason(error)}; {_HIDES}")

    def _note(self, name: str, text: str) -> None:
        self._gaps.setdefault(Gap(name, text))


def _by_pid(processes: Iterable[Any]) -> Sizes:
    # One process can have several entries in a list (one for each MIG slice); one without a size hides its sum.
    found: Sizes = {}
    for process in processes:
        size = process.usedGpuMemory
        before = found.get(process.pid, 0)
        found[process.pid] = None if size is None or before is None else before + int(size)
    return found


def _reason(error: Exception) -> str:
    known = _REASONS.get(type(error).__name__)
    if known:
        return known
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except Exception:  # nvmlErrorString is itself a call into a library that may be gone
        return type(error).__name__
