"""The machine's file: its layout byte for byte, what is refused, and devices from cards."""

from __future__ import annotations

import struct

import pytest
from processes import REPOSITORY, ran

from memlab.errors import MemlabError, SimulatedGpuError
from memlab.prediction.cards import Card, cards, find
from memlab.simulated_gpu import machine
from memlab.simulated_gpu.from_card import card_of, device_of
from memlab.simulated_gpu.machine import Machine, SimulatedDevice
from memlab.units import GiB, MiB

ONE = SimulatedDevice("RTX 4060 é", 8 * GiB, 300 * MiB, (8, 9), 24)
TWO = SimulatedDevice("Other", 4 * GiB, 0, (12, 0), 170)


def test_the_layout_is_the_librarys():
    data = Machine((ONE, TWO), convolution_workspace_bytes=5 * MiB).to_bytes()
    assert len(data) == 45056
    assert data[:8] == b"MEMLSIM1"
    assert struct.unpack_from("<IIQ", data, 8) == (2, 0, 5 * MiB)
    assert data[24:64] == bytes(40)
    for start, one in ((64, ONE), (192, TWO)):
        assert data[start : start + 64].rstrip(b"\0").decode() == one.name
        assert struct.unpack_from("<QQ", data, start + 64) == (one.total_bytes, one.context_bytes)
        assert struct.unpack_from("<III", data, start + 80) == (*one.compute_capability, one.multiprocessors)
        assert data[start + 92 : start + 128] == bytes(36)
    assert data[320:] == bytes(45056 - 320)


@pytest.mark.parametrize("made", [Machine((ONE,)), Machine((ONE, TWO) * 4), Machine((TWO,), 7)])
def test_what_is_written_is_read(made, tmp_path):
    (tmp_path / "m").write_bytes(made.to_bytes())
    assert machine.read(tmp_path / "m") == made


@pytest.mark.parametrize(
    "data",
    [
        b"", b"MEMLSIM1", bytes(45056), b"MEMLSIM2" + bytes(45048), Machine((ONE,)).to_bytes()[:-1],
        b"MEMLSIM1" + b"\x09" + bytes(45047), b"MEMLSIM1" + bytes(45048), b"MEMLSIM1" + b"\x01" + bytes(45047),
        b"MEMLSIM1" + b"\xff" * 45048,
    ],
)  # fmt: skip
def test_what_is_no_machine_gives_one_line(data, tmp_path):
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(SimulatedGpuError) as error:
        machine.read(tmp_path / "m")
    assert "\n" not in str(error.value)
    with pytest.raises(SimulatedGpuError, match="cannot read"):
        machine.read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"name": " "}, "needs a name"),
        ({"name": "é" * 32}, "at most 63 bytes"),
        ({"name": "a\nb"}, "needs a name"),
        ({"total_bytes": MiB}, "of memory, got 1.00 MiB"),
        ({"total_bytes": 2 << 40}, "of memory, got 2.00 TiB"),
        ({"context_bytes": 8 * GiB}, "context must be smaller than the 8.00 GiB"),
        ({"context_bytes": -1}, "context must be smaller"),
        ({"compute_capability": (7, 0)}, "kernels for capability 7.5 to 12.1, and RTX 4060 é has 7.0"),
        ({"compute_capability": (13, 0)}, "has 13.0"),
        ({"multiprocessors": 0}, "multiprocessors must be"),
    ],
)
def test_a_device_that_cannot_be_is_refused(changed, why):
    facts = {name: getattr(ONE, name) for name in ONE.__slots__}
    with pytest.raises(SimulatedGpuError, match=why):
        SimulatedDevice(**{**facts, **changed})


@pytest.mark.parametrize("count", [0, 9])
def test_a_machine_has_one_to_eight_devices(count):
    with pytest.raises(SimulatedGpuError, match=f"1 to 8 devices, got {count}"):
        Machine((ONE,) * count)


def test_a_card_is_taken_at_the_cautious_end():
    card = find("RTX 4060")
    device = device_of(card)
    assert (device.total_bytes, device.context_bytes) == (7848 * MiB, 180 * MiB)
    assert 0 <= card.usable_range.low - device.total_bytes < MiB
    assert 0 <= card.context_bytes.high - device.context_bytes < MiB
    assert (device.name, device.compute_capability, device.multiprocessors) == ("RTX 4060 (simulated)", (8, 9), 24)
    assert device_of(card, 0).context_bytes == 0


def test_a_gpu_of_which_only_the_size_is_known_is_named_by_its_capability():
    device = device_of(card_of(4 * GiB, (8, 6)))
    assert (device.name, device.total_bytes) == ("sm_86 GPU (simulated)", 4 * GiB)


def test_every_card_of_the_catalogue_is_simulated_or_refused_with_a_reason():
    refused = {}
    for name, card in cards.items():
        try:
            device_of(card)
        except SimulatedGpuError as error:
            refused[name] = str(error)
    assert all("ROCm" in why or "capability 7.5" in why for why in refused.values())
    assert {"P100", "V100 16GB"} <= set(refused) < set(cards)


def test_a_given_total_is_what_pytorch_sees():
    assert device_of(card_of(8 * GiB, (8, 9))).total_bytes == 8 * GiB


def test_a_long_name_is_cut():
    assert device_of(Card("é" * 100, 8 * GiB, (8, 6))).name == "é" * 25 + " (simulated)"


def test_a_misspelt_card_gets_its_nearest_names():
    with pytest.raises(MemlabError, match=r"Did you mean .*RTX 4060"):
        find("RTX 4O60")


def test_a_process_is_not_simulated_by_the_variable_alone():
    code = "from memlab.simulated_gpu import is_simulated; print(is_simulated())"
    assert ran(REPOSITORY, "-c", code, MEMLAB_SIMULATED_GPU="/some/machine")[:2] == (0, "False\n")
