"""Code in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def python(*command: object, timeout: float = 280, **environment: str) -> str:
    """What Python prints, with these arguments, in a process, a folder and on a device of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "FAKEGPU_SHM": f"{folder}/gpu", **environment}
        arguments = [sys.executable, *map(str, command)]
        done = subprocess.run(arguments, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout
