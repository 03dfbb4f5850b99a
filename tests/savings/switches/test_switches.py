"""Switches: what they leave as it was, what they cost, and that the myths among them save nothing."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from jobbing import prepared
from torch import nn

import memlab
from memlab.errors import DoesNotApply, MemlabError
from memlab.savings import techniques
from memlab.savings.switches.cudnn import cudnn
from memlab.savings.switches.empty_cache import layers
from memlab.savings.switches.environment import variable
from memlab.savings.switches.expandable import CONF, growing
from memlab.savings.switches.seeding import deterministic, reproducible
from memlab.session.runs import runs
from memlab.workloads.job import Job, seeded

OF_CUDA = (
    *("empty_cache", "cudnn_benchmark", "cudnn_deterministic", "cuda_visible_devices", "cuda_launch_blocking"),
    *("expandable_segments", "sync_batchnorm"),
)


def flags() -> tuple[object, ...]:
    backend = torch.backends.cudnn
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return backend.benchmark, backend.deterministic, backend.enabled, backend.allow_tf32, *modes, dict(os.environ)


@pytest.mark.parametrize("name", OF_CUDA)
def test_what_is_of_cuda_refuses_the_cpu(name: str) -> None:
    before = flags()
    with pytest.raises(DoesNotApply, match="runs on the CPU"):
        prepared(layers, name)
    assert flags() == before


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("already", [False, True])
def test_flags_are_put_back_also_after_an_error(already: bool) -> None:
    with cudnn(benchmark=already, deterministic=not already):
        before = flags()
        for name, expected in {"cudnn_benchmark": (True,), "cudnn_deterministic": (False, True)}.items():
            with pytest.raises(KeyboardInterrupt), techniques[name].outside():
                assert flags()[: len(expected)] == expected
                raise KeyboardInterrupt
            assert flags() == before
        with pytest.raises(ZeroDivisionError), deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            raise ZeroDivisionError
        assert flags() == before


@pytest.mark.parametrize("before", [None, "", "something"])
def test_a_variable_is_put_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMLAB_TEST", raising=False)
    if before is not None:
        monkeypatch.setenv("MEMLAB_TEST", before)
    with variable("MEMLAB_TEST", "1"):
        assert os.environ["MEMLAB_TEST"] == "1"
    assert os.environ.get("MEMLAB_TEST") == before


def test_benchmark_and_deterministic_exclude_each_other() -> None:
    with pytest.raises(MemlabError, match="fastest in one run"):
        techniques.ordered(["cudnn_benchmark", "cudnn_deterministic"])


# --- seeds ------------------------------------------------------------------------------------------------------------


def dropping():
    """Random numbers of three kinds, when it is made and when it runs."""
    scale = random.random() + float(np.random.rand())

    class Scaled(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x)) * (scale + random.random() + float(np.random.rand()))

    model = Scaled(8, 8)
    return model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(4, 8), torch.randn(4, 8)), (
        nn.functional.mse_loss
    )  # fmt: skip


def unseeded(*names: str) -> str:
    job = Job("cpu", 2)
    techniques.prepare(job, dropping, names)
    job.run()
    return str(job.outcome()["digest"])


def test_seeded_runs_agree_and_leave_the_users_numbers_alone() -> None:
    assert unseeded() != unseeded()
    before, states = flags(), (random.getstate(), torch.get_rng_state(), np.random.get_state()[1])
    assert unseeded("reproducible_seeding") == unseeded("reproducible_seeding")
    assert flags() == before and random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1]) and np.array_equal(np.random.get_state()[1], states[2])


def test_seeds_and_flags_while_it_runs() -> None:
    with reproducible():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["PYTHONHASHSEED"] == "0"
        assert flags()[:2] == (False, True) and flags()[4:6] == (True, True)


# --- what BatchNorm of few samples is worth ---------------------------------------------------------------------------


def test_few_samples_make_unsteady_statistics() -> None:
    """The reason for SyncBatchNorm: the mean of n samples varies as 1 / sqrt(n)."""
    with seeded():
        means = {n: torch.randn(400, n, 16).mean(1).std() for n in (2, 32)}
    assert 3 < means[2] / means[32] < 5  # sqrt(16) = 4


# --- predicted and on the pretend device ------------------------------------------------------------------------------


def reserved_of(conf: str) -> tuple[int, int]:
    def step() -> None:
        job = Job("cuda", 8)
        techniques.prepare(job, growing)
        job.run()

    found = memlab.predict(step, card="RTX 4060", conf=conf)
    runs.discard(found)
    return found.peak_allocated_bytes, found.peak_reserved_bytes


def test_expandable_segments_leave_no_holes_on_a_predicted_card() -> None:
    holes, none = reserved_of(""), reserved_of(CONF)
    assert abs(holes[0] - none[0]) < 0.01 * holes[0]
    assert none[1] < 0.75 * holes[1] and none[1] < 1.2 * none[0]


def alone(code: str, **env: str) -> list[str]:
    """What a process of its own prints, CUDA not yet initialised."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


MEASURE = """
import torch
from memlab.savings import techniques
from memlab.savings.switches.{module} import {make}
from memlab.workloads.job import Job
job = Job("cuda", {steps})
techniques.prepare(job, {make}, {names})
job.run()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()["num_device_alloc"])
"""


