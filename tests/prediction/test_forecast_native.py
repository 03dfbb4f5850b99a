"""Whole predictions against the CUDA build of PyTorch on the simulated GPU: peaks to the byte, and whether it fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_machines import machine_at

from benchmarks import prediction

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(600)]
ROOT = Path(prediction.__file__).resolve().parent.parent
PROGRAMS = (
    "gpt2_small", "resnet50_momentum", "amp_fp16_scaler", "checkpoint_reentrant", "two_streams_at_work", "varying_lengths",
    "optimizer_in_backward", "inference_without_gradients",
)  # fmt: skip


def ran(folder: Path, *arguments: str, conf: str = "") -> None:
    environment = {**os.environ, **machine_at(folder / "gpu", 81920)}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    command = [sys.executable, "-m", "benchmarks.prediction", *arguments]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)


def compared(folder: Path, programs: tuple[str, ...], *more: str, conf: str = "") -> list[dict]:
    chosen = [word for name in programs for word in ("-p", name)]
    truth, predicted = folder / "truth.json", folder / "predicted.json"
    ran(folder, "measure", str(truth), *more, *chosen, conf=conf)
    ran(folder, "predict", str(predicted), "--truth", str(truth), *chosen, conf=conf)
    table = list(prediction.rows(json.loads(truth.read_text()), json.loads(predicted.read_text())))
    assert [row["name"] for row in table] == list(programs)
    assert not any("error" in row for row in table), table
    return table


def test_peaks_are_those_of_the_allocator_to_the_byte(tmp_path):
    for row in compared(tmp_path, PROGRAMS):
        assert (row["allocated_error"], row["reserved_error"]) == (0, 0), row


def test_also_with_expandable_segments(tmp_path):
    for row in compared(tmp_path, PROGRAMS[:3], conf="expandable_segments:True"):
        assert (row["allocated_error"], row["reserved_error"]) == (0, 0), row


def test_whether_it_fits_is_right_or_said_to_be_close(tmp_path):
    table = compared(tmp_path, ("gpt2_small", "varying_lengths"), "--tight")
    assert sum(row["answers"] for row in table) == 2 * len(prediction.SHARES)
    assert not any(row["wrong"] for row in table)
    assert sum(row["close"] for row in table) < 4
