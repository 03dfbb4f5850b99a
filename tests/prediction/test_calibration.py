"""Calibrations: what is kept is used by `find`, what is not as it should be is said and ignored, nothing is half written."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import python

from memlab.errors import PredictionError
from memlab.prediction import calibration
from memlab.prediction.calibration_file import Calibration, keep, kept, parsed, path, read
from memlab.prediction.cards import Card, applied, cards, find
from memlab.units import GiB, MiB

ROOT = Path(__file__).resolve().parent.parent.parent
MEASURED = Calibration(
    card="NVIDIA GeForce RTX 4060", capability_major=8, capability_minor=9, multiprocessors=24, driver="580.1",
    torch=torch.__version__, total_memory_bytes=int(7.62 * GiB), context_low_bytes=90 * MiB, context_high_bytes=140 * MiB,
    blas_workspace_bytes=8519680, convolution_workspace_bytes=0, measured_at_s=100,
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_CONFIG", str(tmp_path / "config"))
    return tmp_path / "config"


def test_what_was_measured_is_used(folder):
    before = find("rtx 4060")
    keep(MEASURED)
    card = find("rtx 4060")
    assert (card.usable_bytes, card.usable_high_bytes) == (MEASURED.total_memory_bytes,) * 2
    assert card.context_bytes == (90 * MiB, 140 * MiB)
    assert "measured here" in card.usable_source
    assert card.assumptions == ()
    assert before != card == cards["RTX 4060"]
    assert find("RTX 4070") == dataclasses.replace(find("RTX 4070"))


def test_this_pytorch_goes_before_later_ones():
    keep(MEASURED)
    keep(dataclasses.replace(MEASURED, torch="1.0", context_high_bytes=99 * MiB, measured_at_s=900))
    assert find("RTX 4060").context_bytes[1] == 140 * MiB
    keep(dataclasses.replace(MEASURED, driver="590.2", context_high_bytes=150 * MiB, measured_at_s=101))
    assert find("RTX 4060").context_bytes[1] == 150 * MiB


def test_the_same_again_replaces_it_and_other_cards_are_left_alone():
    keep(MEASURED)
    keep(dataclasses.replace(MEASURED, context_low_bytes=1))
    assert [one.context_low_bytes for one in kept()] == [1]
    mine = Card("RTX 4060", "6GiB", (8, 9))
    assert find(mine) is mine
    assert applied(cards["T4"]) == cards["T4"]


def test_a_card_that_the_catalogue_does_not_know_is_known_here():
    keep(dataclasses.replace(MEASURED, card="Some New GPU"))
    card = find("some new gpu")
    assert (card.name, card.compute_capability, card.context_bytes[0]) == ("Some New GPU", (8, 9), 90 * MiB)
    assert card.assumptions == ()


BAD = {
    "empty": "",
    "no json": "{",
    "a list": "[]",
    "another version": '{"version": 99, "calibrations": []}',
    "no list": '{"version": 1, "calibrations": {}}',
    "an entry is a number": '{"version": 1, "calibrations": [1]}',
    "deep": '{"version": 1, "calibrations": ' + "[" * 100_000,
    "no text": "\udcff",
}
BAD_VALUES = {
    "card": ["", 3, None, "x" * 1000, "a\nb"],
    "total_memory_bytes": [-1, 1.5, "8GiB", True, 1 << 60],
    "context_low_bytes": [200 * MiB, None],
    "context_high_bytes": [8 * GiB],
    "capability_major": ["8"],
}


def written(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path().write_bytes(text.encode("utf-8", "surrogateescape"))
    return path()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_said_in_one_line_and_ignored(folder, name):
    where = written(folder, BAD[name])
    with pytest.raises(PredictionError, match="cannot be used") as caught:
        read(where)
    assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match="It is ignored"):
        card = find("RTX 4060")
    assert "measured" not in card.usable_source
    assert find("RTX 4060") == card, "and is said once"


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in BAD_VALUES.items() for value in values]
)
def test_a_bad_value_is_refused(folder, field, value):
    facts = {**dataclasses.asdict(MEASURED), field: value}
    where = written(folder, json.dumps({"version": 1, "calibrations": [facts]}))
    for attempt in (lambda: parsed(facts), lambda: read(where)):
        with pytest.raises(PredictionError) as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_kept_beside_the_new_one(folder):
    written(folder, "precious")
    keep(MEASURED)
    assert kept() == (MEASURED,)
    assert (folder / "calibration.json.unreadable").read_text() == "precious"


def test_a_failed_write_leaves_the_old_file_and_no_litter(folder, monkeypatch):
    keep(MEASURED)
    before = path().read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memlab.trace.file.os.fsync", full)
    with pytest.raises(PredictionError, match="No space left"):
        keep(dataclasses.replace(MEASURED, driver="1"))
    assert path().read_bytes() == before
    assert [each.name for each in folder.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    ("system", "variables", "ends"),
    [
        ("linux", {"XDG_CONFIG_HOME": "/x"}, "/x/memlab/calibration.json"),
        ("linux", {}, "/.config/memlab/calibration.json"),
        ("darwin", {}, "/Library/Application Support/memlab/calibration.json"),
        ("win32", {"LOCALAPPDATA": "/L"}, "/L/memlab/calibration.json"),
        ("linux", {"MEMLAB_CONFIG": "/own"}, "/own/calibration.json"),
    ],
)
def test_where_it_is_kept(monkeypatch, system, variables, ends):
    for name in ("MEMLAB_CONFIG", "XDG_CONFIG_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert path().as_posix().endswith(ends)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused():
    with pytest.raises(PredictionError, match="needs a GPU"):
        calibration.calibrate()
    assert not path().exists()


def test_the_new_process_runs_this_memlab_and_what_it_prints_is_kept(monkeypatch):
    def run(command, env, **options):
        assert env["PYTHONPATH"] == f"{ROOT}{os.pathsep}/theirs"
        return subprocess.CompletedProcess(command, 0, f"a warning\n{json.dumps(dataclasses.asdict(MEASURED))}\n", "")

    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setattr(subprocess, "run", run)
    for module, name in ((torch.backends.cuda, "is_built"), (torch.cuda, "is_available")):
        monkeypatch.setattr(module, name, lambda: True)
    assert calibration.calibrate() == MEASURED == kept()[0]


CALIBRATE = """
import torch
from memlab.__main__ import main
assert main(["calibrate"]) == 0
assert not torch.cuda.is_initialized(), "measured in a process of its own"
from memlab.prediction.calibration_file import kept
from memlab.prediction.cards import find
card = find("sm_80 (simulated)")
print(tuple(card.context_bytes), card.usable_bytes, kept()[0].blas_workspace_bytes, kept()[0].convolution_workspace_bytes)
"""


@pytest.mark.simulated
@pytest.mark.parametrize(("total_mb", "context_mb"), [(8192, 500), (6144, 333)])
def test_the_context_of_the_fake_device_is_found(folder, total_mb, context_mb):
    gpu = {"total_mb": total_mb, "context_mb": context_mb, "convolution_workspace_mb": 7}
    said, *_, found = python("-c", CALIBRATE, gpu=gpu).splitlines()
    assert said.startswith("sm_80 (simulated) (driver")
    assert found == f"({context_mb * MiB}, {context_mb * MiB}) {total_mb * MiB} 8519680 {7 * MiB}"
