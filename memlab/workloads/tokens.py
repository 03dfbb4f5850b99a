"""What all language models share: random tokens, and the loss over a vocabulary.

`model.features(tokens)` gives what goes into `model.head`, a linear layer without bias: (batch, time, width).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.job import Parts


def token_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, averaged over all positions whose target is not -100."""
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def foretelling(model: nn.Module, batch: int, time: int, vocabulary: int, lr: float = 1e-3) -> Parts:
    """The model with AdamW, learning which token comes next."""
    text = torch.randint(vocabulary, (batch, time + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), token_loss
