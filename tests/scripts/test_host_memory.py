"""A measured script, and a rank, that are killed while the limit of their control group is nearly reached, or is not.

The limit is that of files as the kernel has them, which the script fills: making a real group needs rights that tests lack.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from processes import memlab_ran, ran

import memlab
from memlab.api.runs import runs
from memlab.probes import host
from memlab.probes.host import oom_kills

DRIVER = """
import pathlib, sys
from memlab.probes import host
host.control_groups = lambda root: [("cgroup v2", pathlib.Path("group").absolute())]
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


@pytest.mark.slow
@pytest.mark.parametrize("each, is_short", [(102 * MiB, True), (20 * MiB, False)])
def test_what_the_last_samples_of_a_killed_script_say_of_the_host(folder, each, is_short):
    group = str(folder / "group")
    assert ran(folder, "driver.py", "run", "--out", "runs", "train.py", str(each), GROUP=group)[0] == -9
    _, shown, _ = memlab_ran(folder, "show", "--html", "page.html", "runs")
    said = "most likely by the host's out-of-memory killer." if is_short else "most likely not for host memory."
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


@pytest.mark.parametrize("is_short", [True, False])
def test_a_run_whose_child_was_killed_says_how_short_host_memory_was(tmp_path, monkeypatch, is_short):
    files = {"max": str(1024 * MiB), "current": str(10 * MiB), "events": "oom_kill 3\n"}
    for name, content in files.items():
        (tmp_path / f"memory.{name}").write_text(content)
    monkeypatch.setattr(host, "control_groups", lambda root: [("cgroup v2", tmp_path)])
    with pytest.raises(RuntimeError), memlab.track("parent", device="cpu", show=False) as run:
        torch.ones(100).sum()
        if is_short:
            (tmp_path / "memory.current").write_text(str(1020 * MiB))
            (tmp_path / "memory.events").write_text("oom_kill 4\n")
        time.sleep(0.4)
        (tmp_path / "memory.current").write_text(files["current"])  # the killed process gave back all of it
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
    runs.discard(run)
    text = run.report().text
    assert ("Host memory was short: at the lowest 4.00 MiB of 1.00 GiB were left" in text) == is_short
    assert ("The kernel killed 1 of the processes of this control group for host memory meanwhile." in text) == is_short
