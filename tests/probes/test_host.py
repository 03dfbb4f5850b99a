"""Host memory against the kernel's own files, the limits of control groups in a made-up tree, and the warning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memlab.probes import host
from memlab.probes.host import HostGrowth, HostMemory, HostReading, low_memory
from memlab.units import GiB, KiB, MiB

MACHINE = SimpleNamespace(total=64 * GiB, available=40 * GiB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine of 64 GiB with 40 GiB available."""
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: MACHINE)
    return MACHINE


FILES = {
    "cgroup v2": ("", "memory.max", "memory.current", "inactive_file"),
    "cgroup v1": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def group(root: Path, version: str, path: str, limit: int | str, used: int, cache: int = 0) -> None:
    """A control group with a limit, what is used, and how much of that is file cache."""
    mount, limit_file, usage_file, name = FILES[version]
    folder = root / "sys/fs/cgroup" / mount / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / usage_file).write_text(f"{used}\n")
    others = "anon 5\nfile 7\nactive_file 3\n" + ("inactive_file 1\n" if version == "cgroup v1" else "")
    (folder / "memory.stat").write_text(f"{others}{name} {cache}\nshmem 9\n")


def own_group(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)


def test_this_process_is_read_from_the_machine() -> None:
    reading = HostMemory().read()
    (pages,) = [int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line]
    assert reading.rss_bytes == pytest.approx(pages * KiB, rel=0.05)
    assert 0 < reading.available_bytes < reading.total_bytes <= psutil.virtual_memory().total
    assert reading.used_bytes == reading.total_bytes - reading.available_bytes


def test_memory_that_is_touched_becomes_resident() -> None:
    memory = HostMemory()
    before = memory.read().rss_bytes
    held = bytearray(64 * MiB)
    held[:: 4 * KiB] = b"x" * (len(held) // (4 * KiB))
    assert memory.read().rss_bytes - before > 50 * MiB


V1, V2 = "cgroup v1", "cgroup v2"
ROOMY = (40 * GiB, 64 * GiB, "machine")


@pytest.mark.parametrize(
    ("line", "groups", "expected"),
    [
        (
            "0::/user.slice/hub.service\n",
            [(V2, "user.slice/hub.service", 4 * GiB, 3 * GiB, GiB)],
            (2 * GiB, 4 * GiB, V2),
        ),
        (  # a limit of an ancestor binds too
            "0::/hub/user/kernel\n",
            [(V2, "hub/user/kernel", "max", GiB), (V2, "hub/user", 8 * GiB, GiB), (V2, "hub", 16 * GiB, 15 * GiB)],
            (GiB, 16 * GiB, V2),
        ),
        (  # a container finds its limit at the root of the mount
            "4:cpu,memory:/docker/0123456789ab\n0::/\n",
            [(V1, "", 2 * GiB, GiB + 512 * MiB, 512 * MiB)],
            (GiB, 2 * GiB, V1),
        ),
        ("4:memory:/\n", [(V1, "", 9223372036854771712, 63 * GiB)], ROOMY),  # what version 1 writes for no limit
        ("4:memory:/\n", [(V1, "", 64 * GiB, 63 * GiB)], ROOMY),
        ("0::/\n", [(V2, "", 60 * GiB, GiB)], ROOMY),  # a full machine counts before a roomy limit
        ("0::/\n", [(V2, "", GiB, 2 * GiB)], (0, GiB, V2)),  # more use than the limit is nothing left
        *((line, [], ROOMY) for line in ("", "nonsense\n", "0::/../../etc\n", "1:name=systemd:/x\n")),
    ],
)
def test_the_tightest_limit_counts_without_the_cache_it_can_drop(machine, tmp_path, line, groups, expected) -> None:
    own_group(tmp_path, line)
    for facts in groups:
        group(tmp_path, *facts)
    reading = HostMemory(tmp_path).read()
    assert (reading.available_bytes, reading.total_bytes, reading.limit_source) == expected


def test_without_control_groups_or_when_one_vanishes_the_machine_is_the_limit(machine, tmp_path: Path) -> None:
    assert HostMemory(tmp_path).read().limit_source == "machine"
    own_group(tmp_path, "0::/job\n")
    group(tmp_path, V2, "job", 4 * GiB, GiB)
    memory = HostMemory(tmp_path)
    assert memory.read().limit_source == V2
    (tmp_path / "sys/fs/cgroup/job/memory.current").unlink()
    assert memory.read().limit_source == "machine"


@pytest.mark.parametrize(
    ("total", "available", "warns"),
    [
        (64 * GiB, 4 * GiB, False),
        (64 * GiB, 3 * GiB, True),  # below 5 %
        (8 * GiB, 600 * MiB, False),
        (8 * GiB, 500 * MiB, True),  # below 512 MiB
        (GiB, 400 * MiB, False),  # a small container is not in trouble from the start
        (GiB, 250 * MiB, True),
    ],
)
def test_the_warning_comes_before_the_end(total: int, available: int, warns: bool) -> None:
    assert (low_memory(HostReading(GiB, available, total)) is not None) is warns


def test_fast_growth_warns_early_and_says_when_and_whose_limit_it_is() -> None:
    reading = HostReading(GiB, 20 * GiB, 64 * GiB)
    assert low_memory(reading, 1.9 * GiB) is low_memory(reading, -5.0 * GiB) is None
    warning = low_memory(reading, 4.0 * GiB) or ""
    assert "20.0" in warning and "about 5.0 s" in warning and "\n" not in warning
    assert "cgroup v2" in (low_memory(HostReading(GiB, 100 * MiB, 4 * GiB, "cgroup v2")) or "")


def test_growth_is_the_slope_of_the_last_two_seconds() -> None:
    growth = HostGrowth()
    rates = [growth.update(tick / 10, 10 * GiB - tick * 100 * MiB) for tick in range(60)]
    assert rates[:5] == [0.0] * 5  # too short to tell
    assert rates[5:] == pytest.approx([1000 * MiB] * 55)
    growth = HostGrowth()
    growth.update(0.0, 10 * GiB)
    growth.update(1.0, 2 * GiB)
    assert [growth.update(2.0 + tick, 2 * GiB) for tick in range(3)] == [4 * GiB, 0.0, 0.0]
