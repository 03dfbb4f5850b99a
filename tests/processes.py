"""Code in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from simulated_machines import machine_at

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent


def python(*command: object, timeout: float = 280, gpu: Mapping[str, Any] | None = None, **environment: str) -> str:
    """What Python prints, with these arguments, in a process, a folder and on a machine of its own.

    `gpu` is how that machine differs, as in `machine_at`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, **machine_at(Path(folder, "gpu"), **(gpu or {})), **environment}
        arguments = [sys.executable, *map(str, command)]
        done = subprocess.run(arguments, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert not done.returncode or _ended_in_autograd(done), done.stderr[-3000:]
    return done.stdout


def _ended_in_autograd(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether all was printed, and PyTorch's autograd thread met the end of Python while it still freed the last graph.

    Its destructor asks for the GIL, CPython (up to 3.13) ends the thread there, and C++ the process (PyTorch 2.12.1). A script
    that ends right after a backward may do so, most of all where kernels take no time and other processes are busy.
    """
    return done.returncode == -signal.SIGABRT and done.stderr.endswith("terminate called without an active exception\n")


def started(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Python with these words and this memlab, started in a folder; its streams are pipes."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | environment
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=variables, text=True, **pipes)


def ran(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    """The exit status of such a process, and what it wrote to stdout and stderr."""
    process = started(folder, *words, **environment)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def memlab_ran(folder: Path, *words: str, **environment: str) -> tuple[int, str, str]:
    return ran(folder, "-m", "memlab", *words, **environment)


def read_until(stream: IO[str] | None, text: str) -> None:
    """Read the lines of a process up to the one with this text, or to its end."""
    assert stream is not None
    while (line := stream.readline()) and text not in line:
        pass


def pytest_session(folder: Path, output: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run pytest in a folder, in a process of its own, which ends with its status; what it prints goes to a file."""
    os.chdir(folder)
    os.environ.update(environment)
    sys.dont_write_bytecode = True  # a file of the same size may follow within the second
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)
    sys.exit(pytest.main([*arguments]))
