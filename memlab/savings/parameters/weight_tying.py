"""One table for the embedding and the output layer: both are (vocabulary, width), and stand for the same words."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.savings.optimizers.groups import only
from memlab.savings.technique import Shown, Technique, changes
from memlab.workloads.job import Job, Parts


def pair_of(model: nn.Module) -> tuple[nn.Embedding, nn.Linear]:
    """The first embedding and the last linear layer with weights of one shape that are not one already."""
    heads = [one for one in model.modules() if isinstance(one, nn.Linear)][::-1]
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding)]
    for table in tables:
        for head in heads:
            if head.weight is table.weight:
                raise DoesNotApply("the embedding and the output layer share their weight already.")
            if head.weight.shape == table.weight.shape and head.weight.dtype == table.weight.dtype:
                return table, head
    raise DoesNotApply("there is no embedding with an output layer of the same shape, (vocabulary, width).")


def _apply(job: Job) -> None:
    table, head = pair_of(job.model)
    head.weight = table.weight
    if job.optimizer is not None:
        kept = {id(one) for one in job.model.parameters()}
        only(job.optimizer, lambda one: id(one) in kept)


class Speaker(nn.Module):
    """A table, a layer, and scores for each word: of nearly nothing but two tables."""

    def __init__(self, vocabulary: int = 4000, width: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layer = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the next token: (batch, vocabulary, time), as cross_entropy takes them."""
        return self.head(self.layer(self.token(tokens))).transpose(1, 2)


def untied() -> Parts:
    """Two tables, and Adam: eight of them with gradients and states."""
    model = Speaker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, tuple(torch.randint(0, 4000, (2, 8)) for _ in range(2)), nn.CrossEntropyLoss()


TECHNIQUES = (
    Technique(
        name="weight_tying",
        idea="Use one table for the embedding and for the output layer: its gradient and its states go too.",
        attacks=("parameter", "gradient", "optimizer"),
        kind="saving",
        stage="model",
        equality=changes("one table has to serve both ends; for smaller models it usually serves better"),
        price="none in time; a large model may be a little worse for it",
        not_when="the vocabulary is small beside the layers; the shapes differ; both are one already",
        code="model.head.weight = model.token.weight            # before the optimizer is made",
        references=(
            "Press and Wolf, Using the Output Embedding to Improve Language Models, 2016, https://arxiv.org/abs/1608.05859",
        ),
        shown=Shown(untied),
        tips=("A6",),
        excludes={
            "freezing": "the last layer, which is trained, would be the embedding, which is frozen.",
            "feature_extraction": "the last layer, which is trained, would be the embedding, which is frozen.",
            "pruning": "the mask of the output layer would not fit the embedding.",
        },
        apply=_apply,
    ),
)
