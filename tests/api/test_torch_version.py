"""Predictions for a PyTorch other than the one that runs here: what they say, keep, and refuse."""

from __future__ import annotations

import json

import pytest
import torch
from processes import python
from torch import nn

import memlab
from memlab.errors import PredictionError
from memlab.units import MiB

CARD = memlab.Card("a card", 8 << 30, (8, 0), 0, 8 << 30, 8 << 30, 108)
HERE = ".".join(torch.__version__.split(".")[:2])
OTHER = "2.15" if HERE != "2.15" else "2.14"
SMALL, LT = 8_519_680, 1 * MiB
"""Workspaces of cuBLAS and cuBLASLt at capability 8.0, by CublasHandlePool.cpp."""


def step() -> None:
    nn.Linear(64, 64).to("cuda")(torch.ones(8, 64, device="cuda"))


def workspaces(torch_version: str | None) -> dict[str, int]:
    found = memlab.predict(step, CARD, torch_version=torch_version).parts
    return {part.name: part.high_bytes for part in found if part.name.startswith("workspace")}


@pytest.mark.parametrize(
    ("version", "sizes"),
    [
        ("2.10.0+cu128", [SMALL, LT]), ("2.11", [SMALL, LT]), ("2.12.1+cu130", [SMALL]), ("2.13.0", [SMALL]),
        ("2.14.1", [SMALL]), ("2.15.0.dev20260901+cu132", [LT]),
    ],
)  # fmt: skip
def test_workspaces_are_those_of_the_version(version, sizes):
    assert list(workspaces(version).values()) == sizes


def test_it_says_for_which_torch_it_is_and_what_is_not_of_that_one(tmp_path):
    found = memlab.predict(step, CARD, torch_version=OTHER)
    again = memlab.load(found.save(tmp_path / "p.memlab"))
    for one in (found, again, found.for_card("T4")):
        assert one.torch_version == OTHER
        assert f"Predicted for PyTorch {OTHER}, nothing ran on a card" in str(one)
        (text,) = [text for text in one.assumptions if "PyTorch" in text]
        assert f"are those of PyTorch {OTHER}; operators" in text and torch.__version__ in text
    assert f"are those of PyTorch {OTHER}" in memlab.fit(found, on=["T4"]).text


def test_the_one_that_runs_here_is_the_default():
    found = [memlab.predict(step, CARD, name="same", torch_version=one) for one in (None, HERE, torch.__version__)]
    texts = {str(one) for one in found}
    assert len(texts) == 1 and "Predicted, nothing ran" in texts.pop()
    assert {one.torch_version for one in found} == {torch.__version__}


@pytest.mark.parametrize("version", ["2.9.1", "2.16", "3.0", "two", "2", "", "2.14 or so", "2.14\n", 2.14, 14, True])
def test_any_other_version_is_refused_in_one_line(version):
    for predicting in (memlab.predict, memlab.max_batch, memlab.scaling):
        with pytest.raises(PredictionError, match=r"2\.10 to 2\.15|is a text such as") as error:
            predicting(step, CARD, torch_version=version)
        assert "\n" not in str(error.value)


def test_settings_are_checked_by_that_version():
    conf = "large_segment_size_mb:32"
    with pytest.raises(PredictionError, match=r"PyTorch 2\.10\.0 does not know .* large_segment_size_mb"):
        memlab.predict(step, CARD, conf=conf, torch_version="2.10.0")
    memlab.predict(step, CARD, conf=conf, torch_version="2.11.0")


def test_batches_and_jobs_are_predicted_for_it_too():
    def make_step(batch: int):
        return lambda: nn.Linear(64, 64).to("cuda")(torch.ones(batch, 1 << 14, 64, device="cuda"))

    small = memlab.Card("small", 64 * MiB, (8, 0), 0, 64 * MiB, 64 * MiB, 108)
    by_version = [memlab.max_batch(make_step, small, torch_version=one).batch for one in ("2.14", "2.15")]
    assert by_version[0] < by_version[1], "2.15 keeps no workspace of 8 MiB"
    needs = [memlab.scaling(step, CARD, world_sizes=[2], torch_version=one).rows[0] for one in ("2.14", "2.15")]
    assert needs[0].allocated_bytes.high - needs[1].allocated_bytes.high == SMALL - LT


def test_the_command_takes_a_version(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.mm(*[torch.ones(64, 64, device='cuda')] * 2)\n")
    asked = ("-m", "memlab", "predict", "--card", "8GiB", "--json", "--torch", OTHER, script)
    facts = json.loads(python(*asked).splitlines()[-1])
    assert facts["torch"] == OTHER and any(f"PyTorch {OTHER}" in text for text in facts["assumptions"])
