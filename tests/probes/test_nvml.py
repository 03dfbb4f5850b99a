"""NVML: every way it can be absent, denied or wrong with a fake pynvml; the real pynvml on the simulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from processes import python
from simulated_machines import machine_at

from memlab.probes import counters
from memlab.probes.counters import DeviceReading, Nvml
from memlab.units import GiB, MiB

UUID = "faceface-0000-4000-8000-000000000000"
CARD = f"GPU-{UUID}"
OURS, OTHER = os.getpid(), 1_000_001


class FakePynvml(ModuleType):
    """As much of pynvml as is used: devices by id, lists of processes, errors on demand, a count of open references."""

    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.references = 0
        self.calls: list[str] = []
        self.errors: dict[str, str] = {}
        self.ids = {CARD: "card"}
        self.memory = {"card": (3 * GiB, 8 * GiB), "slice 1": (3 * GiB, 8 * GiB), "slice 2": (GiB, 4 * GiB)}
        self.compute: list[tuple[int, int | None]] = [(OURS, GiB), (OTHER, GiB)]
        self.graphics: list[tuple[int, int | None]] = []
        self.mig: dict[str, list[str]] = {}

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise nvml_error(self.errors[name])

    def nvmlInit(self) -> None:
        self._enter("nvmlInit")
        self.references += 1

    def nvmlShutdown(self) -> None:
        self._enter("nvmlShutdown")
        self.references -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._enter("nvmlDeviceGetHandleByUUID")
        if uuid not in self.ids:
            raise nvml_error("NVMLError_NotFound")
        return self.ids[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        return self.nvmlDeviceGetHandleByUUID(bus_id)

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        return int(handle.startswith("slice"))

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle not in self.mig:
            raise nvml_error("NVMLError_NotSupported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index >= len(self.mig[handle]):
            raise nvml_error("NVMLError_NotFound")
        return self.mig[handle][index]

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> SimpleNamespace:
        self._enter("nvmlDeviceGetMemoryInfo")
        used, total = self.memory[handle]
        found = {"total": total + RESERVED, "free": total - used}
        # As an H200 with driver 580 answered: the first version counts what the driver reserves as used, the second has it apart.
        return SimpleNamespace(
            **found, **({"used": used, "reserved": RESERVED} if version else {"used": used + RESERVED})
        )

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        self._enter("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.graphics]


def nvml_error(name: str) -> Exception:
    return type(name, (Exception,), {})("as the driver puts it")


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> FakePynvml:
    """A fake driver, and a torch that says CUDA is up with one device holding 512 MiB."""
    module = FakePynvml()
    properties = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(counters, "cuda_counters", lambda device: {"reserved": 512 * MiB})
    monkeypatch.setattr(counters, "has_context", lambda device: True)
    monkeypatch.setattr(counters, "runtime_memory", lambda device: (6 * GiB, 8 * GiB))
    return module


RESERVED = 300 * MiB
RUNTIME = DeviceReading(2 * GiB, 8 * GiB)
SEEN = DeviceReading(3 * GiB, 8 * GiB, GiB, GiB)


def seen(own: int | None, others: int | None) -> DeviceReading:
    return DeviceReading(3 * GiB, 8 * GiB, own, others)


def names(opened: Nvml) -> set[str]:
    return {gap.name for gap in opened.gaps}


def test_a_device_is_read_with_own_and_others_and_looked_up_once(pynvml: FakePynvml) -> None:
    with Nvml.open() as opened:
        assert opened.read(0) == opened.read(0) == SEEN
        assert opened.gaps == ()
    assert pynvml.calls.count("nvmlDeviceGetHandleByUUID") == 2  # as a slice, then as a card; not again


def test_a_driver_with_the_first_version_only_counts_its_own_as_used(pynvml, monkeypatch):
    monkeypatch.delattr(FakePynvml, "nvmlMemory_v2")
    with Nvml.open() as opened:
        assert opened.read(0) == DeviceReading(3 * GiB + RESERVED, 8 * GiB + RESERVED, GiB, GiB)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("NVMLError_LibraryNotFound", "not on this machine"),
        ("NVMLError_DriverNotLoaded", "not loaded"),
        ("NVMLError_LibRmVersionMismatch", "differ in version"),
        ("NVMLError_NoPermission", "denied"),
        ("NVMLError_Unknown", "as the driver puts it"),
        ("OSError", "as the driver puts it"),
        ("missing package", "nvidia-ml-py"),
        ("ROCm", "ROCm"),
    ],
)
def test_nvml_that_does_not_open_is_one_named_gap(pynvml: FakePynvml, monkeypatch: Any, error: str, words: str) -> None:
    if error == "missing package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif error == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "7.1")
    else:
        pynvml.errors["nvmlInit"] = error
    opened = Nvml.open()
    assert opened.read(0) == RUNTIME
    opened.close()
    (gap,) = opened.gaps
    assert gap.name == "nvml"
    assert words in gap.text
    assert "cannot be distinguished" in gap.text
    assert pynvml.references == 0
    assert set(pynvml.calls) <= ({"nvmlInit"} if error != "ROCm" else set())


def test_nothing_is_asked_before_cuda_is_up(pynvml: FakePynvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with Nvml.open() as opened:
        assert opened.read(0) == DeviceReading()
        assert opened.gaps == ()
    assert pynvml.calls == ["nvmlInit", "nvmlShutdown"]


def test_a_device_that_vanishes_falls_back_and_is_left_alone(pynvml: FakePynvml) -> None:
    with Nvml.open() as opened:
        assert opened.read(0) == SEEN
        pynvml.errors["nvmlDeviceGetMemoryInfo"] = "NVMLError_GpuIsLost"
        assert [opened.read(0) for _ in range(5)] == [RUNTIME] * 5
        assert names(opened) == {"nvml"}
        asked = pynvml.calls.count("nvmlDeviceGetMemoryInfo")
        opened.read(0)
        assert pynvml.calls.count("nvmlDeviceGetMemoryInfo") == asked


def test_a_passing_failure_is_named_and_forgiven(pynvml: FakePynvml) -> None:
    with Nvml.open() as opened:
        for _ in range(3):
            pynvml.errors["nvmlDeviceGetMemoryInfo"] = "NVMLError_Unknown"
            assert [opened.read(0), opened.read(0)] == [RUNTIME, RUNTIME]
            pynvml.errors.clear()
            assert opened.read(0).own_bytes == GiB
        assert names(opened) == {"nvml"}


def test_a_shutdown_by_others_is_not_followed_by_ours(pynvml: FakePynvml) -> None:
    opened = Nvml.open()
    assert opened.read(0) == SEEN
    pynvml.errors["nvmlDeviceGetMemoryInfo"] = "NVMLError_Uninitialized"
    assert opened.read(0) == RUNTIME
    opened.close()
    assert "nvmlShutdown" not in pynvml.calls
    assert "other code" in opened.gaps[0].text


def test_close_gives_back_exactly_one_reference_and_in_a_forked_child_none(
    pynvml: FakePynvml, monkeypatch: Any
) -> None:
    pynvml.nvmlInit()  # somebody else's
    opened = Nvml.open()
    with monkeypatch.context() as child:
        child.setattr(counters.os, "getpid", lambda: OURS + 1)
        assert opened.read(0) == DeviceReading()
        opened.close()
    assert pynvml.references == 2
    opened.close()
    opened.close()
    assert pynvml.references == 1


def test_a_failing_shutdown_is_a_gap_and_then_the_runtime_is_read(pynvml: FakePynvml) -> None:
    pynvml.errors["nvmlShutdown"] = "NVMLError_Unknown"
    opened = Nvml.open()
    opened.close()
    assert names(opened) == {"nvml"}
    assert opened.read(0) == RUNTIME


@pytest.mark.parametrize(
    ("compute", "graphics", "expected", "gaps"),
    [
        ([], [], (None, None), {"own process"}),  # a container that hides the list
        ([(OTHER, GiB)], [], (None, None), {"own process"}),  # the host's pids
        ([(OURS, None)], [], (None, None), {"own process"}),  # WDDM, MIG
        ([(OURS, 0)], [], (None, None), {"own process"}),  # a driver that translates the pid and loses the size
        ([(OURS, 100 * MiB)], [], (None, None), {"own process"}),  # less than PyTorch holds: another with our number
        ([(OURS, 4 * GiB)], [], (None, None), {"own process"}),  # more than the device has in use
        ([(OURS, GiB), (OTHER, None)], [], (GiB, None), {"other processes"}),
        # Entries of one list add up; a process in two lists counts once.
        (
            [(OURS, 512 * MiB), (OURS, 256 * MiB), (OTHER, GiB)],
            [(OTHER, GiB), (1_000_002, 64 * MiB), (OURS, None)],
            (768 * MiB, GiB + 64 * MiB),
            set(),
        ),
    ],
)
def test_own_memory_is_never_guessed(pynvml: FakePynvml, compute, graphics, expected, gaps) -> None:
    pynvml.compute, pynvml.graphics = compute, graphics
    with Nvml.open() as opened:
        assert opened.read(0) == seen(*expected)
        assert names(opened) == gaps


def test_denied_process_lists_leave_the_total(pynvml: FakePynvml) -> None:
    pynvml.errors["nvmlDeviceGetComputeRunningProcesses"] = "NVMLError_NoPermission"
    with Nvml.open() as opened:
        assert opened.read(0) == seen(None, None)
        assert names(opened) == {"own process"}


def test_sizes_that_changed_between_two_calls_are_looked_at_again(pynvml: FakePynvml, monkeypatch: Any) -> None:
    held = iter([2 * GiB, 2 * GiB, 512 * MiB, 512 * MiB])
    monkeypatch.setattr(counters, "cuda_counters", lambda device: {"reserved": next(held)})
    with Nvml.open() as opened:
        assert opened.read(0) == SEEN
        assert opened.gaps == ()


def test_without_a_context_the_own_part_is_nothing(pynvml: FakePynvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "has_context", lambda device: False)
    monkeypatch.setattr(counters, "cuda_counters", lambda device: {"reserved": 0})
    pynvml.compute = [(OTHER, GiB)]
    with Nvml.open() as opened:
        assert opened.read(0) == seen(0, GiB)


@pytest.mark.parametrize(
    ("ids", "mig", "expected"),
    [
        ({"00000000:3B:00.0": "card"}, [], SEEN),  # the PCI address finds what the UUID does not
        ({}, [], RUNTIME),
        ({f"MIG-{UUID}": "slice 1"}, ["slice 1"], SEEN),
        ({CARD: "card"}, ["slice 1"], SEEN),
        ({CARD: "card"}, ["slice 1", "slice 2"], RUNTIME),  # which of the two is not guessed
    ],
)
def test_a_device_is_found_and_a_mig_slice_is_read_and_not_its_card(pynvml: FakePynvml, ids, mig, expected) -> None:
    pynvml.ids, pynvml.mig = ids, {"card": mig} if mig else {}
    if mig:
        pynvml.memory["card"] = (70 * GiB, 80 * GiB)
    with Nvml.open() as opened:
        assert opened.read(0) == expected
        assert names(opened) == (set() if expected == SEEN else {"nvml"})


def test_a_runtime_that_fails_too_is_a_gap(pynvml: FakePynvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(counters, "runtime_memory", fail)
    pynvml.ids = {}
    with Nvml.open() as opened:
        assert opened.read(0) == DeviceReading()
        assert names(opened) == {"nvml", "device used"}


HOLDING = """
import sys, torch
held = torch.empty(600 << 20, dtype=torch.uint8, device="cuda")
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.mark.simulated
def test_another_process_on_the_device_is_told_apart(tmp_path) -> None:
    machine = machine_at(tmp_path / "gpu", context_mb=100)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": {**os.environ, **machine}}
    with subprocess.Popen([sys.executable, "-c", HOLDING], **pipes) as other:
        assert other.stdout.readline() == "holding\n"
        printed = python(
            "-c",
            "import torch; from memlab.probes.counters import Nvml\n"
            "held = torch.empty(200 << 20, dtype=torch.uint8, device='cuda')\n"
            "with Nvml.open() as nvml: r = nvml.read(0); print(r.own_bytes, r.others_bytes, r.used_bytes, nvml.gaps)",
            **machine,
        )
        other.stdin.close()
        other.wait()
    own, others, used, gaps = printed.strip().split(" ", 3)
    assert (int(own), int(others), int(used)) == (300 * MiB, 700 * MiB, 1000 * MiB)
    assert gaps == "()"


