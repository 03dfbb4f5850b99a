"""A BERT-like masked language model (Devlin et al., 2018, https://arxiv.org/abs/1810.04805), at any width.

Without dropout, without the next-sentence task, and without the bias for each word of the vocabulary. Of every seven tokens one
is masked and asked for, always the same: the published 15 % are drawn by chance.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.workloads.attention import Attention
from memlab.workloads.job import Parts
from memlab.workloads.tokens import token_loss
from memlab.workloads.workload import Workload, divided

MASK, EVERY, IGNORED = 0, 7, -100


class PostNormBlock(nn.Module):
    """Attention and a feed-forward part of four times the width, each before its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, causal=False), nn.LayerNorm(width, eps=1e-12)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the input's shape."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


class Bert(nn.Module):
    """An encoder that sees in both directions; `tied` shares the embedding with the output layer."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, longest: int, tied: bool) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.segment = nn.Embedding(2, width)
        for one in (self.token, self.position, self.segment):
            nn.init.normal_(one.weight, std=0.02)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.Sequential(*(PostNormBlock(width, heads) for _ in range(layers)))
        self.last = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`: (batch, time, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions) + self.segment(torch.zeros_like(tokens))
        return self.last(self.blocks(self.norm(x)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the word at each position: (batch, time, vocabulary)."""
        return self.head(self.features(tokens))


def bert(batch: int, time: int, layers: int, width: int, heads: int, vocabulary: int, tied: bool) -> Parts:
    """The model in training, AdamW."""
    divided("width", "heads", width=width, heads=heads)
    model = Bert(layers, width, heads, vocabulary, max(time, 512), tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(1, vocabulary, (batch, time))
    target = torch.full_like(tokens, IGNORED)
    target[:, ::EVERY] = tokens[:, ::EVERY]
    tokens[:, ::EVERY] = MASK
    return model, optimizer, (tokens, target), token_loss


_TINY = {"batch": 8, "time": 128, "layers": 6, "width": 64, "heads": 4, "vocabulary": 512, "tied": True}
_LAPTOP = {"batch": 16, "time": 128, "layers": 6, "width": 192, "heads": 6, "vocabulary": 8192, "tied": True}
_CARD = {"batch": 32, "time": 512, "layers": 12, "width": 768, "heads": 12, "vocabulary": 30_522, "tied": True}
WORKLOADS = (
    Workload(
        "bert",
        "an encoder that foretells masked words: scores for the whole vocabulary, needed at one position in seven",
        bert,
        {"tiny": _TINY, "laptop": _LAPTOP, "card": _CARD},
    ),
)
