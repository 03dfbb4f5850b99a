"""Which rank a process is of which job."""

from __future__ import annotations

import pytest
from processes import python

from memlab.probes.job_rank import job_rank

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


@pytest.fixture
def given(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def give(**variables: str) -> dict | None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return job_rank()

    return give


def test_a_process_of_no_job(given):
    assert given() is None
    assert given(RANK="3") is None
    assert given(WORLD_SIZE="3") is None  # no rank is below it
    assert given(RANK="x", WORLD_SIZE="4") is None


def test_what_torchrun_says(given):
    found = given(RANK="3", WORLD_SIZE="4", TORCHELASTIC_RESTART_COUNT="2")
    assert found is not None
    assert {key: found[key] for key in ("rank", "world_size", "attempt")} == {"rank": 3, "world_size": 4, "attempt": 2}


def test_jobs_differ_by_their_id_and_ranks_of_one_do_not(given):
    first, other_rank = (given(RANK=rank, WORLD_SIZE="4", TORCHELASTIC_RUN_ID="a")["job"] for rank in "01")
    assert first == other_rank
    assert given(TORCHELASTIC_RUN_ID="b")["job"] != first


def test_the_digest_discloses_nothing(given):
    found = given(RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="secret", MASTER_ADDR="host-of-mine")
    assert "secret" not in str(found)
    assert "host-of-mine" not in str(found)


def test_a_process_group_decides():
    code = """
import torch
from memlab.probes.job_rank import job_rank
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
print(job_rank()["world_size"])
torch.distributed.destroy_process_group()
"""
    assert python("-c", code, RANK="3", WORLD_SIZE="4").strip() == "1"
