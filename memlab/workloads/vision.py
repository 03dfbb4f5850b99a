"""Plain convolutional training steps: a VGG-like stack, a residual network, and a U-Net that only predicts.

Not tuned, not deep: small enough for a laptop's CPU, and each shows one pattern of memory. Named models in several sizes are
among the workloads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.images import Basic, convolutions
from memlab.workloads.workload import classifying, stepping


class Vgg(nn.Sequential):
    """Seven convolutions in three stages, in-place ReLU, two linear layers."""

    def __init__(self, stages: tuple[tuple[int, int], ...] = ((32, 2), (64, 2), (128, 3)), classes: int = 10) -> None:
        layers = convolutions([layer for out, count in stages for layer in (*[out] * count, 0)], in_place=True)
        width = stages[-1][0]
        super().__init__(*layers, nn.Flatten(), nn.Linear(width * 8 * 8, 256), nn.ReLU(), nn.Linear(256, classes))


class ResNet(nn.Sequential):
    """A stem and six residual blocks of 32, 64 and 128 channels, with in-place ReLU."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
            *(Basic(32, 32, 1, in_place=True), Basic(32, 32, 1, in_place=True)),
            *(Basic(32, 64, 2, in_place=True), Basic(64, 64, 1, in_place=True)),
            *(Basic(64, 128, 2, in_place=True), Basic(128, 128, 1, in_place=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)),
        )


def _two_convolutions(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, out, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Three levels with skips; its forward deletes every tensor after its last use."""

    def __init__(self, width: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.down1 = _two_convolutions(3, width)
        self.down2 = _two_convolutions(width, 2 * width)
        self.middle = _two_convolutions(2 * width, 4 * width)
        self.up2 = _two_convolutions(6 * width, 2 * width)
        self.up1 = _two_convolutions(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores per pixel, of `classes` channels."""
        skip1 = self.down1(x)
        y = functional.max_pool2d(skip1, 2)
        skip2 = self.down2(y)
        y = functional.max_pool2d(skip2, 2)
        y = self.middle(y)
        y = functional.interpolate(y, scale_factor=2.0)
        y = torch.cat([y, skip2], dim=1)
        del skip2
        y = self.up2(y)
        y = functional.interpolate(y, scale_factor=2.0)
        y = torch.cat([y, skip1], dim=1)
        del skip1
        y = self.up1(y)
        return self.head(y)


def vgg(batch: int = 2, device: str = "cpu") -> Callable[[], float]:
    """A training step of a VGG-like network on 64 x 64 images, SGD with momentum."""
    return stepping(lambda: classifying(Vgg(), batch, 64, 10), device)


def resnet(batch: int = 2, device: str = "cpu") -> Callable[[], float]:
    """A training step of a small ResNet on 32 x 32 images, SGD with momentum."""
    return stepping(lambda: classifying(ResNet(), batch, 32, 10), device)


def unet(batch: int = 1, side: int = 128, device: str = "cpu") -> Callable[[], float]:
    """Inference of a three-level U-Net without gradients; every tensor is freed after its last use."""
    torch.manual_seed(0)
    model = UNet().to(device)
    x = torch.randn(batch, 3, side, side, device=device)

    def step() -> float:
        with torch.no_grad():
            return model(x).mean().item()

    return step
