"""Size "card" is what was published: parameters counted on the meta device, where nothing is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.workloads import workloads

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


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
    model, _ = card(name)
    assert sum(one.numel() for one in model.parameters()) == PUBLISHED[name]


def test_all_are_counted():
    assert set(PUBLISHED) == set(workloads)


def test_both_networks_of_the_gan():
    model, _ = card("gan")
    assert sum(one.numel() for one in model.generator.parameters()) == 3_576_704
    assert sum(one.numel() for one in model.discriminator.parameters()) == 2_765_568


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vgg16", (2, 1000)),
        ("resnet50", (2, 1000)),
        ("densenet121", (2, 1000)),
        ("vit", (2, 1000)),
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
def test_vgg_is_named_by_its_layers(name, convolutions):
    model, _ = card(name)
    linear = [one for one in model.modules() if isinstance(one, nn.Linear)]
    assert sum(isinstance(one, nn.Conv2d) for one in model.modules()) == convolutions == int(name[3:]) - len(linear)
