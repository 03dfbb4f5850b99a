"""A measured script, and a rank, that are killed while the limit of their control group is nearly reached, or is not.

The limit is that of files as the kernel has them, which the script fills: making a real group needs rights that tests lack.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memlab.probes.host import oom_kills

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVER = """
import pathlib, sys
from memlab.probes import host
host._groups = lambda root: [("cgroup v2", pathlib.Path("group").absolute())]
from memlab.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
SCRIPT = """
import os, pathlib, signal, sys, time
import torch
current = pathlib.Path(os.environ["GROUP"], "memory.current")
held = []
for number in range(10):
    held.append(torch.ones(1 << 20))
    current.write_text(str((number + 1) * int(sys.argv[1])))
    time.sleep(0.15)
os.kill(os.getpid(), signal.SIGKILL)
"""
MiB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "memory.max").write_text(str(1024 * MiB))
    (tmp_path / "group" / "memory.current").write_text("0")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "GROUP": str(folder / "group")}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("each, is_short", [(102 * MiB, True), (20 * MiB, False)])
def test_what_the_last_samples_of_a_killed_script_say_of_the_host(folder, each, is_short):
    assert ran(folder, "driver.py", "run", "--out", "runs", "train.py", str(each)).returncode == -9
    shown = ran(folder, "-m", "memlab", "show", "--html", "page.html", "runs").stdout
    said = "Most likely the host's out-of-memory killer ended it." if is_short else "most likely not for host memory."
    for text in (shown, (folder / "page.html").read_text().replace("&#x27;", "'").replace("&#39;", "'")):
        assert said in text
        assert "of 1.00 GiB of host memory were left" in text


def test_kills_are_those_that_the_kernel_counts(tmp_path):
    group = tmp_path / "sys" / "fs" / "cgroup" / "job"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job\n")
    assert oom_kills(tmp_path) is None
    (group / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
