"""Real jobs of two gloo processes under the real torchrun: measured, killed and read again."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import memlab_ran, ran, started

import memlab

TRAIN = """
import os, signal, sys, time
import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.randn(100)

def main(what, steps):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), [None, None]
    dist.all_gather_object(ranks, os.getpid())
    model = torch.nn.Sequential(torch.nn.Linear(100, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    workers = 2 if what == "loader" else 0
    batches = iter(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=workers))
    for step in range(steps):
        loss = model(next(batches)).square().mean()
        if what == "oom" and rank == 1 and step == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if what == "wait" and step == 6:
            if rank == 1:
                raise ValueError("no more")
            time.sleep(60)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if what == "leak" and rank == 1:
            kept.append(torch.ones(100_000))
        if what == "kill":
            time.sleep(0.3)
            if rank == 1 and step == 8:
                os.kill(os.getpid(), signal.SIGKILL)
        if what in ("parent", "everything") and rank == 1 and step == 8:
            time.sleep(1)  # all of the samples of both are written
            torchrun = psutil.Process().parent()
            torchrun.parent().kill()
            if what == "everything":
                torchrun.kill()
                psutil.Process(ranks[0]).kill()
                psutil.Process().kill()
    sys.stdout.write(f"done {rank}\\n")
    dist.destroy_process_group()

kept = []
if __name__ == "__main__":
    main(sys.argv[1], 12)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def job(folder: Path, what: str, *options: str) -> tuple[int, str, str]:
    return memlab_ran(folder, "run", "--nproc-per-node", "2", "--out", "runs", *options, "train.py", what)


def test_a_leak_on_rank_1_is_named_with_what_holds_it(folder):
    status, out, err = job(folder, "leak")
    assert status == 0
    assert sorted(out.split("\n")) == ["", "done 0", "done 1"]
    (growth,) = memlab.ranks(folder / "runs").growth
    assert growth.ranks == (1,)
    assert growth.bytes_per_step == 400_000
    assert growth.holders == (("kept", 12 * 400_000),)
    assert "Only on rank 1: grows by 390.6 KiB with each optimizer step" in err
    assert "held by kept (4.58 MiB)" in err
    assert sorted(path.name for path in (folder / "runs").iterdir()) == [
        "train.html", "train.rank0.html", "train.rank0.memlab", "train.rank1.html", "train.rank1.memlab",
    ]  # fmt: skip
    assert "Only on rank 1" in (folder / "runs/train.html").read_text()


def test_a_rank_that_was_killed_is_read_as_far_as_it_went(folder):
    status, _, err = job(folder, "kill")
    assert status == 1
    found = memlab.ranks(folder / "runs")
    first = found.first_failed
    assert first is found[1]
    assert (first.ending, first.steps.finished) == ("cut off", 9)
    assert first.files == ("train.rank1.memlab.partial",)
    assert first.peak.low == found[0].peak.low  # the tracker's peak was written, not only samples
    assert not first.peak.is_exact
    # It lost its peer, or torchrun's SIGTERM came first: its report was written in either case.
    assert found[0].ending in ("raised", "terminated")
    assert found[0].shares["category"]["optimizer"] > 0
    assert "Rank 1 failed first" in err
    shown = memlab_ran(folder, "show", "runs")
    assert shown[0] == 0
    assert "Rank 1 failed first" in shown[1]


def test_a_job_whose_parent_was_killed_goes_on_and_can_be_read(folder):
    status, out, _ = job(folder, "parent")
    assert (status, sorted(out.split())) == (-9, ["0", "1", "done", "done"])
    shown = memlab_ran(folder, "show", "--html", "page.html", "runs")[1]
    for text in (shown, (folder / "page.html").read_text()):
        assert "train · 2 ranks · measured · peak allocated" in text
        assert "was killed" not in text


def test_a_job_that_was_killed_as_a_whole_names_no_rank_and_says_how_the_host_was(folder):
    assert job(folder, "everything")[0] == -9
    assert sorted(path.suffix for path in (folder / "runs").glob("*.memlab*")) == [".partial"] * 2
    shown = memlab_ran(folder, "show", "--html", "page.html", "runs")[1]
    for text in (shown, (folder / "page.html").read_text()):
        assert "the job still runs, or all its processes were killed" in text
        assert "failed first" not in text
        assert "at its last sample" in text.lower() and "of host memory were left" in text


def test_who_ran_out_of_memory_failed_first_and_what_it_held(folder):
    status, _, err = job(folder, "oom")
    assert status == 1
    found = memlab.ranks(folder / "runs")
    first = found.first_failed
    assert (first.rank, first.ran_out, first.steps.finished) == (1, True, 6)
    assert first.held.shares["category"]["activation"] > 0
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in err
    assert "[rank1]: torch.OutOfMemoryError" in err  # the script's own traceback
    assert "ran out of memory" in (folder / "runs/train.rank1.html").read_text()


def test_who_was_ended_after_another_had_failed_is_no_rank_that_ended_well(folder):
    status, _, err = job(folder, "wait")
    assert status == 1
    found = memlab.ranks(folder / "runs")
    assert found.first_failed.rank == 1
    assert [one.ending for one in found.ranks] == ["terminated", "raised"]
    assert "Rank 1 failed first" in err
    assert "later rank 0 was ended by SIGTERM." in err
    assert found[0].shares["category"]["optimizer"] > 0


def test_without_a_folder_the_files_stay_only_if_memory_ran_out(folder):
    words = ("run", "--nproc-per-node", "2", "train.py")
    status, _, err = memlab_ran(folder, *words, "fine")
    assert status == 0
    assert "2 ranks · measured" in err
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert memlab_ran(folder, *words, "oom")[0] == 1
    (kept,) = folder.glob("memlab-train-*")
    assert memlab.ranks(kept).first_failed.rank == 1


def test_torchrun_over_memlab_run_does_as_well_and_workers_of_loaders_are_no_ranks(folder):
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "-m")
    status, _, err = ran(folder, "-m", *torchrun, "memlab", "run", "--out", "runs", "--skip", "2", "train.py", "loader")
    assert status == 0
    assert err.count("Peak ") >= 2  # each rank reports
    assert sorted(path.name for path in (folder / "runs").glob("*.memlab*")) == [
        "train.rank0.memlab", "train.rank1.memlab",
    ]  # fmt: skip
    found = memlab.ranks(folder / "runs")
    assert [one.steps.number.tolist() for one in found.ranks] == [list(range(3, 13))] * 2
    assert found.world_size == 2


