"""The workloads by name and size, what a setting may be, and that size "card" is what was published."""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
from types import ModuleType

import pytest
import torch
from processes import python
from torch import nn

import memlab
from memlab import workloads as module
from memlab.errors import MemlabError
from memlab.workloads import SIZES, Workload, Workloads, transformer, workloads
from memlab.workloads.job import entered
from memlab.workloads.language import Transformer
from memlab.workloads.vision import ResNet, UNet, Vgg
from memlab.workloads.workload import inference

NAMES = ["mlp", "vgg16", "vgg19", "resnet18", "resnet50", "densenet121", "unet", "vit"]
NAMES += ["gpt", "llama", "bert", "lstm", "gan"]


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
    assert python("-c", code) == "0\n"


def test_settings_of_a_workload_of_ones_own_are_its_own():
    one = Workload("mine", "of my own", lambda **settings: settings, {"tiny": {"skip": 0, "lr": 0.1, "kind": "a"}})
    assert one.sized("tiny", skip=0, lr=1, kind=None)() == {"skip": 0, "lr": 1, "kind": None}
    with pytest.raises(MemlabError, match="skip of workload 'mine' is a whole number from 0, got -1"):
        one.sized("tiny", skip=-1)


@pytest.mark.parametrize(
    ("name", "size", "settings", "why"),
    [
        ("gpt", "huge", {}, r"^workload 'gpt' has no size 'huge'\. Choose one of tiny, laptop, card\.$"),
        ("vit", "tiny", {"depth": 3}, r"^workload 'vit' has no setting 'depth'\. It has batch, side, patch"),
        *(("gpt", "tiny", {"batch": one}, "^batch of workload 'gpt' is a whole number from 1, got ")
          for one in (0, -1, 2.0, "2", True, None)),
        ("gpt", "tiny", {"tied": 1}, r"^tied of workload 'gpt' is True or False, got 1\.$"),
        ("gpt", "tiny", {"heads": 3}, "width has to be a multiple of heads, got 64 and 3"),
        ("bert", "tiny", {"heads": 5}, "width has to be a multiple of heads"),
        ("llama", "tiny", {"groups": 3}, "heads has to be a multiple of groups, got 4 and 3"),
        ("llama", "tiny", {"heads": 3}, "width has to be a multiple of heads"),
        ("vit", "tiny", {"patch": 10}, "side has to be a multiple of patch, got 64 and 10"),
        ("unet", "tiny", {"side": 100}, "side has to be a multiple of 16, as it is halved four times, got 100"),
    ],
)  # fmt: skip
def test_what_is_no_size_or_setting_is_one_clear_line(name, size, settings, why):
    with pytest.raises(MemlabError, match=why):
        workloads[name].sized(size, **settings)()


# --- as published ---

# What is counted, and by whom.
PUBLISHED = {
    "vgg16": 138_357_544,  # torchvision, VGG16_Weights.IMAGENET1K_V1.meta["num_params"]; likewise those that follow
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "densenet121": 7_978_856,
    "vit": 86_567_656,  # torchvision, ViT_B_16_Weights.IMAGENET1K_V1
    "unet": 31_037_698,  # github.com/milesial/Pytorch-UNet, 3 channels, 2 classes, transposed convolutions
    "gpt": 124_439_808,  # huggingface.co/openai-community/gpt2
    "llama": 1_235_814_400,  # huggingface.co/meta-llama/Llama-3.2-1B, "1.23B"
    # huggingface.co/google-bert/bert-base-uncased as BertForMaskedLM; less the bias of each word, which is left out here
    "bert": 109_514_298 - 30_522,
    "lstm": 66_024_000,  # the paper says 66 M; no bias in the output layer here
    # the DCGAN tutorial of PyTorch prints both networks: 3,576,704 of the generator, 2,765,568 of the discriminator
    "gan": 3_576_704 + 2_765_568,
    "mlp": 16 * (4096 * 4096 + 4096) + 4096 * 1000 + 1000,  # no publication
}


def card(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    with torch.device("meta"):
        model, _, batch, _ = workloads[name].sized("card", batch=2)()
    return model, batch


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name):
    model, _ = card(name)
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]


def test_both_networks_of_the_gan():
    model, _ = card("gan")
    assert sum(one.numel() for one in model.generator.parameters()) == 3_576_704
    assert sum(one.numel() for one in model.discriminator.parameters()) == 2_765_568


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (2, 1000)) for name in ("vgg16", "resnet50", "densenet121", "vit")),
        ("unet", (2, 2, 512, 512)),
        ("gpt", (2, 1024, 50_257)),
        ("llama", (2, 2048, 128_256)),
        ("bert", (2, 512, 30_522)),
        ("lstm", (2, 35, 10_000)),
        ("gan", (2, 3, 64, 64)),
    ],
)
def test_what_comes_out(name, shape):
    model, batch = card(name)
    assert model(*batch[:-1]).shape == shape


@pytest.mark.parametrize(("name", "convolutions"), [("vgg16", 13), ("vgg19", 16)])
def test_vgg_by_its_function(name, convolutions):
    with torch.device("meta"):
        model, few = getattr(workloads, name)(), getattr(workloads, name)(classes=10)
        scores = model(torch.empty(2, 3, 224, 224)), few(torch.empty(1, 3, 64, 96))
    assert [one.shape for one in scores] == [(2, 1000), (1, 10)]
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]
    kinds = [type(one) for one in model.modules()]
    assert kinds.count(nn.Conv2d) == convolutions and kinds.count(nn.Linear) == 3


@pytest.mark.parametrize(
    ("model", "parameter_bytes", "buffer_bytes"),
    [
        (Vgg, 10_138_280, 0),
        (ResNet, 2_786_472, 9_080),
        (UNet, 473_160, 0),
        (Transformer, 4_262_912, 0),
        (lambda: Transformer(12, 768, 12, 50257, 1024, tied=True), 4 * 124_439_808, 0),  # GPT-2 small, as published
    ],
)
def test_models_of_plain_steps_have_the_size_they_are_known_by(model, parameter_bytes, buffer_bytes):
    with torch.device("meta"):
        built = model()
    assert sum(one.nbytes for one in built.parameters()) == parameter_bytes
    assert sum(one.nbytes for one in built.buffers()) == buffer_bytes


def test_contexts_that_were_entered_are_left_when_a_later_one_fails():
    seen: list[str] = []

    @contextlib.contextmanager
    def on():
        seen.append("on")
        try:
            yield
        finally:
            seen.append("off")

    def bad():
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        entered([on, bad])
    assert seen == ["on", "off"]


def test_work_without_training_can_be_pickled_and_language_models_take_tokens_by_name():
    assert pickle.loads(pickle.dumps(inference(workloads["mlp"])))()[1] is None
    model, _, (tokens, _), _ = workloads["gpt"].sized("tiny")()
    assert torch.equal(model(tokens=tokens), model(tokens))
