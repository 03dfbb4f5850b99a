"""Plain language-model training steps: a small transformer for the CPU, and GPT-2 small.

Random tokens, no dropout: the memory is that of real training, the text is not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes the positions of x: (batch, time, width)."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a feed-forward part of four times the width, each behind its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the input's shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    """A decoder-only language model; `tied` shares the embedding with the output layer, as GPT-2 does."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        vocabulary: int = 1000,
        time: int = 128,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the next token at each position: (batch, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def _next_token(model: Transformer, batch: int, time: int, device: str) -> Callable[[], float]:
    model = model.to(device)
    vocabulary = model.token.num_embeddings
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    x, y = (torch.randint(0, vocabulary, (batch, time), device=device) for _ in range(2))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def transformer(batch: int = 4, time: int = 128, device: str = "cpu") -> Callable[[], float]:
    """A training step of a 1.1 M parameter transformer, AdamW."""
    torch.manual_seed(0)
    return _next_token(Transformer(time=time), batch, time, device)


def gpt2(batch: int = 8, time: int = 1024, device: str = "cuda") -> Callable[[], float]:
    """A training step of GPT-2 small (124 M parameters) in float32, AdamW."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(layers=12, width=768, heads=12, vocabulary=50257, time=1024, tied=True)
    return _next_token(model, batch, time, device)
