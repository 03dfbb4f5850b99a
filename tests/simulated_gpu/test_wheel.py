"""The wheel carries the compiled library, so that an installation needs no compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "memlab/simulated_gpu/lib/libmemlab_simulated_gpu.so"

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64") or not shutil.which("gcc"),
    reason="the library is in the wheel for Linux on x86-64, and compiling it needs gcc",
)


def build_wheel(folder: Path, **variables: str) -> Path:
    """Build the wheel of this tree, as pip would."""
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(folder)]
    env = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr[-3000:]
    return folder / done.stdout.split()[-1]


def test_an_installed_wheel_needs_no_compiler(tmp_path):
    wheel = build_wheel(tmp_path)
    needed = re.findall(r"\bGLIBC_2\.(\d+)", zipfile.ZipFile(wheel).read(LIBRARY).decode("latin-1"))
    assert wheel.name.endswith(f"-py3-none-manylinux_2_{max(map(int, needed))}_x86_64.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = """
from memlab.simulated_gpu import cuda_symbols, library
library.compile_into = None
print(library.__file__)
print(library.folder_for(cuda_symbols.listed(library.SOURCES / "symbols.txt")))
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=True
    )
    module, folder = map(Path, done.stdout.splitlines())
    assert module.is_relative_to(tmp_path / "site")
    assert (folder / "libcudart.so.13").read_bytes() == (tmp_path / "site" / LIBRARY).read_bytes()


def test_without_a_compiler_the_wheel_is_for_every_system_and_has_no_library(tmp_path):
    wheel = build_wheel(tmp_path, CC="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
