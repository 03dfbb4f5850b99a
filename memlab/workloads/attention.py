"""Attention and the transformer block, as GPT-2 and the vision transformer have it.

`attend(q, k, v, is_causal)` is the one place where positions are mixed: a technique may replace it, module by module.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Attending(nn.Module):
    """A module that mixes positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """The values of v, mixed by how well q matches k; all are (batch, heads, time, width of a head)."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Attention(Attending):
    """Self-attention with one projection for queries, keys and values; causal: a position sees those before it."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes the positions of x: (batch, time, width)."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v, self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a feed-forward part of four times the width, each behind its norm."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the input's shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))