def measured(module: str, make: str, steps: int, *names: str, **env: str) -> list[int]:
    return [int(one) for one in alone(MEASURE.format(module=module, make=make, steps=steps, names=list(names)), **env)]


@pytest.mark.fakegpu
def test_expandable_segments_leave_no_holes() -> None:
    holes = measured("expandable", "growing", 8)
    none = measured("expandable", "growing", 8, PYTORCH_CUDA_ALLOC_CONF=CONF)
    assert abs(none[0] - holes[0]) < 0.01 * holes[0] and none[1] < 0.75 * holes[1]


@pytest.mark.fakegpu
def test_empty_cache_moves_no_peak_and_asks_again() -> None:
    plain, emptied = measured("empty_cache", "layers", 4), measured("empty_cache", "layers", 4, "empty_cache")
    assert emptied[0] == plain[0] and emptied[1] >= 0.95 * plain[1]
    assert emptied[2] > 1.3 * plain[2]  # cudaMalloc, in each step anew


@pytest.mark.fakegpu
def test_empty_cache_lowers_what_is_reserved_between_steps() -> None:
    torch.cuda.init()
    after: dict[tuple[str, ...], int] = {}
    for names in ((), ("empty_cache",)):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        job = Job("cuda", 2)
        techniques.prepare(job, layers, names)
        job.run()
        after[names] = torch.cuda.memory_reserved() - before
        del job
    assert after[("empty_cache",)] < 0.8 * after[()]


@pytest.mark.fakegpu
def test_launch_blocking_is_about_time_alone() -> None:
    assert measured("empty_cache", "layers", 2, "cuda_launch_blocking") == measured("empty_cache", "layers", 2)


SEEN = """
import os, torch
{first}
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
torch.ones(1, device="cuda")
print(torch.cuda.device_count())
"""


@pytest.mark.fakegpu
@pytest.mark.parametrize(("first", "cards"), [("", "1"), ("torch.ones(1, device='cuda')", "2")])
def test_visible_devices_count_until_cuda_is_initialised(first: str, cards: str) -> None:
    """Not the import of torch decides, but the first use of CUDA."""
    assert alone(SEEN.format(first=first), FAKEGPU_COUNT="2", FAKEGPU_SHM="") == [cards]


@pytest.mark.fakegpu
@pytest.mark.parametrize("name", ["cuda_visible_devices", "cuda_launch_blocking"])
def test_variables_refuse_when_cuda_is_initialised(name: str) -> None:
    torch.cuda.init()
    with pytest.raises(DoesNotApply, match="first in a new process"):
        techniques.prepare(Job("cuda"), layers, [name])


VISIBLE = """
import os, torch
from memlab.savings import techniques
from memlab.savings.switches.empty_cache import layers
from memlab.workloads.job import Job
job = Job("cuda", 1)
techniques.prepare(job, layers, ["cuda_visible_devices"])
job.run()
print(torch.cuda.device_count(), "CUDA_VISIBLE_DEVICES" in os.environ)
"""


@pytest.mark.fakegpu
def test_one_card_is_seen_and_the_variable_gone() -> None:
    assert alone(VISIBLE, FAKEGPU_COUNT="2", FAKEGPU_SHM="") == ["1", "False"]


@pytest.mark.fakegpu
def test_what_a_deterministic_cublas_takes() -> None:
    """32 MiB in place of 8.1 on a card of capability 8; twice, as the thread of backward has a handle of its own."""
    plain, fixed = measured("empty_cache", "layers", 1), measured("empty_cache", "layers", 1, "reproducible_seeding")
    assert fixed[0] - plain[0] == 2 * (8 * 4096 - (2 * 4096 + 8 * 16)) * 1024


@pytest.mark.fakegpu
@pytest.mark.parametrize("name", ["cudnn_benchmark", "cudnn_deterministic"])
def test_cudnn_is_switched_while_the_job_runs(name: str) -> None:
    before, seen = flags()[:4], []
    job = Job("cuda", 1)
    techniques.prepare(job, pictures, [name])
    job.run(lambda done: seen.append(flags()[:2]))
    assert seen == [(True, False) if name == "cudnn_benchmark" else (False, True)] and flags()[:4] == before
    assert "real card" in job.notes[0]
    with pytest.raises(DoesNotApply, match="no convolution"):
        techniques.prepare(Job("cuda"), layers, [name])


def pictures():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = torch.randn(2, 3, 16, 16), torch.randn(2, 8)
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.functional.mse_loss


@pytest.mark.fakegpu
def test_sync_batchnorm_keeps_parameters_and_refuses_where_there_is_no_use() -> None:
    job = Job("cuda", 2)
    techniques.prepare(job, pictures, ["sync_batchnorm"])
    assert isinstance(job.model[1], nn.SyncBatchNorm)
    assert job.model[1].weight in set(job.optimizer.param_groups[0]["params"])
    job.run()
    for make, why in (
        (layers, "no BatchNorm"),
        (lambda: (*pictures()[:1], None, pictures()[2][:1], None), "inference"),
    ):
        with pytest.raises(DoesNotApply, match=why):
            techniques.prepare(Job("cuda"), make, ["sync_batchnorm"])
