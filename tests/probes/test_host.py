"""Host memory against the kernel's own files, the limits of control groups in a made-up tree, and the warning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from memlab.probes import host
from memlab.probes.host import Growth, HostMemory, HostReading, low_memory
from memlab.units import GiB, KiB, MiB

MACHINE = SimpleNamespace(total=64 * GiB, available=40 * GiB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine of 64 GiB with 40 GiB available."""
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: MACHINE)
    return MACHINE


def group(root: Path, path: str, **files: str) -> None:
    for name, text in files.items():
        target = root / "sys/fs/cgroup" / path / name.replace("_dot_", ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def own_group(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(line)


def v2(root: Path, path: str, limit: str, used: int, cache: int = 0) -> None:
    stat = f"anon 5\nfile 7\ninactive_file {cache}\nactive_file 3\n"
    group(root, path, memory_dot_max=f"{limit}\n", memory_dot_current=f"{used}\n", memory_dot_stat=stat)


def v1(root: Path, path: str, limit: int, used: int, cache: int) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
    files = {"memory_dot_limit_in_bytes": f"{limit}\n", "memory_dot_usage_in_bytes": f"{used}\n"}
    group(root, f"memory/{path}", memory_dot_stat=stat, **files)


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


def test_without_control_groups_the_machine_is_the_limit(machine: SimpleNamespace, tmp_path: Path) -> None:
    reading = HostMemory(tmp_path).read()
    assert (reading.available_bytes, reading.total_bytes, reading.limit_source) == (40 * GiB, 64 * GiB, "machine")


def test_a_v2_limit_counts_without_the_cache_it_can_drop(machine: SimpleNamespace, tmp_path: Path) -> None:
    own_group(tmp_path, "0::/user.slice/hub.service\n")
    v2(tmp_path, "user.slice/hub.service", str(4 * GiB), 3 * GiB, cache=GiB)
    reading = HostMemory(tmp_path).read()
    assert (reading.available_bytes, reading.total_bytes, reading.limit_source) == (2 * GiB, 4 * GiB, "cgroup v2")


def test_a_limit_of_an_ancestor_binds_too(machine: SimpleNamespace, tmp_path: Path) -> None:
    own_group(tmp_path, "0::/hub/user/kernel\n")
    v2(tmp_path, "hub/user/kernel", "max", GiB)
    v2(tmp_path, "hub/user", str(8 * GiB), GiB)
    v2(tmp_path, "hub", str(16 * GiB), 15 * GiB)
    reading = HostMemory(tmp_path).read()
    assert (reading.available_bytes, reading.total_bytes) == (GiB, 16 * GiB)


def test_a_container_finds_its_limit_at_the_root_of_the_mount(machine: SimpleNamespace, tmp_path: Path) -> None:
    own_group(tmp_path, "4:cpu,memory:/docker/0123456789ab\n0::/\n")
    v1(tmp_path, "", 2 * GiB, GiB + 512 * MiB, 512 * MiB)
    reading = HostMemory(tmp_path).read()
    assert (reading.available_bytes, reading.total_bytes, reading.limit_source) == (GiB, 2 * GiB, "cgroup v1")


@pytest.mark.parametrize("limit", [9223372036854771712, 64 * GiB])
def test_a_v1_limit_beyond_the_machine_is_none(machine: SimpleNamespace, tmp_path: Path, limit: int) -> None:
    own_group(tmp_path, "4:memory:/\n")
    v1(tmp_path, "", limit, 63 * GiB, 0)
    assert HostMemory(tmp_path).read().limit_source == "machine"


def test_a_full_machine_counts_before_a_roomy_limit(machine: SimpleNamespace, tmp_path: Path) -> None:
    own_group(tmp_path, "0::/\n")
    v2(tmp_path, "", str(60 * GiB), GiB)
    assert HostMemory(tmp_path).read().available_bytes == 40 * GiB


def test_a_limit_that_vanishes_leaves_the_machine(machine: SimpleNamespace, tmp_path: Path) -> None:
    own_group(tmp_path, "0::/job\n")
    v2(tmp_path, "job", str(4 * GiB), GiB)
    memory = HostMemory(tmp_path)
    assert memory.read().limit_source == "cgroup v2"
    (tmp_path / "sys/fs/cgroup/job/memory.current").unlink()
    assert memory.read().limit_source == "machine"


def test_more_use_than_the_limit_is_nothing_left(machine: SimpleNamespace, tmp_path: Path) -> None:
    own_group(tmp_path, "0::/\n")
    v2(tmp_path, "", str(GiB), 2 * GiB)
    assert HostMemory(tmp_path).read().available_bytes == 0


@pytest.mark.parametrize("line", ["", "nonsense\n", "0::/../../etc\n", "1:name=systemd:/x\n"])
def test_odd_control_group_files_do_no_harm(machine: SimpleNamespace, tmp_path: Path, line: str) -> None:
    own_group(tmp_path, line)
    assert HostMemory(tmp_path).read().limit_source == "machine"


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


def test_fast_growth_warns_early_and_says_when() -> None:
    reading = HostReading(GiB, 20 * GiB, 64 * GiB)
    assert low_memory(reading, 1.9 * GiB) is None
    assert low_memory(reading, -5.0 * GiB) is None
    warning = low_memory(reading, 4.0 * GiB)
    assert warning is not None
    assert "20.0" in warning
    assert "about 5.0 s" in warning
    assert "\n" not in warning


def test_the_warning_names_the_limit_of_a_container() -> None:
    warning = low_memory(HostReading(GiB, 100 * MiB, 4 * GiB, "cgroup v2"))
    assert warning is not None
    assert "cgroup v2" in warning


def test_growth_is_the_slope_of_the_last_two_seconds() -> None:
    growth = Growth()
    rates = [growth.update(tick / 10, 10 * GiB - tick * 100 * MiB) for tick in range(60)]
    assert rates[:5] == [0.0] * 5  # too short to tell
    assert rates[5:] == pytest.approx([1000 * MiB] * 55)


def test_growth_forgets_what_was_long_ago() -> None:
    growth = Growth()
    growth.update(0.0, 10 * GiB)
    growth.update(1.0, 2 * GiB)
    assert [growth.update(2.0 + tick, 2 * GiB) for tick in range(3)] == [4 * GiB, 0.0, 0.0]