def test_the_budget_is_that_of_the_worst_rank_and_json_has_all(folder):
    status, out, err = job(folder, "leak", "--budget", "10MiB", "--json")
    assert status == 1
    assert "done 0" in out
    assert "done 1" in out  # no rank was ended by the budget of the other
    facts = next(json.loads(line) for line in err.splitlines() if line.startswith("{"))
    assert facts["peak_allocated"]["worst_rank"] == 1
    assert facts["growth"][0]["held_by"] == {"kept": 4_800_000}
    assert "above the budget of 10.00 MiB" in err


def test_a_page_that_cannot_be_written_leaves_the_report_and_the_budget(folder):
    (folder / "runs" / "train.html").mkdir(parents=True)
    words = ["--nproc-per-node", "1", "--out", "runs", "--budget", "1KiB"]
    status, _, err = memlab_ran(folder, "run", *words, "train.py", "fine")
    assert status == 1, err
    assert "Peak" in err or "peak" in err
    assert "memlab run: the page of the ranks is not kept: " in err
    assert "above the budget of 1.00 KiB" in err


def test_a_script_that_fails_before_torch_is_no_run(folder):
    (folder / "fails.py").write_text("raise SystemExit(3)")
    status, _, err = memlab_ran(folder, "run", "--nproc-per-node", "2", "fails.py")
    assert status == 1
    assert "memlab run: nothing was measured." in err


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_a_number_of_ranks_that_is_none(folder, count):
    status, _, err = memlab_ran(folder, "run", "--nproc-per-node", count, "train.py")
    assert status == 2
    assert f"got '{count}'" in err
    assert len(err.splitlines()) == 1


SPAWN = """
import sys
import torch
import torch.distributed as dist
import memlab

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with memlab.track("spawned", show=False, save=f"runs/{rank}.memlab"):
        model = torch.nn.Linear(100, 100 * (rank + 1))
        model(torch.randn(10, 100)).sum().backward()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
"""


def test_what_the_report_of_a_parent_advises_measures_its_children(folder):
    (folder / "runs").mkdir()
    (folder / "spawns.py").write_text(SPAWN)
    status, _, err = memlab_ran(folder, "run", "spawns.py")
    assert status == 0
    assert "2 child processes with PyTorch ran" in err
    assert "memlab.track(save='child.memlab') in each, with a file of its own, measures them" in err
    found = memlab.ranks(folder / "runs")
    assert found.world_size == 2
    assert found.missing == ()
    assert found.peak.worst_rank == 1


@pytest.mark.skipif(sys.platform != "linux", reason="which signals a process handles is read from /proc")
def test_sigusr1_reaches_the_ranks_and_the_job_goes_on(folder):
    words = ["-m", "memlab", "run", "--nproc-per-node", "2", "--out", "runs", "train.py", "asked", "15"]
    text = TRAIN.replace("main(sys.argv[1], 12)", "main(sys.argv[1], int(sys.argv[2]))")
    text = text.replace("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        time.sleep(0.4)\n")
    (folder / "train.py").write_text(text)
    job, until = started(folder, *words), time.monotonic() + 60
    while len(list((folder / "runs").glob("*.partial"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=600)
    assert job.returncode == 0, err
    assert sorted(out.split()) == ["0", "1", "done", "done"]
    assert "asked 2 ranks for a report" in err
