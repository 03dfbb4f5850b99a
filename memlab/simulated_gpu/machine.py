"""The simulated machine: its devices, and the file that describes it to the library and counts what its processes hold.

The file begins with a header, which is written here; the rest is a slot per process, which the library writes. All numbers
are little-endian:

    0      magic "MEMLSIM1", u32 devices, u32 zero, u64 workspace of a convolution
    64     8 devices of 128 bytes: name[64], u64 total, u64 context, u32 major, minor, multiprocessors, 9 zeros
    4096   256 processes of 160 bytes
"""

from __future__ import annotations

import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from memlab.errors import SimulatedGpuError
from memlab.units import MiB, format_bytes

MAGIC = b"MEMLSIM1"
SIZE = 4096 + 256 * 160
MOST_DEVICES = 8
_HEAD = struct.Struct("<8sIIQ40x")
_DEVICE = struct.Struct("<64sQQIII36x")
LONGEST_NAME = 63
_SMALLEST, _LARGEST = 32 * MiB, 1 << 40
"""The library gives each device an address range of 1 TiB."""
_OLDEST, _NEWEST = (7, 5), (12, 1)
"""PyTorch's CUDA 13 builds have kernels for these. The library takes a device's other properties from the nearest
capability at or below its own that it knows."""


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """One GPU: `total_bytes` is what PyTorch sees of its memory, `context_bytes` what each process takes of that at first use."""

    name: str
    total_bytes: int
    context_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name.encode()) > LONGEST_NAME or not self.name.isprintable():
            raise SimulatedGpuError(f"a device needs a name of at most {LONGEST_NAME} bytes, got {self.name!r:.100}.")
        if not _SMALLEST <= self.total_bytes <= _LARGEST:
            raise SimulatedGpuError(
                f"a simulated GPU has {format_bytes(_SMALLEST)} to {format_bytes(_LARGEST)} of memory, "
                f"got {format_bytes(self.total_bytes)}."
            )
        if not 0 <= self.context_bytes < self.total_bytes:
            raise SimulatedGpuError(
                f"the context must be smaller than the {format_bytes(self.total_bytes)} of {self.name}, "
                f"got {format_bytes(self.context_bytes)}."
            )
        if not _OLDEST <= self.compute_capability <= _NEWEST:
            ends = [".".join(map(str, end)) for end in (_OLDEST, _NEWEST)]
            given = ".".join(map(str, self.compute_capability))
            raise SimulatedGpuError(
                f"PyTorch's CUDA 13 builds have kernels for capability {' to '.join(ends)}, and {self.name} has {given}."
            )
        if not 1 <= self.multiprocessors <= 4096:
            raise SimulatedGpuError(f"multiprocessors must be 1 to 4096, got {self.multiprocessors}.")

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return f"{self.name}, {format_bytes(self.total_bytes)}, capability {major}.{minor}"


def check_count(devices: int) -> None:
    """Raises SimulatedGpuError if a machine cannot have so many devices."""
    if not 1 <= devices <= MOST_DEVICES:
        raise SimulatedGpuError(f"a simulated machine has 1 to {MOST_DEVICES} devices, got {devices}.")


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of a simulated machine. `convolution_workspace_bytes` is what each cuDNN convolution asks for."""

    devices: tuple[SimulatedDevice, ...]
    convolution_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        check_count(len(self.devices))
        if not 0 <= self.convolution_workspace_bytes <= _LARGEST:
            raise SimulatedGpuError(
                f"a workspace has at most {format_bytes(_LARGEST)}, got {self.convolution_workspace_bytes}."
            )

    def __str__(self) -> str:
        each = {str(device): self.devices.count(device) for device in self.devices}
        return "; ".join(f"{count} × {text}" if count > 1 else text for text, count in each.items())

    def to_bytes(self) -> bytes:
        """The file of this machine before any process uses it."""
        head = _HEAD.pack(MAGIC, len(self.devices), 0, self.convolution_workspace_bytes)
        devices = b"".join(
            _DEVICE.pack(
                one.name.encode(), one.total_bytes, one.context_bytes, *one.compute_capability, one.multiprocessors
            )
            for one in self.devices
        )
        return (head + devices).ljust(SIZE, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Machine:
        """The machine of a file's bytes; SimulatedGpuError if they are not of one."""
        if len(data) < SIZE or not data.startswith(MAGIC):
            raise SimulatedGpuError(
                f"{where!r} is not the file of a simulated machine: give another name, or remove it."
            )
        _, count, _, workspace = _HEAD.unpack_from(data)
        if count > MOST_DEVICES:
            raise SimulatedGpuError(f"{where!r} is damaged: it has {count} devices. Remove it.")
        devices = [_DEVICE.unpack_from(data, _HEAD.size + index * _DEVICE.size) for index in range(count)]
        return cls(
            tuple(
                SimulatedDevice(
                    name.rstrip(b"\0").decode("utf-8", "replace"), total, context, (major, minor), processors
                )
                for name, total, context, major, minor, processors in devices
            ),
            workspace,
        )


def read(path: Path) -> Machine:
    """The machine that a file describes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            raise SimulatedGpuError(f"{str(path)!r} is no file, and a simulated machine is one: give another name.")
        with path.open("rb") as file:
            return Machine.from_bytes(file.read(SIZE), str(path))
    except OSError as error:
        raise SimulatedGpuError(f"cannot read {str(path)!r}: {error.strerror or error}.") from None
