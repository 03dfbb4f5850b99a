"""The temporary folder of a job without `--out`: nothing of it is left, however the job ends, but what a killed one needed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rank_traces import cut_off, notes, trained

import memlab
from memlab.api.run import Run
from memlab.scripts import torchrun
from memlab.scripts.torchrun import OLD_S, new_folder, remove_leftovers

MiB = 1 << 20
REPOSITORY = Path(__file__).resolve().parents[2]
DRIVER = """
import sys
from memlab.__main__ import main
from memlab.scripts import torchrun
if sys.argv[1] == "in the report":
    def report(self, folder):
        print("now", flush=True)
        import time
        time.sleep(60)
    torchrun.Launch._report = report
sys.exit(main(["run", "--nproc-per-node", "1", "train.py"]))
"""
TRAIN = {
    "in the script": "import time\nprint('now', flush=True)\ntime.sleep(60)\n",
    "in the report": "",
}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", [*TRAIN])
def test_a_signal_leaves_nothing(tmp_path, when, number):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text(TRAIN[when])
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        [sys.executable, "driver.py", when], cwd=tmp_path, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as job:  # fmt: skip
        assert job.stdout is not None and job.stdout.readline() == "now\n"
        assert [one for one in (tmp_path / "tmp").iterdir() if one.name.startswith(f"memlab-run-{job.pid}-")]
        os.killpg(job.pid, number) if number == signal.SIGINT else job.send_signal(number)
        assert job.wait(timeout=100)
    assert [one.name for one in (tmp_path / "tmp").iterdir() if one.name.startswith("memlab-")] == []


def test_an_error_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun.tempfile, "tempdir", str(tmp_path))

    def fails(*_: object) -> None:
        (folder,) = tmp_path.iterdir()
        (folder / "train.rank0.memlab").touch()
        raise OSError("no processes left")

    monkeypatch.setattr(torchrun.subprocess, "Popen", fails)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(OSError, match="no processes left"):
        torchrun.Launch("1", "train", (), ("train.py",)).execute()
    assert [*tmp_path.iterdir()] == []
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("left_bytes", [4 * MiB, 900 * MiB])
def test_the_page_of_the_parent_after_a_kill_is_kept_where_host_memory_was_short(
    tmp_path, monkeypatch, capsys, left_bytes
):
    """The kernel's count of kills has risen, and the rank that was killed left samples of host memory."""
    monkeypatch.chdir(tmp_path)
    kills = iter((3, 4))
    monkeypatch.setattr("memlab.api.ranks.oom_kills", lambda: next(kills))
    killed = cut_off(1, [MiB] * 6)
    host = killed.samples.replace(
        used_bytes=np.full(6, 1024 * MiB - left_bytes),
        own_bytes=np.full(6, MiB),
        available_bytes=np.full(6, left_bytes),
    )
    killed = dataclasses.replace(killed, samples=host, notes=notes(1, world_size=2))

    class Torchrun:
        """Leaves what a killed rank leaves."""

        def __init__(self, command: list[str]) -> None:
            folder = Path(command[command.index("--out") + 1])
            for trace in (trained(0, world_size=2), killed):
                Run("train", trace).save(folder / f"train.rank{trace.notes['rank']['rank']}.memlab")

        def wait(self) -> int:
            return -9

    monkeypatch.setattr(torchrun.subprocess, "Popen", Torchrun)
    assert torchrun.Launch("2", "train", (), ("train.py",)).execute() == 128 + 9
    said, (*kept,) = capsys.readouterr().err, tmp_path.glob("memlab-train-*")
    assert "the kernel killed 1 of the processes of this control group for host memory meanwhile." in said
    assert len(kept) == int(left_bytes == 4 * MiB)
    for folder in kept:
        assert memlab.ranks(folder).first_failed.rank == 1
        assert "most likely by the host" in (folder / "train.html").read_text()


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def left(where: Path, name: str, age_s: float, file_age_s: float | None = None) -> Path:
    (where / name).mkdir()
    (where / name / "train.rank0.memlab.partial").write_bytes(b"x")
    now_s = time.time()
    os.utime(where / name / "train.rank0.memlab.partial", (now_s - (file_age_s or age_s),) * 2)
    os.utime(where / name, (now_s - age_s,) * 2)
    return where / name


@pytest.mark.skipif(os.name != "posix", reason="whose folders they are is not known")
def test_what_dead_processes_left_is_removed_when_it_is_old(tmp_path, monkeypatch, dead):
    monkeypatch.setattr(torchrun.tempfile, "tempdir", str(tmp_path))
    old_s = OLD_S + 60
    gone = [left(tmp_path, f"memlab-{what}-{dead}-abcd_123", old_s) for what in ("run", "ranks", "child")]
    stays = [
        left(tmp_path, f"memlab-run-{dead}-abcd_124", OLD_S - 60),  # it may be wanted
        left(tmp_path, f"memlab-run-{dead}-abcd_125", old_s, file_age_s=1),  # its ranks still run
        left(tmp_path, f"memlab-run-{os.getpid()}-abcd_123", old_s),  # its process lives
        left(tmp_path, f"memlab-other-{dead}-abcd_123", old_s),
        left(tmp_path, f"memlab-run-{dead}-mine", old_s),
        left(tmp_path, f"memlab-run-{dead}-abcd_123.old", old_s),
    ]
    (tmp_path / f"memlab-run-{dead}-abcd_126").symlink_to(stays[0])
    (tmp_path / f"memlab-run-{dead}-abcd_127").touch()
    remove_leftovers()
    assert not any(one.exists() for one in gone)
    assert all((one / "train.rank0.memlab.partial").exists() for one in stays)
    assert len([*tmp_path.iterdir()]) == len(stays) + 2


def test_the_next_job_removes_them(tmp_path, monkeypatch, dead):
    monkeypatch.setattr(torchrun.tempfile, "tempdir", str(tmp_path))
    left(tmp_path, f"memlab-run-{dead}-abcd_123", OLD_S + 60)
    monkeypatch.setattr(torchrun.Launch, "run", lambda self, folder, signals: (0, False))
    assert torchrun.Launch("1", "train", (), ("train.py",)).execute() == 0
    assert [*tmp_path.iterdir()] == []
    assert torchrun.OURS.fullmatch(new_folder().name)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_prediction_that_is_killed_leaves_what_the_next_one_removes(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text(
        "import sys, time\nif sys.argv[1:]:\n    print('now', flush=True)\n    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "memlab", "predict", "--card", "8GiB", "train.py"]
    with subprocess.Popen([*command, "wait"], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stdout.readline() == "now\n"
        job.kill()
    (folder,) = (one for one in (tmp_path / "tmp").iterdir() if torchrun.OURS.fullmatch(one.name))
    long_ago = time.time() - OLD_S - 60
    for one in (*folder.rglob("*"), folder):
        os.utime(one, (long_ago, long_ago))
    subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert not folder.exists()
