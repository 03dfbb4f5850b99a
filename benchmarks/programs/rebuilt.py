"""Small, well-known repositories rebuilt from their descriptions: the model and the training step that each is known for."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.programs.registry import program, token_loss, tokens, train


class CausalBlock(nn.Module):
    """A block of nanoGPT (github.com/karpathy/nanoGPT): pre-norm, one projection for q, k, v, fused attention, GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width, bias=False) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        count, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).split(width, dim=2)
        q, k, v = (part.view(count, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(count, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


@program
def nanogpt_shakespeare() -> None:
    """Its Shakespeare setting: 6 layers of width 384, bf16 autocast, fused AdamW in two groups, clipping, accumulation."""
    width, vocabulary, length = 384, 65, 256
    model = nn.ModuleDict({
        "tokens": nn.Embedding(vocabulary, width), "places": nn.Embedding(length, width),
        "blocks": nn.Sequential(*(CausalBlock(width, 6) for _ in range(6))), "norm": nn.LayerNorm(width, bias=False),
        "head": nn.Linear(width, vocabulary, bias=False),
    }).cuda()  # fmt: skip
    model["tokens"].weight = model["head"].weight
    groups = [
        {"params": [weight for weight in model.parameters() if weight.dim() >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in model.parameters() if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    batch = tokens(32, length, vocabulary)
    for _ in range(2):
        for _ in range(2):
            ids, target = batch()
            with torch.autocast("cuda", torch.bfloat16):
                x = model["tokens"](ids) + model["places"](torch.arange(length, device="cuda"))
                loss = token_loss(model["head"](model["norm"](model["blocks"](x))), target) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@program
def mnist_example() -> None:
    """The network of pytorch/examples/mnist with Adadelta."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    ).cuda()  # fmt: skip

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(512, 1, 28, 28).to("cuda"), torch.randint(10, (512,)).to("cuda")

    train(model, torch.optim.Adadelta(model.parameters()), batch, F.nll_loss)


@program
def dcgan_example() -> None:
    """pytorch/examples/dcgan: 64-pixel images, BatchNorm everywhere, two Adams, three backwards a step."""
    widths = (512, 256, 128, 64)
    up = [layer for a, b in itertools.pairwise(widths)
          for layer in (nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True))]  # fmt: skip
    generator = nn.Sequential(
        nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False), nn.BatchNorm2d(512), nn.ReLU(True), *up,
        nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ).cuda()  # fmt: skip
    down = [layer for b, a in itertools.pairwise(widths)
            for layer in (nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2, True))][::-1]  # fmt: skip
    down = [layer for at in range(0, len(down), 3) for layer in down[at : at + 3][::-1]]
    judge = nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True), *down, nn.Conv2d(512, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        nn.Flatten(0),
    ).cuda()  # fmt: skip
    optimizers = [torch.optim.Adam(net.parameters(), 2e-4, betas=(0.5, 0.999)) for net in (judge, generator)]
    for _ in range(2):
        real, label = torch.randn(64, 3, 64, 64).to("cuda"), torch.ones(64, device="cuda")
        judge.zero_grad()
        F.binary_cross_entropy(judge(real), label).backward()
        fake = generator(torch.randn(64, 100, 1, 1, device="cuda"))
        F.binary_cross_entropy(judge(fake.detach()), label.fill_(0)).backward()
        optimizers[0].step()
        generator.zero_grad()
        F.binary_cross_entropy(judge(fake), label.fill_(1)).backward()
        optimizers[1].step()


class PointNet(nn.Module):
    """PointNet for classification (Qi et al. 2017): shared 1x1 convolutions, a learnt transform, a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = self.features(64, 128, 1024)
        self.matrix = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 9))
        self.shared = self.features(64, 128, 1024)
        self.head = nn.Sequential(
            nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 40)
        )

    @staticmethod
    def features(*widths: int) -> nn.Sequential:
        """Map each point by itself, three coordinates to the last width."""
        layers: list[nn.Module] = []
        for before, after in zip((3, *widths), widths, strict=False):
            layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, points: Tensor) -> Tensor:
        """Classify (batch, 3, points)."""
        turn = self.matrix(self.transform(points).max(2).values).view(-1, 3, 3) + torch.eye(3, device=points.device)
        turned = torch.bmm(points.transpose(1, 2), turn).transpose(1, 2)
        return self.head(self.shared(turned).max(2).values)


@program
def pointnet() -> None:
    model = PointNet().cuda()

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(32, 3, 1024, device="cuda"), torch.randint(40, (32,), device="cuda")

    train(model, torch.optim.Adam(model.parameters()), batch, F.cross_entropy)


class Denoiser(nn.Module):
    """A small U-Net with time embeddings and attention at the bottom, as in denoising-diffusion-pytorch (Ho et al. 2020)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 4 * width))
        self.enter = nn.Conv2d(3, width, 7, padding=3)
        self.down = nn.ModuleList([self.block(width, width), self.block(width, 2 * width)])
        self.middle, self.attention = (
            self.block(2 * width, 2 * width),
            nn.MultiheadAttention(2 * width, 4, batch_first=True),
        )
        self.up = nn.ModuleList([self.block(4 * width, width), self.block(2 * width, width)])
        self.scale = nn.ModuleList([nn.Linear(4 * width, width), nn.Linear(4 * width, 2 * width)])
        self.leave, self.width = nn.Conv2d(width, 3, 1), width

    @staticmethod
    def block(before: int, after: int) -> nn.Sequential:
        """Two convolutions, each with its norm."""
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        """Predict the noise in the images `x` at the times `when`."""
        half = self.width // 2
        waves = when[:, None] * torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        time = self.time(torch.cat((waves.sin(), waves.cos()), dim=-1))
        x, kept = self.enter(x), []
        for block, scale in zip(self.down, self.scale, strict=True):
            x = block(x) + scale(time)[:, :, None, None]
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        flat = x.flatten(2).transpose(1, 2)
        x = x + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(x)
        for block in self.up:
            x = block(torch.cat((F.interpolate(x, scale_factor=2), kept.pop()), dim=1))
        return self.leave(x)


@program
def denoising_diffusion() -> None:
    model = Denoiser().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 8e-5)
    for _ in range(3):
        clean, noise = torch.randn(8, 3, 64, 64, device="cuda"), torch.randn(8, 3, 64, 64, device="cuda")
        when = torch.randint(0, 1000, (8,), device="cuda").float()
        loss = F.l1_loss(model(clean * 0.7 + noise * 0.3, when), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def demucs_like_waves() -> None:
    """Strided 1-D convolutions with GLU and a bidirectional LSTM between (Defossez et al. 2019)."""

    class Separator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (2, 32, 64, 128)
            pairs = list(itertools.pairwise(widths))
            self.down = nn.ModuleList(
                nn.Sequential(nn.Conv1d(a, b, 8, 4), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(1)) for a, b in pairs
            )
            self.lstm, self.join = nn.LSTM(128, 128, 2, bidirectional=True), nn.Linear(256, 128)
            self.up = nn.ModuleList(
                nn.Sequential(
                    nn.Conv1d(b, 2 * b, 3, padding=1), nn.GLU(1), nn.ConvTranspose1d(b, 8 if a == 2 else a, 8, 4)
                )
                for a, b in reversed(pairs)
            )

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for block in self.down:
                x = block(x)
                kept.append(x)
            x = self.join(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
            for block in self.up:
                x = block(x + kept.pop()[..., : x.shape[-1]])
            return x

    model = Separator().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    for _ in range(2):
        wave = torch.randn(4, 2, 44_100 - 44_100 % 64 + 84, device="cuda")
        found = model(wave)
        loss = F.l1_loss(found, torch.randn_like(found))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
