"""Simulated machines for tests: the environment of a process on one of its own.

python tests/simulated_machines.py FILE     # then: memlab simulate --machine FILE -- python -m pytest -m simulated
"""

from __future__ import annotations

import sys
from pathlib import Path

from memlab.simulated_gpu.machine import Machine, SimulatedDevice
from memlab.units import MiB

MULTIPROCESSORS = {"7.5": 40, "8.0": 108, "8.6": 82, "8.9": 128, "9.0": 132, "10.0": 148, "12.0": 170}
NAME = "sm_{} (simulated)"


def machine_at(
    path: Path,
    total_mb: int = 8192,
    capability: str = "8.0",
    context_mb: int | None = None,
    devices: int = 1,
    convolution_workspace_mb: int = 0,
) -> dict[str, str]:
    """The environment of processes that share this machine, whose file is made if it is not there."""
    major, minor = map(int, capability.split("."))
    context = min(500, total_mb // 8) if context_mb is None else context_mb
    name = NAME.format(f"{major}{minor}")
    device = SimulatedDevice(name, total_mb * MiB, context * MiB, (major, minor), MULTIPROCESSORS[capability])
    machine = Machine((device,) * devices, convolution_workspace_bytes=convolution_workspace_mb * MiB)
    if not path.exists():
        path.write_bytes(machine.to_bytes())
    return {"MEMLAB_SIMULATED_GPU": str(path)}


if __name__ == "__main__":
    machine_at(Path(sys.argv[1]))
