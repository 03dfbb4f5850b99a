"""A Llama-like language model: RMSNorm, rotary positions, SwiGLU, several query heads to one head of keys and values.

Layer structure of Llama 3 (Grattafiori et al., 2024, https://arxiv.org/abs/2407.21783); size "card" is Llama 3.2 1B.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.workloads.attention import Attending
from memlab.workloads.job import Parts
from memlab.workloads.tokens import foretelling
from memlab.workloads.workload import Workload, divided


def rotary(time: int, width: int, device: torch.device, base: float = 500_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which the halves of a head turn into each other: (time, width)."""
    speeds = base ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(time, device=device), speeds).repeat(1, 2)
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (batch, heads, time, width), turned by its position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class GroupedAttention(Attending):
    """Causal attention with `heads` of queries and `groups` heads of keys and values."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.each, bias=False)
        self.v = nn.Linear(width, groups * self.each, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes the positions of x: (batch, time, width)."""
        batch, time, width = x.shape
        q = self.q(x).view(batch, time, self.heads, self.each).transpose(1, 2)
        k = self.k(x).view(batch, time, self.groups, self.each).transpose(1, 2)
        v = self.v(x).view(batch, time, self.groups, self.each).transpose(1, 2)
        cos, sin = rotary(time, self.each, x.device)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (one.repeat_interleave(self.heads // self.groups, dim=1) for one in (k, v))
        y = self.attend(q, k, v, True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class SwiGlu(nn.Module):
    """A feed-forward part of which one half gates the other."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.act = nn.Linear(width, inner, bias=False), nn.SiLU()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape."""
        return self.down(self.act(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Attention and SwiGLU, each behind its norm."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width, eps=1e-5), GroupedAttention(width, heads, groups)
        self.norm2, self.feed = nn.RMSNorm(width, eps=1e-5), SwiGlu(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the input's shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    """A decoder-only language model; `tied` shares the embedding with the output layer."""

    def __init__(
        self, layers: int, width: int, heads: int, groups: int, inner: int, vocabulary: int, tied: bool
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads, groups, inner) for _ in range(layers)))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`: (batch, time, width)."""
        return self.norm(self.blocks(self.token(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the next token at each position: (batch, time, vocabulary)."""
        return self.head(self.features(tokens))


def llama(
    batch: int,
    time: int,
    layers: int,
    width: int,
    heads: int,
    groups: int,
    inner: int,
    vocabulary: int,
    tied: bool,
) -> Parts:
    """The model in training, AdamW."""
    divided("width", "heads", width=width, heads=heads)
    divided("heads", "groups", heads=heads, groups=groups)
    model = Llama(layers, width, heads, groups, inner, vocabulary, tied)
    return foretelling(model, batch, time, vocabulary)


_TINY = {"batch": 4, "time": 128, "layers": 6, "width": 64, "heads": 4, "groups": 2, "inner": 192, "vocabulary": 512}
_LAPTOP = {"batch": 8, "time": 256, "layers": 6, "width": 192, "heads": 6, "groups": 2, "inner": 512}
_CARD = {"batch": 2, "time": 2048, "layers": 16, "width": 2048, "heads": 32, "groups": 8, "inner": 8192}
WORKLOADS = (
    Workload(
        "llama",
        "a language model of today: RMSNorm, rotary positions, SwiGLU, grouped-query attention",
        llama,
        {
            "tiny": {**_TINY, "tied": True},
            "laptop": {**_LAPTOP, "vocabulary": 8192, "tied": True},
            "card": {**_CARD, "vocabulary": 128_256, "tied": True},
        },
    ),
)
