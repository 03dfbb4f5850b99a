"""Cards: every figure lies where its sources say, names are found as people write them, one's own are checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from memlab.errors import PredictionError
from memlab.prediction import calibration_file
from memlab.prediction.cards import Card, cards, find, name_of
from memlab.prediction.catalogue import CARDS, CONTEXTS, NOT_ON_A_THREAD
from memlab.units import GiB, MiB


@pytest.fixture(autouse=True)
def no_calibration_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_CONFIG", str(tmp_path))


RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.mark.parametrize("row", CARDS, ids=[row[0] for row in CARDS])
def test_a_card_is_possible(row):
    name, gib, capability, multiprocessors, _, seen = row
    card = cards[name]
    assert card.total_bytes == gib * GiB
    assert 0.9 * card.total_bytes < card.usable_bytes <= card.usable_high_bytes <= card.total_bytes
    assert 50 * MiB < card.context_bytes[0] < card.context_bytes[1] <= 2 * GiB
    assert 10 < multiprocessors < 400
    assert card.compute_capability == capability
    assert card.usable_source
    assert card.context_source
    for figure, address in seen:
        bytes_seen = figure * GiB if isinstance(figure, float) else figure
        assert card.usable_bytes <= bytes_seen <= card.usable_high_bytes
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", address)


def test_the_context_holds_every_size_that_was_seen():
    for name, gib, address in CONTEXTS:
        low, high = cards[name].context_bytes
        assert low <= gib * GiB + 0.005 * GiB, name
        assert gib * GiB <= high, name
        assert address in cards[name].context_source


def test_an_h200_is_as_one_was_measured():
    found = json.loads((RESULTS / "gpu-nvidia-h200-torch2.11.0.json").read_text())
    card = cards["H200"]
    assert card.usable_bytes <= found["calibration"]["total_memory_bytes"] <= card.usable_high_bytes
    for row in found["the context, operation by operation"]["lazy loading"].values():
        assert card.context_bytes.low <= row["nvml own_bytes"] - row["reserved_bytes"] <= card.context_bytes.high


def test_the_cards_that_were_promised_are_there():
    assert NOT_ON_A_THREAD.keys() <= set(cards)
    assert calibration_file.kept() == (), "nothing was read of this machine"
    sizes = {card.total_bytes // GiB for card in cards.values()}
    assert {6, 8, 10, 12, 16, 24, 32, 40, 80, 141, 180, 192} <= sizes
    for name in ("T4", "V100", "P100", "A10", "A10G", "L4", "L40S", "A100", "H100", "H200", "B200", "MI300X"):
        assert find(name)


@pytest.mark.parametrize(
    ("written", "name"),
    {
        "RTX 4060": "RTX 4060", "rtx4060": "RTX 4060", "4060": "RTX 4060", "NVIDIA GeForce RTX 4060": "RTX 4060",
        "nvidia geforce rtx 4060 laptop gpu": "RTX 4060", "RTX 4060 Ti 16 GB": "RTX 4060 Ti 16GB",
        "4060 ti 16gib": "RTX 4060 Ti 16GB", "rtx 4060 ti": "RTX 4060 Ti", "RTX 4090 24GB": "RTX 4090",
        "Tesla T4": "T4", "colab": "T4", "NVIDIA A100-SXM4-80GB": "A100 80GB", "A100 80GB": "A100 80GB",
        "NVIDIA H100 80GB HBM3": "H100 80GB", "Tesla V100-SXM2-32GB": "V100 32GB", "Tesla P100-PCIE-16GB": "P100",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada", "AMD Instinct MI300X": "MI300X", "A4000": "RTX A4000",
        "RTX-3080-10GB": "RTX 3080", "3080 12GB": "RTX 3080 12GB", "NVIDIA L4": "L4", "l40s": "L40S",
    }.items(),
)  # fmt: skip
def test_cards_are_found_as_people_write_them(written, name):
    assert find(written).name == name == name_of(written)


def test_no_name_means_two_cards_and_one_of_two_sizes_says_which_was_taken():
    seen: dict[str, str] = {}
    for row in CARDS:
        for written in (row[0], *row[4]):
            assert name_of(written) == row[0], written
            assert seen.setdefault(written.lower(), row[0]) == row[0]
    assert "A100 80GB too" in " ".join(find("a100").assumptions)
    assert not [text for text in find("A100 40GB").assumptions if "too" in text]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("rtx 4061", "Did you mean"), ("RTX 9999", "RTX 4060, T4"), ("", "A size such as 8GiB"), (None, "'None'"),
        ("8", "'8'"), ("512 KiB", "no card is below"), (b"x", "no card"), ("x" * 10_000, "no card"),
            ("8TiBs", "neither a card nor a size"),
        ("RTX 40900", "RTX 4090"),
    ],
)  # fmt: skip
def test_what_is_no_card_is_refused_in_one_line(written, words):
    with pytest.raises(PredictionError, match=re.escape(words)) as caught:
        find(written)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_size_is_a_card_with_assumptions():
    card = find("8GiB")
    assert (card.total_bytes, card.compute_capability) == (8 * GiB, (8, 6))
    assert card.usable_bytes < card.usable_high_bytes < 8 * GiB
    assert len(card.assumptions) == 4
    exact = find("7.75 GiB")
    assert exact.usable_bytes == exact.usable_high_bytes == 7.75 * GiB


def test_ones_own_card():
    card = Card(name="mine", total_bytes="7.6GiB", compute_capability=(8, 9), context_bytes=(300 * MiB, "400MiB"))
    assert card.usable_bytes == card.usable_high_bytes == card.total_bytes == round(7.6 * GiB)
    assert card.room_bytes == (card.total_bytes - 400 * MiB, card.total_bytes - 300 * MiB)
    assert len(card.assumptions) == 1  # of its multiprocessors
    assert find(card) is card
    one = Card("mine", 4 << 30, (12, 0), context_bytes=500 * MiB, usable_bytes="3.9GiB")
    assert one.context_bytes == (500 * MiB, 500 * MiB)
    assert one.usable_high_bytes == one.usable_bytes
    assert Card("free", "10.5GiB", [8, 0], context_bytes=0).context_bytes == (0, 0)


def test_multiprocessors_that_are_left_out_are_those_of_similar_gpus_and_never_none():
    for row in CARDS:
        card = Card("mine", f"{row[1]}GiB", row[2])
        low, high = card.plausible_multiprocessors
        assert 0 < low <= min(card.multiprocessors, row[3]) <= max(card.multiprocessors, row[3]) <= high
        assert f"{card.multiprocessors} multiprocessors as" in card.assumptions[-1]
        assert low == high or f"or between {low} and {high}" in card.assumptions[-1]
    assert Card("mine", "7.6GiB", (8, 9)).multiprocessors == 24  # as RTX 4060, the best-known of its size
    assert Card("mine", "8GiB", (8, 9), multiprocessors=30).plausible_multiprocessors == (30, 30)
    assert Card("new", "60GiB", (13, 0)).multiprocessors  # a capability that nobody knows yet


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "needs a name"), ({"name": 3}, "needs a name"),
        ({"total_bytes": -1}, "total_bytes must be a size"), ({"total_bytes": "lots"}, "total_bytes must be a size"),
        ({"total_bytes": True}, "total_bytes must be a size"), ({"total_bytes": 1.5}, "total_bytes must be a size"),
        ({"total_bytes": 8}, "no card is below"),
        ({"compute_capability": 8.9}, "two numbers"), ({"compute_capability": (8,)}, "two numbers"),
        ({"compute_capability": ("8", "9")}, "two numbers"), ({"compute_capability": (0, 9)}, "two numbers"),
        ({"context_bytes": (1, 2, 3)}, r"\(low, high\)"), ({"context_bytes": ("2GiB", "1GiB")}, r"\(low, high\)"),
        ({"context_bytes": "9GiB"}, r"\(low, high\)"), ({"context_bytes": (None, 3)}, "context_bytes must"),
        ({"usable_bytes": "9GiB"}, "must not exceed"), ({"usable_bytes": "5GiB", "usable_high_bytes": "4GiB"}, "exceed"),
        ({"usable_bytes": 32 * MiB - 1}, "no card has so little"),
        ({"multiprocessors": -4}, "multiprocessors"), ({"backend": "tpu"}, "backend"),
    ],
)  # fmt: skip
def test_an_impossible_card_is_refused_in_one_line(changes, words):
    facts = {"name": "mine", "total_bytes": "8GiB", "compute_capability": (8, 9), **changes}
    with pytest.raises(PredictionError, match=words) as caught:
        Card(**facts)
    assert "\n" not in str(caught.value)


def test_the_catalogue_prints_as_a_table_and_as_a_frame():
    lines = repr(cards).splitlines()
    assert len(lines) == len(cards) + 1
    assert all(name in line for name, line in zip(cards, lines[1:], strict=True))
    assert any("(est.)" in line for line in lines)
    assert not any("(est.)" in line for line in lines if line.startswith("RTX 4090"))
    frame = cards.to_pandas()
    assert frame.loc["RTX 4060", "usable_bytes"] == cards["RTX 4060"].usable_bytes
    assert {"context_low_bytes", "context_high_bytes", "usable_source"} <= set(frame.columns)
    assert str(find("T4")) == "T4: 14.55 to 14.75 GiB usable, capability 7.5, context 113.0 to 251.0 MiB"