@pytest.mark.simulated
def test_a_renumbered_device_is_the_right_one() -> None:
    printed = python(
        "-c",
        "import torch; from memlab.probes.counters import Nvml\n"
        "held = torch.empty(200 << 20, dtype=torch.uint8, device='cuda:0')\n"
        "with Nvml.open() as nvml: print(nvml.read(0).own_bytes, nvml.read(1).own_bytes)",
        gpu={"devices": 3, "context_mb": 100},
        CUDA_VISIBLE_DEVICES="2,0",
    )
    assert printed.split() == [str(300 * MiB), "0"]


@pytest.mark.simulated
def test_reading_neither_starts_cuda_nor_makes_a_context_and_real_references_are_balanced() -> None:
    printed = python(
        "-c",
        "import pynvml, torch; from memlab.probes.counters import Nvml, cuda_devices, cuda_counters\n"
        "pynvml.nvmlInit()\n"
        "nvml = Nvml.open(); nvml.read(0); cuda_counters(0)\n"
        "print(torch.cuda.is_initialized())\n"
        "held = torch.empty(1, device='cuda:0'); nvml.read(1); cuda_counters(1); nvml.close(); nvml.read(1)\n"
        "print(cuda_devices())\n"
        "first = Nvml.open(); second = Nvml.open(); first.close(); first.close(); second.close()\n"
        "print(pynvml._nvmlLib_refcount)",
        gpu={"devices": 2},
    )
    assert printed.split("\n")[:3] == ["False", "(0,)", "1"]
