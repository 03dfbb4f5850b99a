"""Host memory: the resident memory of this process, and what the machine or its container has left.

In a container (or on JupyterHub) the effective limit is that of a control group; the tightest counts. Swap and limits of the
address space (`ulimit -v`) are not seen.
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
# Otherwise a container of 1 GiB would get a warning from its first import on.
_LOW_SHARE_AT_MOST = 0.25
_SOON_S, _WINDOW_S = 10.0, 2.0


@dataclass(frozen=True, slots=True)
class HostReading:
    """One reading; `limit_source` says whose limit `total_bytes` is: "machine", "cgroup v1" or "cgroup v2"."""

    rss_bytes: int
    available_bytes: int
    total_bytes: int
    limit_source: str = MACHINE

    @property
    def used_bytes(self) -> int:
        """The used part of the total, by all processes under the same limit."""
        return self.total_bytes - self.available_bytes


# The files of a control group: its limit, what is used, and the name of the file cache in its statistics.
_FILES = {
    "cgroup v2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


_KILLS = {"cgroup v2": "memory.events", "cgroup v1": "memory.oom_control"}


class HostMemory:
    """Reads the host's memory; the files of the control groups are looked up once. `root` is for tests."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        # Version 1 writes "no limit" as a huge number.
        machine_bytes, groups = psutil.virtual_memory().total, control_groups(Path(root))
        self._limits = [one for one in groups if (seen := _read_limit(*one)) is not None and seen[1] < machine_bytes]
        self._pid = -1
        self._process: psutil.Process | None = None

    def read(self) -> HostReading:
        """The resident, available and total bytes now."""
        if self._process is None or self._pid != os.getpid():  # after a fork the old handle would read the parent
            self._process, self._pid = psutil.Process(), os.getpid()
        machine = psutil.virtual_memory()
        tightest = HostReading(self._process.memory_info().rss, machine.available, machine.total)
        for source, folder in self._limits:
            seen = _read_limit(source, folder)
            if seen is not None and seen[0] < tightest.available_bytes:
                tightest = HostReading(tightest.rss_bytes, *seen, source)
        return tightest


def _read_limit(source: str, folder: Path) -> tuple[int, int] | None:
    """Available and total bytes of a control group; None if there is no limit or it cannot be read."""
    limit_file, usage_file, cache = _FILES[source]
    try:
        total_bytes = int((folder / limit_file).read_text())
        used_bytes = int((folder / usage_file).read_text())
    except (OSError, ValueError):  # ValueError: "max", no limit
        return None
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        cache_bytes = next((int(line.split()[1]) for line in lines if line.split()[:1] == [cache]), 0)
    except (OSError, ValueError, IndexError):
        cache_bytes = 0
    # File cache that the kernel drops before it kills; memory.current counts it.
    return max(total_bytes - max(used_bytes - cache_bytes, 0), 0), total_bytes


def control_groups(root: Path) -> list[tuple[str, Path]]:
    """The control groups above this process; a limit of any ancestor binds."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for entry in entries:
        _, controllers, path = [*entry.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        source, mount = ("cgroup v1", "sys/fs/cgroup/memory") if controllers else ("cgroup v2", "sys/fs/cgroup")
        # In a container the path may be the host's and not exist here; then the mount's root is the container's group.
        parts = [part for part in path.split("/") if part not in ("", "..", ".")]
        found += [(source, (root / mount).joinpath(*parts[:depth])) for depth in range(len(parts), -1, -1)]
    return found


def oom_kills(root: str | os.PathLike[str] = "/") -> int | None:
    """How many processes the kernel has killed for memory in the control group of this one; None if that cannot be read."""
    for source, folder in control_groups(Path(root)):
        try:
            lines = (folder / _KILLS[source]).read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.split()[:1] == ["oom_kill"])
        except (OSError, ValueError, IndexError, StopIteration):
            continue
    return None


class HostGrowth:
    """How fast available memory shrinks, in bytes per second, over the last two seconds of readings."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def update(self, time_s: float, available_bytes: int) -> float:
        """Add a reading and return the rate; 0.0 until there are readings a quarter of the window apart."""
        self._readings.append((time_s, available_bytes))
        while time_s - self._readings[0][0] > _WINDOW_S:
            self._readings.popleft()
        first_s, first_bytes = self._readings[0]
        if time_s - first_s < _WINDOW_S / 4:
            return 0.0
        return (first_bytes - available_bytes) / (time_s - first_s)


def low_memory(reading: HostReading, growth_bytes_per_s: float = 0.0) -> str | None:
    """One line of warning when host memory is about to run out, else None.

    That is below the larger of 5 % and 512 MiB (at most a quarter of the total), or gone in ten seconds at the present rate.
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
