"""Host memory: what this process has resident, and what the machine or its container has left.

In a container (or a JupyterHub server) the limit that kills is the control group's, which the machine's own numbers do
not show; the tightest counts. It does not tell who holds the memory, and sees neither swap nor a limit of address space
(`ulimit -v`).
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import psutil

from memlab.units import MiB, format_bytes, format_seconds

MACHINE = "machine"
_LOW_SHARE = 0.05
_LOW_BYTES = 512 * MiB
# A container of 1 GiB would otherwise be warned of from its first import on.
_LOW_SHARE_AT_MOST = 0.25
_SOON_S = 10.0


@dataclass(frozen=True, slots=True)
class HostReading:
    """One look at the host. `limit_source` says whose limit `total_bytes` is: "machine", "cgroup v1" or "cgroup v2"."""

    rss_bytes: int
    available_bytes: int
    total_bytes: int
    limit_source: str = MACHINE

    @property
    def used_bytes(self) -> int:
        """What is in use of the total, by everybody under the same limit."""
        return self.total_bytes - self.available_bytes


class HostMemory:
    """Reads the host's memory; the files of the control groups are looked up once. `root` is for tests."""

    __slots__ = ("_limits", "_pid", "_process")

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self._limits = _limits(Path(root))
        self._pid = -1
        self._process: psutil.Process | None = None

    def read(self) -> HostReading:
        """What is resident, left and the total now."""
        machine = psutil.virtual_memory()
        tightest = HostReading(self._rss(), machine.available, machine.total)
        for limit in self._limits:
            seen = limit.read()
            if seen is not None and seen[0] < tightest.available_bytes:
                tightest = HostReading(tightest.rss_bytes, *seen, limit.source)
        return tightest

    def _rss(self) -> int:
        if self._process is None or self._pid != os.getpid():  # after a fork the old handle would read the parent
            self._process, self._pid = psutil.Process(), os.getpid()
        return self._process.memory_info().rss


@dataclass(frozen=True, slots=True)
class _Limit:
    """The files of one control group with a memory limit."""

    source: str
    folder: Path
    limit_file: str
    usage_file: str
    cache_key: str

    def read(self) -> tuple[int, int] | None:
        """Available and total bytes, None where there is no limit or it cannot be read (any more)."""
        try:
            total_bytes = int((self.folder / self.limit_file).read_text())
            used_bytes = int((self.folder / self.usage_file).read_text())
        except (OSError, ValueError):  # ValueError: "max", no limit
            return None
        # File cache that the kernel drops before it kills; memory.current counts it.
        available_bytes = total_bytes - max(used_bytes - self._cache_bytes(), 0)
        return max(available_bytes, 0), total_bytes

    def _cache_bytes(self) -> int:
        try:
            lines = (self.folder / "memory.stat").read_text().splitlines()
            return next((int(line.split()[1]) for line in lines if line.split()[:1] == [self.cache_key]), 0)
        except (OSError, ValueError, IndexError):
            return 0


def _limits(root: Path) -> tuple[_Limit, ...]:
    """The control groups above this process that have a limit; a limit of any ancestor binds."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    found = []
    for entry in entries:
        _, controllers, path = [*entry.split(":", 2), "", ""][:3]
        if controllers == "":
            files = ("memory.max", "memory.current", "inactive_file")
            found += [_Limit("cgroup v2", folder, *files) for folder in _upwards(root / "sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += [_Limit("cgroup v1", folder, *files) for folder in _upwards(root / "sys/fs/cgroup/memory", path)]
    # Version 1 writes "no limit" as a huge number.
    machine_bytes = psutil.virtual_memory().total
    return tuple(limit for limit in found if (seen := limit.read()) is not None and seen[1] < machine_bytes)


def _upwards(mount: Path, path: str) -> list[Path]:
    # In a container the path may be the host's and not exist here; then the mount's own root is the container's group.
    parts = [part for part in path.split("/") if part not in ("", "..", ".")]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


class Growth:
    """How fast available memory shrinks, in bytes per second, over the last two seconds of readings."""

    __slots__ = ("_readings", "_window_s")

    def __init__(self, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, int]] = deque()

    def update(self, time_s: float, available_bytes: int) -> float:
        """Add a reading and say the rate; 0.0 until there are readings a quarter of the window apart."""
        self._readings.append((time_s, available_bytes))
        while time_s - self._readings[0][0] > self._window_s:
            self._readings.popleft()
        first_s, first_bytes = self._readings[0]
        if time_s - first_s < self._window_s / 4:
            return 0.0
        return (first_bytes - available_bytes) / (time_s - first_s)


def low_memory(reading: HostReading, growth_bytes_per_s: float = 0.0) -> str | None:
    """One line of warning when host memory is about to run out, else None.

    That is below the larger of 5 % and 512 MiB (never more than a quarter of the total), or gone within ten seconds at
    the rate at which it shrinks now.
    """
    total_bytes, available_bytes = reading.total_bytes, reading.available_bytes
    low_bytes = min(max(_LOW_SHARE * total_bytes, _LOW_BYTES), _LOW_SHARE_AT_MOST * total_bytes)
    left_s = available_bytes / growth_bytes_per_s if growth_bytes_per_s > 0 else float("inf")
    if available_bytes >= low_bytes and left_s > _SOON_S:
        return None
    whose = "" if reading.limit_source == MACHINE else f" that the {reading.limit_source} limit allows"
    when = f", gone in about {format_seconds(left_s)} at this rate" if left_s <= _SOON_S else ""
    left = f"{format_bytes(available_bytes)} of {format_bytes(total_bytes)}{whose}"
    return f"Host memory is running out: {left} left{when}. The system may kill this kernel without a message."
