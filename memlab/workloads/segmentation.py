"""U-Net (Ronneberger et al., 2015, https://arxiv.org/abs/1505.04597), at any width.

With padding and BatchNorm, as it is built today. Its forward gives every tensor a name of its own and lets go of none: as
often written, and where `del` and rebinding are said to help.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import MemlabError
from memlab.workloads.job import Parts
from memlab.workloads.workload import Workload


class Twice(nn.Sequential):
    """Two 3 x 3 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(
            *(nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
        )


class DeepUNet(nn.Module):
    """Five levels: `down1` to `down5`, then `grow4`, `up4` to `grow1`, `up1`, where `grow` doubles the side; then `head`."""

    def __init__(self, width: int = 64, classes: int = 2) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down1, self.down2 = Twice(3, width), Twice(width, 2 * width)
        self.down3, self.down4 = Twice(2 * width, 4 * width), Twice(4 * width, 8 * width)
        self.down5 = Twice(8 * width, 16 * width)
        self.grow4, self.up4 = nn.ConvTranspose2d(16 * width, 8 * width, 2, 2), Twice(16 * width, 8 * width)
        self.grow3, self.up3 = nn.ConvTranspose2d(8 * width, 4 * width, 2, 2), Twice(8 * width, 4 * width)
        self.grow2, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), Twice(4 * width, 2 * width)
        self.grow1, self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2), Twice(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores per pixel, of `classes` channels; the side is a multiple of 16."""
        conv1 = self.down1(x)
        conv2 = self.down2(self.pool(conv1))
        conv3 = self.down3(self.pool(conv2))
        conv4 = self.down4(self.pool(conv3))
        conv5 = self.down5(self.pool(conv4))
        grown4 = self.grow4(conv5)
        joined4 = torch.cat([grown4, conv4], 1)
        up4 = self.up4(joined4)
        grown3 = self.grow3(up4)
        joined3 = torch.cat([grown3, conv3], 1)
        up3 = self.up3(joined3)
        grown2 = self.grow2(up3)
        joined2 = torch.cat([grown2, conv2], 1)
        up2 = self.up2(joined2)
        grown1 = self.grow1(up2)
        joined1 = torch.cat([grown1, conv1], 1)
        up1 = self.up1(joined1)
        return self.head(up1)


def unet(batch: int, side: int, width: int, classes: int) -> Parts:
    """U-Net in training: random pictures, a random class for each pixel."""
    if side % 16:
        raise MemlabError(f"side has to be a multiple of 16, as it is halved four times, got {side}.")
    model = DeepUNet(width, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch, 3, side, side), torch.randint(classes, (batch, side, side))
    return model, optimizer, (x, y), functional.cross_entropy


WORKLOADS = (
    Workload(
        "unet",
        "skips that keep the largest activations alive until the very end",
        unet,
        {
            "tiny": {"batch": 2, "side": 96, "width": 8, "classes": 2},
            "laptop": {"batch": 2, "side": 320, "width": 16, "classes": 2},
            "card": {"batch": 4, "side": 512, "width": 64, "classes": 2},
        },
    ),
)
