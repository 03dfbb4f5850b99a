"""What can be chosen in a Lab, and the one clear line for what cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lab_samples import tiny

from memlab import Card, Lab
from memlab.errors import MemlabError
from memlab.lab.state import KEYS, LabChoices
from memlab.saving_techniques import techniques
from memlab.workloads.workload import Workload

SIZED = Workload("sized", "a test", lambda batch, deep, rate: tiny(), {
    "tiny": {"batch": 2, "deep": False, "rate": 0.5},
    "laptop": {"batch": 8, "deep": True, "rate": 0.5},
})  # fmt: skip


def lab(**state: Any) -> Lab:
    return Lab(SIZED, **state)


def test_a_state_is_read_as_a_copy_and_set_again_whole_or_in_part():
    one, other = lab(techniques=["checkpoint"], size="tiny", settings={"batch": 3}, card="RTX 3060", steps=2), lab()
    assert list(one.state) == list(KEYS)
    other.state = one.state
    one.state["techniques"].append("nonsense")
    one.state["settings"]["batch"] = 99
    assert other.state == one.state
    assert (one.state["techniques"], one.state["settings"], one.state["device"]) == (
        ["checkpoint"],
        {"batch": 3},
        "card",
    )
    part = lab()
    part.state = {"size": "tiny"}
    part.state = {"techniques": ["checkpoint"]}
    assert (part.state["size"], part.state["techniques"]) == ("tiny", ["checkpoint"])


def test_another_size_or_workload_has_its_own_settings():
    one = lab(settings={"batch": 3})
    one.state = {"size": "tiny"}
    assert one.state["settings"] == {}
    one.state = {"settings": {"batch": 5}}
    one.state = {"workload": "mlp"}
    assert one.state["settings"] == {}
    assert one.state["size"] == "tiny"
    assert lab(settings={"batch": 8}).state["settings"] == {}  # is the size's own


def test_a_card_is_to_be_predicted_for_and_a_size_finds_itself_again():
    one = lab(card="8GiB")
    assert one.state["device"] == "card"
    one.state = one.state
    assert one.choices.on(one.chosen).total_bytes == 8 << 30
    mine = Card("mine", total_bytes="6GiB", compute_capability=(8, 6))
    one.state = {"card": mine}
    assert one.state["card"] == "mine"
    one.state = one.state
    assert one.choices.on(one.chosen) is mine


def test_the_pytorch_that_runs_here_is_no_other():
    one = lab(torch_version=torch.__version__, card="T4")
    assert (one.state["torch_version"], one.chosen.place) == ("", "T4")
    one.state = {"torch_version": "2.10"}
    assert one.chosen.place == "T4 with PyTorch 2.10"
    one.state = {"torch_version": "", "device": "cpu"}
    assert one.chosen.place == "cpu"


def test_functions_of_ones_own_have_names_and_no_sizes():
    one = Lab(tiny)
    assert (one.state["workload"], one.state["size"]) == ("tiny", "")
    with pytest.raises(MemlabError, match="has no sizes"):
        one.state = {"size": "laptop"}
    one.state = {"workload": "mlp"}
    assert one.state["size"] == "laptop"
    one.state = {"workload": "tiny"}
    assert one.state["size"] == ""
    one = Lab(workloads={"mine": tiny, "other": tiny})
    assert one.state["workload"] == "mine"
    assert one.choices.workloads[:2] == ["mine", "other"]
    assert one.choices.work(one.chosen).name == "mine"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"colour": 1}, "no 'colour' to set. It has workload, size"),
        (["workload"], "a state is a dict"),
        ({"workload": "nonsense"}, "workload 'nonsense': choose one of"),
        ({"workload": 3}, "workload 3: choose one of"),
        ({"size": "huge"}, "size 'huge': choose one of 'tiny', 'laptop'"),
        ({"settings": {"width": 3}}, "no setting 'width'. It has batch, deep, rate"),
        ({"settings": {"batch": "3"}}, "setting 'batch': give one of type int, such as 8; got '3'"),
        ({"settings": {"batch": True}}, "setting 'batch': give one of type int"),
        ({"settings": {"batch": 0}}, "must be above 0"),
        ({"settings": {"batch": -4}}, "must be above 0"),
        ({"settings": {"deep": 1}}, "setting 'deep': give one of type bool"),
        ({"settings": 3}, "settings is a dict"),
        ({"device": "tpu"}, "device 'tpu': choose one of 'cpu', 'cuda', 'card'"),
        ({"card": "no such card"}, "no such card"),
        ({"card": 3.5}, "no card is below"),
        ({"techniques": "checkpoint"}, "techniques is a list of names"),
        ({"techniques": ["nonsense"]}, "there is no technique 'nonsense'"),
        ({"techniques": [3]}, "there is no technique 3"),
        ({"baseline": "a run"}, "baseline 'a run': choose one of"),
        ({"steps": 0}, "steps is a number from 1 to 1000, got 0"),
        ({"steps": True}, "steps is a number"),
        ({"force": 1}, "force is True or False"),
        ({"torch_version": "2.7"}, "memlab knows the memory of PyTorch 2.10 to 2.15, not of 2.7"),
        ({"torch_version": 2.14}, "a version of PyTorch is a text"),
        ({"size": "tiny", "steps": -1}, "steps is a number"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_changes_nothing(wanted, said):
    one = lab()
    before = one.state
    with pytest.raises(MemlabError) as caught:
        one.state = wanted
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert one.state == before


def test_two_that_exclude_each_other_are_refused_and_said_to():
    choices = LabChoices({"mine": tiny})
    name, one = next((name, one) for name, one in techniques.items() if one.excludes)
    other = next(iter(one.excludes))
    assert one.excludes[other] in choices.excluded(dataclasses.replace(choices.first(), techniques=(other,)))[name]
    with pytest.raises(MemlabError, match="exclude each other"):
        choices.changed(choices.first(), {"techniques": [name, other]})


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr("memlab.probes.cuda.is_possible", lambda: False)
    with pytest.raises(MemlabError, match="there is no CUDA device here"):
        lab(device="cuda")
    assert lab().choices.devices == ("cpu", "card")
    assert lab().state["device"] == "cpu"
    monkeypatch.setattr("memlab.probes.cuda.is_possible", lambda: True)
    assert lab().state["device"] == "cuda"


def test_what_is_no_workload_is_refused():
    for wrong in (3, [tiny]):
        with pytest.raises(MemlabError, match="a workload is a name, or a function"):
            Lab(wrong)
    with pytest.raises(MemlabError, match="workloads is a dict"):
        Lab(workloads={"mine": 3})
