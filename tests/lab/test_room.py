"""A run that the host's memory may not bear is refused before it, in one line."""

from __future__ import annotations

import pytest
from lab_samples import tiny

from memlab import Lab
from memlab.lab import room
from memlab.probes.host import HostMemory, HostReading
from memlab.session.runs import runs
from memlab.units import GiB, MiB
from memlab.workloads.workload import Workload

SIZED = Workload("sized", "a test", tiny, {"tiny": {}, "laptop": {}, "card": {}})


@pytest.fixture
def host(monkeypatch):
    """Sets what is free on the host."""

    def free(count: int) -> None:
        monkeypatch.setattr(HostMemory, "read", lambda self: HostReading(0, count, 16 * GiB))

    return free


def test_too_little_free_memory_is_refused_and_can_be_allowed(host):
    host(100 * MiB)
    lab = Lab(SIZED, size="tiny", steps=1)
    with pytest.raises(room.TooLarge, match=r"should have 1.00 GiB on the host, and 100.0 MiB is free"):
        lab.run()
    assert lab.rows == ()
    assert "kernel may be killed" in lab.problem
    assert lab.run(force=True).peak_bytes > 0


def test_a_prediction_needs_no_room(host):
    host(100 * MiB)
    assert Lab(SIZED, size="tiny", steps=1, card="RTX 4060").run().allocated_bytes[0] > 0


def test_the_need_of_a_large_one_is_predicted_first(host):
    host(6 * MiB)
    lab = Lab(SIZED, size="card", steps=1)
    before = list(runs)
    with pytest.raises(room.TooLarge, match=r"needs about 2\d.\d+ MiB on the host, and 6.00 MiB is free"):
        lab.run()
    assert list(runs) == before
    host(GiB // 2)
    assert lab.run().peak_bytes > 0  # less than is asked of a laptop's size, as the need is known
