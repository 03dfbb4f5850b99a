"""Pictures: the convolutional classics, what came after them, and what makes pictures."""

# Code as it is found in notebooks: a forward has no docstring there, and nobody types it.
# ruff: noqa: D102
# mypy: ignore-errors

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.registry import images, program, train


def conv(before: int, after: int, size: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    """Convolution, batch normalization, ReLU."""
    layers: list[nn.Module] = [
        nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
    ]
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if act else nn.Sequential(*layers)


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(before, after, 3, stride), conv(after, after, act=False))
        self.short = nn.Identity() if before == after else conv(before, after, 1, stride, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            conv(before, width, 1), conv(width, width, 3, stride), conv(width, after, 1, act=False)
        )
        self.short = nn.Identity() if before == after and stride == 1 else conv(before, after, 1, stride, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


def resnet18(classes: int = 1000) -> nn.Sequential:
    """As in the paper."""
    stem = nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
    blocks, before = [], 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Residual(before, after, stride), Residual(after, after)]
        before = after
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """As in the paper."""
    stem = nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
    blocks, before = [], 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            blocks.append(Bottleneck(before, width, stride if index == 0 else 1))
            before = 4 * width
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


@program
def resnet18_momentum() -> None:
    model = resnet18().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    train(model, optimizer, images(32, 160), F.cross_entropy)


@program
def resnet50_momentum() -> None:
    model = resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    train(model, optimizer, images(16, 224), F.cross_entropy)


@program
def vgg_like() -> None:
    layers, before = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
            before = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(8192, 2048), nn.ReLU(), nn.Dropout(), nn.Linear(2048, 1000)]
    model = nn.Sequential(*layers, *head).cuda()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), images(16, 128), F.cross_entropy)


