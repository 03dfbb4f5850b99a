from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from types import ModuleType

import pytest

import memlab
from memlab import workloads as module
from memlab.errors import MemlabError
from memlab.workloads import SIZES, Workload, Workloads, workloads

NAMES = [
    "mlp",
    "vgg16",
    "vgg19",
    "resnet18",
    "resnet50",
    "densenet121",
    "unet",
    "vit",
    "gpt",
    "llama",
    "bert",
    "lstm",
    "gan",
]


def test_the_package_is_a_mapping():
    assert module is workloads is memlab.workloads
    assert list(workloads) == NAMES == list(workloads.keys())
    assert len(workloads) == 13
    assert "gpt" in workloads and "transformer" not in workloads and 3 not in workloads
    assert workloads["gpt"].name == "gpt" and isinstance(workloads["gpt"], Workload)
    assert dict(workloads.items())["vit"] is workloads["vit"]
    assert workloads.get("nothing") is None and workloads.get("mlp") is workloads["mlp"]
    assert workloads.get([], 5) == 5


def test_the_package_is_an_ordinary_module_still():
    from memlab.workloads import transformer
    from memlab.workloads.language import Transformer

    assert isinstance(module, ModuleType) and isinstance(module, Workloads)
    assert importlib.import_module("memlab.workloads") is module is sys.modules["memlab.workloads"]
    assert module.transformer is transformer and callable(module.unet) and callable(module.resnet)
    assert {module} == {sys.modules["memlab.workloads"]} and module != ModuleType("memlab.workloads")
    assert (
        pickle.loads(pickle.dumps(transformer)) is transformer and Transformer.__module__ == "memlab.workloads.language"
    )
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_it_can_be_loaded_anew():
    found = importlib.reload(module)
    assert found is module and found["gpt"].name == "gpt"


def test_an_unknown_name_is_one_clear_line():
    with pytest.raises(MemlabError, match=r"^there is no workload 'gtp'\. Known: mlp, .*gan\.$"):
        workloads["gtp"]
    with pytest.raises(MemlabError, match="there is no workload"):
        workloads[["gpt"]]  # type: ignore[index]
    with pytest.raises(MemlabError, match=r"'x{79}\. Known"):
        workloads["x" * 1000]


def test_it_shows_itself():
    lines = repr(workloads).splitlines()
    assert [one.split()[0] for one in lines] == NAMES
    assert all(one.idea in line for one, line in zip(workloads.values(), lines, strict=True))
    table = workloads.to_pandas()
    assert list(table.index) == [(name, size) for name in NAMES for size in SIZES]
    assert table.loc[("gpt", "card"), "settings"].startswith("batch=8, time=1024, layers=12")
    assert str(workloads["gan"]).splitlines()[1].split() == ["tiny", "batch=32,", "noise=16,", "width=8"]


@pytest.mark.parametrize("name", NAMES)
def test_all_sizes_have_the_same_settings(name):
    one = workloads[name]
    assert tuple(one.sizes) == SIZES
    assert len({tuple(settings) for settings in one.sizes.values()}) == 1
    assert all(type(value) in (int, bool) for settings in one.sizes.values() for value in settings.values())
    assert "batch" in one.sizes["tiny"]


def test_a_size_or_setting_that_is_not_there_is_one_clear_line():
    with pytest.raises(MemlabError, match=r"workload 'gpt' has no size 'huge'\. Choose one of tiny, laptop, card\."):
        workloads["gpt"].sized("huge")
    with pytest.raises(MemlabError, match=r"workload 'vit' has no setting 'depth'\. It has batch, side, patch"):
        workloads["vit"].sized("tiny", depth=3)


def test_settings_go_over_those_of_the_size():
    model, _, batch, _ = workloads["gpt"].sized("tiny", batch=2, layers=1, tied=False)()
    assert batch[0].shape == (2, 256) and len(model.blocks) == 1
    assert model.head.weight is not model.token.weight


def test_importing_makes_no_tensor_of_size():
    code = """
import torch
made = []
old = torch.nn.Module.__init__
torch.nn.Module.__init__ = lambda self, *a, **k: (made.append(type(self)), old(self, *a, **k))[1]
import memlab.workloads as w
list(w), repr(w), w["gpt"].sized("card")
print(len(made))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, None])
def test_a_setting_of_another_kind_is_one_clear_line(value):
    with pytest.raises(MemlabError, match=r"^batch of workload 'gpt' is a whole number from 1, got "):
        workloads["gpt"].sized("tiny", batch=value)


def test_a_switch_is_no_number():
    with pytest.raises(MemlabError, match=r"^tied of workload 'gpt' is True or False, got 1\.$"):
        workloads["gpt"].sized("tiny", tied=1)


def test_settings_of_a_workload_of_ones_own_are_its_own():
    one = Workload("mine", "of my own", lambda **settings: settings, {"tiny": {"skip": 0, "lr": 0.1, "kind": "a"}})
    assert one.sized("tiny", skip=0, lr=1, kind=None)() == {"skip": 0, "lr": 1, "kind": None}
    with pytest.raises(MemlabError, match="skip of workload 'mine' is a whole number from 0, got -1"):
        one.sized("tiny", skip=-1)


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("gpt", {"heads": 3}, "width has to be a multiple of heads, got 64 and 3"),
        ("bert", {"heads": 5}, "width has to be a multiple of heads"),
        ("llama", {"groups": 3}, "heads has to be a multiple of groups, got 4 and 3"),
        ("vit", {"patch": 10}, "side has to be a multiple of patch, got 64 and 10"),
        ("unet", {"side": 100}, "side has to be a multiple of 16, as it is halved four times, got 100"),
    ],
)
def test_settings_that_do_not_fit_together_are_one_clear_line(name, settings, why):
    with pytest.raises(MemlabError, match=why):
        workloads[name].sized("tiny", **settings)()
