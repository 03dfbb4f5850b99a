"""ChildProcess processes that use PyTorch while a run is measured: their tensors are not in its figures.

Workers of data loaders and compilers, the agent of torchrun, and processes without PyTorch do not count.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from memlab.trace.trace import CHILD_PROCESSES, WORK_IN_CHILDREN, Gap
from memlab.units import MiB, format_bytes, format_seconds

EVERY_NS = 500_000_000
MOST_TIME = 0.01
"""The share of a run that looking may take."""
_HELPERS = ("pt_data_worker", "pt_data_pin", "pt_elastic")
"""Names that PyTorch gives to processes of its own."""
_COMPILER = "compile_worker"
_LEAST_RSS_BYTES = 50 * MiB
"""Less than any process that has imported PyTorch."""
_SHARE_OF_CPU = 0.25
_GROWN = 1.05


@dataclass(slots=True)
class ChildProcess:
    """A child process: seconds of CPU time, and bytes of memory that it shares with no other process, the highest seen."""

    cpu_s: float = 0.0
    own_bytes: int = 0
    resident_bytes: int = 0


class ChildProcesses:
    """Looks at the descendants of this process from time to time; on the sampler's thread."""

    def __init__(self) -> None:
        self._begin_s, self._spent_s, self._next_ns = time.monotonic(), 0.0, EVERY_NS
        self._own_cpu_s = time.process_time()
        self._pid = os.getpid()
        self._seen: dict[tuple[int, float], ChildProcess] = {}

    def tick(self, now_ns: int) -> None:
        """Look, if it is time to; nothing that goes wrong here matters to the run."""
        begun_s = time.monotonic()
        if now_ns < self._next_ns or self._spent_s > MOST_TIME * (begun_s - self._begin_s):
            return
        self._next_ns = now_ns + EVERY_NS
        with contextlib.suppress(psutil.Error, OSError):
            # On Linux it is cheap to know whether there are any, and the list of all processes is not read for it.
            lists = list(Path("/proc/self/task").glob("*/children"))
            if not lists or any(path.read_bytes().strip() for path in lists):
                self._look(psutil.Process(self._pid).children(recursive=True))
        self._spent_s += time.monotonic() - begun_s

    def _look(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                if _uses_torch(process):
                    child = self._seen.setdefault((process.pid, process.create_time()), ChildProcess())
                    times = process.cpu_times()
                    child.cpu_s = times.user + times.system
                    resident_bytes = process.memory_info().rss
                    # Else it is not worth 10 ms of the kernel's time.
                    if resident_bytes > _GROWN * child.resident_bytes:
                        child.resident_bytes = resident_bytes
                        child.own_bytes = max(child.own_bytes, int(process.memory_full_info().uss))

    def gap(self, risen_bytes: int) -> Gap | None:
        """What is not in the figures of a run whose *allocated* rose by so much: None if children did little.

        It is `WORK_IN_CHILDREN` if they used more CPU time than this process, and one more memory than the run allocated.
        """
        children, own_cpu_s = list(self._seen.values()), time.process_time() - self._own_cpu_s
        cpu_s = sum(one.cpu_s for one in children)
        if not children or cpu_s < _SHARE_OF_CPU * own_cpu_s:
            return None
        largest = max(one.own_bytes for one in children)
        count, they = ("1 child process", "it") if len(children) == 1 else (f"{len(children)} child processes", "they")
        # They may have gone on since they were last looked at, which is rarely.
        cost = f"at least {format_seconds(cpu_s)} of CPU time, and {format_bytes(largest)} of memory in the largest"
        text = f"{count} with PyTorch ran ({cost}), and what {they} allocated is not in these figures"
        is_all = cpu_s >= own_cpu_s and largest > risen_bytes
        return Gap(WORK_IN_CHILDREN if is_all else CHILD_PROCESSES, text)


def _uses_torch(process: psutil.Process) -> bool:
    """Whether it has loaded PyTorch, and is no helper of PyTorch's own."""
    if process.memory_info().rss < _LEAST_RSS_BYTES or process.name() in _HELPERS:
        return False
    if any(_COMPILER in word for word in process.cmdline()):
        return False
    maps = Path(f"/proc/{process.pid}/maps")
    if maps.exists():
        return b"libtorch" in maps.read_bytes()
    return "python" in process.name().lower()  # elsewhere the libraries of another process cannot be read