class Inverted(nn.Module):
    """MobileNetV2's block: widen, filter each channel by itself, narrow."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 6 * before
        self.body = nn.Sequential(
            conv(before, wide, 1), conv(wide, wide, 3, stride, groups=wide), conv(wide, after, 1, act=False)
        )
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


@program
def mobilenet_like() -> None:
    blocks, before = [], 32
    for after, count, stride in ((24, 2, 2), (32, 3, 2), (64, 4, 2), (96, 3, 1), (160, 3, 2)):
        for index in range(count):
            blocks.append(Inverted(before, after, stride if index == 0 else 1))
            before = after
    model = nn.Sequential(
        conv(3, 32, 3, 2), *blocks, conv(160, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)
    ).to("cuda")
    train(model, torch.optim.RMSprop(model.parameters(), momentum=0.9), images(32, 160), F.cross_entropy)


class Unet(nn.Module):
    """Down, up, and the shortcuts between; with a channel of noise level if it denoises."""

    def __init__(self, before: int, after: int, width: int = 32) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b), conv(b, b)) for a, b in zip([before, *widths], widths, strict=False)
        )
        self.lift = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.Sequential(conv(2 * a, a), conv(a, a)) for a in widths[:-1])
        self.head = nn.Conv2d(width, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([self.lift[level](x), kept[level]], 1))
        return self.head(x)


@program
def unet_segmentation() -> None:
    model = Unet(3, 21).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(6, 3, 192, 192).cuda(), torch.randint(21, (6, 192, 192)).cuda()

    train(model, optimizer, batch, F.cross_entropy)


@program
def densenet_like() -> None:
    class Dense(nn.Module):
        def __init__(self, before: int) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, 128, 1, bias=False),
                                      nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 32, 3, padding=1))  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.body(x)], 1)

    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for count in (6, 12, 8):
        layers += [Dense(width + 32 * index) for index in range(count)]
        width += 32 * count
        layers += [conv(width, width // 2, 1), nn.AvgPool2d(2)]
        width //= 2
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)).cuda()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), images(16, 160, 100), F.cross_entropy)


class Vit(nn.Module):
    """A vision transformer."""

    def __init__(self, width: int = 384, depth: int = 8, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 197, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.layers(x)[:, 0])


@program
def vit_adamw() -> None:
    model = Vit().to("cuda")
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), images(32, 224), F.cross_entropy)


@program
def convolutional_autoencoder() -> None:
    encoder = nn.Sequential(*(conv(a, b, 3, 2) for a, b in ((3, 32), (32, 64), (64, 128), (128, 256))))
    steps = [(256, 128), (128, 64), (64, 32), (32, 3)]
    decoder = nn.Sequential(*(nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.ReLU()) for a, b in steps))
    model = nn.Sequential(encoder, decoder).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        x = torch.rand(48, 3, 128, 128, device="cuda")
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def gan_two_optimizers() -> None:
    widths = [100, 512, 256, 128, 64]
    steps = [nn.ConvTranspose2d(a, b, 4, 2 if i else 1, 1 if i else 0, bias=False)
             for i, (a, b) in enumerate(itertools.pairwise(widths))]  # fmt: skip
    generator = nn.Sequential(*(nn.Sequential(s, nn.BatchNorm2d(s.out_channels), nn.ReLU(True)) for s in steps),
                              nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).cuda()  # fmt: skip
    critic = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2, True))
                             for a, b in ((3, 64), (64, 128), (128, 256), (256, 512))),
                           nn.Conv2d(512, 1, 4), nn.Flatten(0)).cuda()  # fmt: skip
    first = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real, fake = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
    for _ in range(3):
        picture = torch.rand(64, 3, 64, 64).to("cuda")
        made = generator(torch.randn(64, 100, 1, 1, device="cuda"))
        loss = F.binary_cross_entropy_with_logits(critic(picture), real)
        loss = loss + F.binary_cross_entropy_with_logits(critic(made.detach()), fake)
        second.zero_grad()
        loss.backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(critic(made), real).backward()
        first.step()


@program
def variational_autoencoder() -> None:
    down = nn.Sequential(conv(3, 64, 3, 2), conv(64, 128, 3, 2), nn.Flatten(), nn.Linear(128 * 256, 512)).cuda()
    up = nn.Sequential(nn.Linear(256, 128 * 256), nn.Unflatten(1, (128, 16, 16)), nn.Upsample(scale_factor=2),
                       conv(128, 64), nn.Upsample(scale_factor=2), nn.Conv2d(64, 3, 3, padding=1)).cuda()  # fmt: skip
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters()])
    for _ in range(3):
        x = torch.rand(64, 3, 64, 64, device="cuda")
        mean, spread = down(x).chunk(2, 1)
        found = up(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        loss = F.mse_loss(found, x, reduction="sum") - 0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def diffusion_step() -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 3 * 64 * 64))
            self.unet = Unet(6, 3, 48)
            self.mix = nn.MultiheadAttention(48, 4, batch_first=True)
            self.fold = nn.Conv2d(3, 48, 4, 4)
            self.unfold = nn.ConvTranspose2d(48, 3, 4, 4)

        def forward(self, x: Tensor, level: Tensor) -> Tensor:
            waves = level[:, None] * torch.exp(-torch.arange(64, device=x.device) / 8.0)
            when = self.time(torch.cat([waves.sin(), waves.cos()], -1)).view_as(x)
            x = self.unet(torch.cat([x, when], 1))
            tokens = self.fold(x).flatten(2).transpose(1, 2)
            mixed = self.mix(tokens, tokens, tokens, need_weights=False)[0]
            return x + self.unfold(mixed.transpose(1, 2).unflatten(2, (16, 16)))

    model = Denoiser().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    keep = torch.linspace(0.999, 0.01, 1000).to("cuda")
    for _ in range(2):
        x, level = torch.rand(16, 3, 64, 64, device="cuda"), torch.randint(1000, (16,), device="cuda")
        noise, share = torch.randn_like(x), keep[level].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, level.float()), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def convnext_like() -> None:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.mix, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.scale = nn.Parameter(torch.full((width,), 1e-6))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.mix(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.narrow(F.gelu(self.wide(hidden)))).permute(0, 3, 1, 2)

    widths = (3, 96, 192, 384)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [
            nn.Conv2d(before, after, 4 if before == 3 else 2, 4 if before == 3 else 2),
            Block(after),
            Block(after),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 1000)).cuda()
    train(model, torch.optim.AdamW(model.parameters()), images(16, 192), F.cross_entropy)


@program
def mlp_mixer() -> None:
    class Mixer(nn.Module):
        def __init__(self, places: int, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.over_places = nn.Sequential(nn.Linear(places, 256), nn.GELU(), nn.Linear(256, places))
            self.over_width = nn.Sequential(nn.Linear(width, 2048), nn.GELU(), nn.Linear(2048, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.over_places(self.first(x).transpose(1, 2)).transpose(1, 2)
            return x + self.over_width(self.second(x))

    blocks = nn.Sequential(*(Mixer(196, 512) for _ in range(6)))
    model = nn.Sequential(nn.Conv2d(3, 512, 16, 16), nn.Flatten(2)).cuda()
    blocks, head = blocks.cuda(), nn.Linear(512, 1000).cuda()
    optimizer = torch.optim.Adam([*model.parameters(), *blocks.parameters(), *head.parameters()])
    batch = images(32, 224)
    for _ in range(2):
        x, y = batch()
        loss = F.cross_entropy(head(blocks(model(x).transpose(1, 2)).mean(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def super_resolution() -> None:
    body = nn.Sequential(*(Residual(64, 64) for _ in range(6)))
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), body, nn.Conv2d(64, 48, 3, padding=1), nn.PixelShuffle(4)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        sharp = torch.rand(8, 3, 256, 256).cuda()
        blurred = F.interpolate(sharp, scale_factor=0.25, mode="bilinear", antialias=True)
        loss = F.l1_loss(model(blurred), sharp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def feature_pyramid() -> None:
    bottom = nn.ModuleList(
        (conv(3, 64, 7, 4), Residual(64, 128, 2), Residual(128, 256, 2), Residual(256, 512, 2))
    ).cuda()
    side = nn.ModuleList(nn.Conv2d(width, 128, 1) for width in (128, 256, 512)).cuda()
    classes, boxes = (nn.Conv2d(128, 9 * count, 3, padding=1).cuda() for count in (80, 4))
    parts = (bottom, side, classes, boxes)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.01, momentum=0.9)
    for _ in range(2):
        x, levels = torch.rand(4, 3, 384, 384, device="cuda"), []
        for block in bottom:
            x = block(x)
            levels.append(x)
        top, loss = None, torch.zeros((), device="cuda")
        for lateral, level in zip(reversed(side), reversed(levels[1:]), strict=True):
            here = lateral(level)
            top = here if top is None else here + F.interpolate(top, scale_factor=2)
            loss = (
                loss + torch.sigmoid(classes(top)).mean() + F.smooth_l1_loss(boxes(top), torch.zeros_like(boxes(top)))
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
