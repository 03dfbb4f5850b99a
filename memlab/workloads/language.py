"""GPT-2 (Radford et al., 2019), at any width, and two plain training steps of it: a small one for the CPU, and GPT-2 small.

Random tokens, no dropout: the memory is that of real training, the text is not. `blocks` are the layers, `features(tokens)` is
what goes into `head`, `attend` of each attention is the one place that mixes positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memlab.workloads.attention import Attention as Attention
from memlab.workloads.attention import Block as Block
from memlab.workloads.job import Parts
from memlab.workloads.tokens import foretelling, token_loss
from memlab.workloads.workload import Workload, divided


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
        for one in (self.token, self.position):
            nn.init.normal_(one.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`: (batch, time, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.blocks(self.token(tokens) + self.position(positions)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the next token at each position: (batch, time, vocabulary)."""
        return self.head(self.features(tokens))


def _next_token(model: Transformer, batch: int, time: int, device: str) -> Callable[[], float]:
    model = model.to(device)
    vocabulary = model.token.num_embeddings
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    x, y = (torch.randint(0, vocabulary, (batch, time), device=device) for _ in range(2))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(model(x), y)
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


def gpt(batch: int, time: int, layers: int, width: int, heads: int, vocabulary: int, tied: bool) -> Parts:
    """The model in training, AdamW."""
    divided("width", "heads", width=width, heads=heads)
    return foretelling(Transformer(layers, width, heads, vocabulary, time, tied), batch, time, vocabulary)


_TINY = {"batch": 4, "time": 256, "layers": 6, "width": 64, "heads": 4, "vocabulary": 512, "tied": True}
_LAPTOP = {"batch": 8, "time": 256, "layers": 6, "width": 192, "heads": 6, "vocabulary": 8192, "tied": True}
_CARD = {"batch": 8, "time": 1024, "layers": 12, "width": 768, "heads": 12, "vocabulary": 50_257, "tied": True}
WORKLOADS = (
    Workload(
        "gpt",
        "a decoder-only language model: equal blocks, and scores over a large vocabulary",
        gpt,
        {"tiny": _TINY, "laptop": _LAPTOP, "card": _CARD},
    ),
)
