"""Code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulated_machines import machine_at

TESTS = Path(__file__).resolve().parent


def python(*command: object, timeout: float = 280, gpu: Mapping[str, Any] | None = None, **environment: str) -> str:
    """What Python prints, with these arguments, in a process, a folder and on a machine of its own.

    `gpu` is how that machine differs, as in `machine_at`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, **machine_at(Path(folder, "gpu"), **(gpu or {})), **environment}
        arguments = [sys.executable, *map(str, command)]
        done = subprocess.run(arguments, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout
