"""A recurrent language model, as in Zaremba et al., 2014 (https://arxiv.org/abs/1409.2329), without dropout.

`blocks` has one `nn.LSTM` for each layer, as one with several layers has no place between them. Size "card" is their large model.
"""

from __future__ import annotations

from torch import Tensor, nn

from memlab.workloads.job import Parts
from memlab.workloads.tokens import foretelling
from memlab.workloads.workload import Workload


class Recurrent(nn.Module):
    """One layer over all positions; its last state is let go."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Of the input's shape: (batch, time, width)."""
        return self.lstm(x)[0]


class LstmLanguage(nn.Module):
    """Embedding, layers, and scores over the vocabulary; `tied` shares the embedding with the output layer."""

    def __init__(self, layers: int, width: int, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.05)
        self.blocks = nn.Sequential(*(Recurrent(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def features(self, tokens: Tensor) -> Tensor:
        """What goes into `head`: (batch, time, width)."""
        return self.blocks(self.token(tokens))

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the next token at each position: (batch, time, vocabulary)."""
        return self.head(self.features(tokens))


def lstm(batch: int, time: int, layers: int, width: int, vocabulary: int, tied: bool) -> Parts:
    """The model in training, AdamW."""
    return foretelling(LstmLanguage(layers, width, vocabulary, tied), batch, time, vocabulary)


WORKLOADS = (
    Workload(
        "lstm",
        "a recurrent language model: small states at many times, and scores over a vocabulary",
        lstm,
        {
            "tiny": {"batch": 16, "time": 64, "layers": 2, "width": 64, "vocabulary": 1000, "tied": False},
            "laptop": {"batch": 24, "time": 64, "layers": 2, "width": 256, "vocabulary": 10_000, "tied": False},
            "card": {"batch": 20, "time": 35, "layers": 2, "width": 1500, "vocabulary": 10_000, "tied": False},
        },
    ),
)
