"""What the package said before it was rebuilt, it says today: saved runs, runs recorded again, predictions.

The figures are those of commit aa1eb60; tests/frozen/CHANGES.md lists each that changed since, with its reason.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulated_machines import machine_at

from frozen import freeze
from memlab.allocator.rules import release

HERE = Path(__file__).parent
VALUES = json.loads((HERE / "values.json").read_text())
AGAIN = json.loads((HERE / "recorded_again.json").read_text())
"""Recorded run -> what its first device, and the "run", says today where the saved run says another: rows of CHANGES.md."""
RENAMED = {"outside any module": "elsewhere", "before the run": "before the cell"}
"""Label of today -> that of the frozen values: the field's name for the same figure."""


def values(path):
    """What a saved run says today, with the labels of then."""
    return with_old_labels(freeze.values(path))


def with_old_labels(value):
    if isinstance(value, dict):
        return {RENAMED.get(key, key): with_old_labels(part) for key, part in value.items()}
    return [with_old_labels(part) for part in value] if isinstance(value, list) else value


def without_host(facts):
    """The figures that are the same on every machine: no resident memory."""
    for device in facts["devices"]:
        device["levels"] = {of: level for of, level in device["levels"].items() if of in ("allocated", "reserved")}
    return facts


@pytest.mark.parametrize("name", VALUES)
def test_a_saved_run_says_what_it_said(name):
    assert values(HERE / "traces" / f"{name}.memlab") == VALUES[name]


def recorded(what: str, folder: Path) -> None:
    env = {**os.environ, **machine_at(folder / "gpu")}
    command = [sys.executable, HERE / "freeze.py", what, folder]
    subprocess.run(command, check=True, timeout=600, cwd=HERE.parent.parent, env=env)


def compare(folder: Path) -> None:
    assert list(folder.glob("*.memlab"))
    for path in sorted(folder.glob("*.memlab")):
        now = without_host(values(path))
        then = without_host(copy.deepcopy(VALUES[path.stem]))
        again = copy.deepcopy(AGAIN.get(path.stem, {}))
        then |= again.pop("run", {})
        then["devices"][0] |= again
        for facts in (now, then):
            facts.pop("peaks")  # of the device with the largest, the host's among them
            for device in facts["devices"]:  # an OOM names lines by path
                held = device["breakdowns"]["line"] or {}
                device["breakdowns"]["line"] = {Path(line).name: count for line, count in held.items()}
        assert now == then, path.stem


def test_the_same_steps_recorded_today(tmp_path):
    recorded("record", tmp_path)
    compare(tmp_path)


@pytest.mark.simulated
@pytest.mark.skipif(
    release(torch.__version__) < (2, 12),
    reason="the runs are of PyTorch 2.12; before, cuBLASLt had a workspace of its own",
)
def test_the_same_steps_recorded_today_on_cuda(tmp_path):
    recorded("record-cuda", tmp_path)
    compare(tmp_path)
