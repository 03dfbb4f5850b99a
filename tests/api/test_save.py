from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memlab
from memlab.api import track as module
from memlab.api.saver import Saver
from memlab.errors import MemlabError
from memlab.probes.measurement import Measurement, Target
from memlab.probes.sampler import Reading, Sample
from memlab.trace.file import PARTIAL

ROOT = Path(__file__).resolve().parents[2]


def wait_for_samples(path: Path) -> None:
    for _ in range(1000):
        if path.exists() and path.stat().st_size > 1500:
            return
        time.sleep(0.01)
    pytest.fail(f"{path.name} was not written")


def test_while_it_runs_there_is_a_partial_file_and_afterwards_a_whole_one(tmp_path):
    target = tmp_path / "run.memlab"
    with memlab.track("kept", save=target, show=False, rate_hz=20) as run:
        wait_for_samples(tmp_path / f"run.memlab{PARTIAL}")
        assert not target.exists()
    assert list(tmp_path.iterdir()) == [target]
    assert str(memlab.load(target)) == str(run)


def test_after_an_error_the_file_is_whole_too(tmp_path):
    target = tmp_path / "run.memlab"
    with pytest.raises(ValueError, match="mine"), memlab.track("kept", save=target, show=False):
        raise ValueError("mine")
    assert list(tmp_path.iterdir()) == [target]
    assert memlab.load(target).summary.notes == ("It raised ValueError: mine.",)


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path):
    target = tmp_path / "run.memlab"
    target.write_text("older")
    with memlab.track(save=target, show=False):
        assert target.read_text() == "older"
    assert memlab.load(target).peak_bytes >= 0


def test_a_file_that_cannot_be_written_at_the_end_is_an_error_and_leaves_the_run(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(MemlabError, match="cannot save"), memlab.track("unsaved", save=folder / "x", show=False):
        (folder / f"x{PARTIAL}").unlink()
        folder.rmdir()
    assert memlab.last_run().name == "unsaved"
    assert memlab.last_run().peak_bytes >= 0
    assert not +module.open_tracks


def test_a_file_that_cannot_be_written_at_the_start_stops_before_anything_runs(tmp_path):
    (tmp_path / f"x{PARTIAL}").mkdir()
    ran = []
    with pytest.raises(MemlabError, match="cannot write"), memlab.track(save=tmp_path / "x", show=False):
        ran.append(1)
    assert not ran
    assert not +module.open_tracks


KILLED = """
import memlab, os, pathlib, sys, time, torch
with memlab.track("killed", save=sys.argv[1], show=False, rate_hz=20):
    kept = torch.ones(3 << 20, dtype=torch.uint8)
    partial = pathlib.Path(sys.argv[1] + ".partial")
    size = partial.stat().st_size
    while partial.stat().st_size < size + 3000:
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_kernel_leaves_can_be_read_and_claims_nothing(tmp_path):
    target = tmp_path / "run.memlab"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, target], env=environment, check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [f"run.memlab{PARTIAL}"]
    with pytest.raises(MemlabError, match=r"Its process died while it ran: .*partial"):
        memlab.load(target)
    run = memlab.load(tmp_path / f"run.memlab{PARTIAL}")
    assert run.name == "killed"
    assert run.peak_bytes >= 3 << 20  # as the samples saw it
    assert not run.is_exact
    assert run.trace.made_by.duration_ns > 0
    assert any(gap.name == "cut off" for gap in run.gaps)
    assert "exact" not in run.report().text
    assert run.report().figure_bundle()


@pytest.fixture
def measurement() -> Iterator[Measurement]:
    found = Measurement(Target.parse("cpu"))
    found.start()
    yield found
    found.stop()


def test_every_length_of_a_partial_file_is_read_or_refused_in_words(tmp_path, measurement):
    saver = Saver(tmp_path / "x", "cut", measurement)
    for tick in range(5):
        saver.tick(Sample(tick * 600_000_000, (Reading(0, 5, 6, 7), Reading(-1, own_bytes=8, available_bytes=9))))
    whole = (tmp_path / f"x{PARTIAL}").read_bytes()
    saver.close()
    read = []
    for length in itertools.chain(range(0, len(whole), 13), [len(whole)]):
        (tmp_path / "cut").write_bytes(whole[:length])
        try:
            read.append(len(memlab.load(tmp_path / "cut").trace.samples))
        except MemlabError:
            assert not read  # once there is a header, what follows is read as far as it goes
    assert read == sorted(read)
    assert (read[0], read[-1]) == (0, 10)
    assert not (tmp_path / f"x{PARTIAL}").exists()


def test_a_sample_without_readings_is_no_error(tmp_path, measurement):
    saver = Saver(tmp_path / "x", "empty", measurement)
    saver.tick(Sample(0, ()))
    saver.close()
    assert not list(tmp_path.iterdir())


def test_saved_numbers_do_not_depend_on_who_looks(tmp_path):
    with memlab.track("again", show=False) as run:
        torch.ones(1000)
    first, second = run.save(tmp_path / "a"), memlab.load(run.save(tmp_path / "b")).save(tmp_path / "c")
    assert first.read_bytes() == second.read_bytes()
