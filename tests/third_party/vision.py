"""torchvision's model definitions, on small images."""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Made = tuple[torch.nn.Module, Callable[[], dict[str, Any]]]
LACKS = re.compile(r"operator torchvision::(\w+) does not exist")


@functools.cache
def load() -> Any:
    """torchvision's models; a build for another torch lacks its operators, which these do not need: they are declared.

    The default package is built for CUDA, and cannot load its operators beside a torch built for the CPU alone.
    """
    library = None
    while True:
        try:
            return importlib.import_module("torchvision.models")
        except RuntimeError as error:
            lacking = LACKS.search(str(error))
            if lacking is None:
                raise
            library = library or torch.library.Library("torchvision", "DEF")
            library.define(f"{lacking[1]}(Tensor self) -> Tensor")
            KEPT.append(library)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]


KEPT: list[Any] = []
SIZES = {
    "resnet18": 64, "resnet50": 64, "vgg11_bn": 64, "densenet121": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64,
    "efficientnet_b0": 64, "regnet_y_400mf": 64, "shufflenet_v2_x0_5": 64, "vit_b_16": 224, "swin_t": 64, "convnext_tiny": 64,
}  # fmt: skip


class Loss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        return types.SimpleNamespace(loss=F.cross_entropy(self.model(images), labels))


def made(name: str) -> Callable[[], Made]:
    def batch() -> dict[str, Any]:
        size = SIZES[name]
        return {
            "images": torch.randn(4, 3, size, size, device="cuda"),
            "labels": torch.randint(0, 10, (4,), device="cuda"),
        }

    return lambda: (Loss(getattr(load(), name)(num_classes=10)), batch)


MODELS: dict[str, Callable[[], Made]] = {name: made(name) for name in SIZES}
