"""Loading weights: into the meta device, mapped, with shared weights, buffers and an optimizer; what the host really holds."""

from __future__ import annotations

import json
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from job_runs import prepared, ran
from processes import python
from torch import Tensor, nn

from memlab.api.workload_run import run_workload, work_of
from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.loading import large_inference
from memlab.workloads import workloads
from memlab.workloads.job import Job, Parts

BOTH = ("meta_init", "mmap_loading")
MAPPED = techniques["mmap_loading"]


class Rotary(nn.Module):
    """Shared weights, a buffer in the state and one that is not, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.token.weight
        self.norm = nn.BatchNorm1d(4)
        self.rest = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rest(self.norm(self.token(x) + self.table)))


def rotary() -> Parts:
    model = Rotary()
    groups = [{"params": [model.token.weight], "lr": 0.3}, {"params": list(model.norm.parameters())}]
    batch = torch.randint(0, 9, (6,)), torch.randint(0, 9, (6,))
    return model, torch.optim.AdamW(groups, lr=0.1), batch, nn.CrossEntropyLoss()


@pytest.mark.parametrize("names", [*((one,) for one in BOTH), BOTH])
def test_training_goes_on_with_what_was_loaded(names: tuple[str, ...]) -> None:
    plain, loaded = ran(rotary), ran(rotary, names)
    assert plain.outcome()["digest"] == loaded.outcome()["digest"]
    assert plain.outcome()["losses"] == loaded.outcome()["losses"]
    assert ran(rotary, (), names).outcome()["digest"] == plain.outcome()["digest"], "the habit changes nothing either"
    model, optimizer = loaded.model, loaded.optimizer
    assert isinstance(model, Rotary) and model.head.weight is model.token.weight
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    assert torch.equal(model.table, torch.arange(4.0)) and not model.rest.weight.requires_grad
    assert optimizer is not None and optimizer.param_groups[0]["params"][0] is model.token.weight
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_no_file_stays(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # into that of all, other tests write meanwhile
    job = ran(rotary, ("mmap_loading",))
    assert list(tmp_path.iterdir()) == []
    assert job.model(job.batch[0]).isfinite().all(), "the mapped pages outlive the name of the file"


def test_a_model_without_parameters() -> None:
    with pytest.raises(DoesNotApply, match="no parameters"):
        prepared(lambda: (nn.ReLU(), None, (torch.ones(1),), None), "meta_init")


# What a process holds of its own, and of files: the kernel's count, before and after a file of 32 MiB is loaded.
MEASURE = """
import json, sys, torch

def held():
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return [int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")]

torch.set_num_threads(1)
path, mapped = sys.argv[1], sys.argv[2] == "mapped"
torch.save({}, path + ".small"); torch.load(path + ".small", mmap=mapped)     # what the first load brings with it
before = held()
state = torch.load(path, mmap=mapped, weights_only=True)
loaded = held()
total = float(state["weight"].sum())
used = held()
if len(sys.argv) > 3:
    state["weight"].mul_(2)
print(json.dumps([[b - a for a, b in zip(before, now)] for now in (loaded, used, held())]))
"""


def measured(path: Path, *how: str) -> list[list[int]]:
    return json.loads(python("-c", MEASURE, path, *how))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel's counts are Linux's")
def test_what_the_host_holds(tmp_path: Path) -> None:
    size = 32 << 20
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(size // 4)}, path)
    read, mapped = measured(path, "read"), measured(path, "mapped")
    assert read[0][0] > 0.9 * size, "read: its own memory, at once"
    assert mapped[0][0] < 0.1 * size and mapped[0][1] < 0.5 * size, "mapped: next to nothing until it is used"
    assert mapped[1][0] < 0.1 * size and mapped[1][1] > 0.9 * size, "used: pages of the file"
    written = measured(path, "mapped", "write")
    assert written[2][0] > 0.9 * size, "written to: its own memory after all"


def test_from_outside(tmp_path: Path) -> None:
    path, load = tmp_path / "weights.pt", torch.load
    torch.save({"weight": torch.arange(1000.0)}, path)
    with MAPPED.patch():
        found = torch.load(path)
        with path.open("rb") as file:  # no name to map: read as before
            assert torch.equal(torch.load(file)["weight"], found["weight"])
    assert torch.equal(found["weight"], torch.arange(1000.0)) and torch.load is load
    with pytest.raises(DoesNotApply, match="no file was loaded"), MAPPED.patch():
        torch.load(path, mmap=True)


@pytest.mark.simulated
@pytest.mark.parametrize("name", BOTH)
def test_weights_are_on_the_card_after_loading(name: str) -> None:
    job = Job("cuda", steps=1)
    techniques.prepare(job, large_inference, [name])
    assert {one.device.type for one in job.model.parameters()} == {"cuda"}
    job.run()
    vars(job).clear()
    before = run_workload(work_of(large_inference), habits=[name], on="cuda", timed=False).peak_allocated_bytes
    after = run_workload(work_of(large_inference), [name], on="cuda", timed=False).peak_allocated_bytes
    assert after < before


@pytest.mark.parametrize("name", ["meta_init", "mmap_loading"])
def test_no_weight_is_alive_while_the_file_is_read(monkeypatch, name):
    weights, alive, load = [], [], torch.load

    def make():
        parts = workloads["gpt"].sized("tiny")()
        weights.extend(map(weakref.ref, parts[0].parameters()))
        return parts

    def watched(*args, **kwargs):
        alive.append([one() is not None for one in weights])
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", watched)
    prepared(make, name)
    assert alive
    assert not any(map(any, alive))
