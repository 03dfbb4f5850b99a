"""Techniques on models that are not like memlab's own: right, or refused in one line that says why."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import memlab
from memlab.errors import DoesNotApply, MemlabError
from memlab.savings import techniques
from memlab.savings.outside import on_models
from memlab.session.trial import habits_of, trial, work_of


class Shortcut(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.layers(x)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean


class Answer(OrderedDict):
    @property
    def logits(self):
        return self["logits"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return Answer(logits=self.head(torch.tanh(self.body(self.embedding(tokens)))))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

    def forward(self, x):
        return (x * self.weight).abs()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.attention(x, x, x)[0])


def parts(model, kind=torch.optim.SGD, batch=None):
    return model, kind(model.parameters(), lr=0.1), batch or (torch.randn(16, 8), torch.randn(16, 8)), nn.MSELoss()


def chain(of):
    return [of() for _ in range(6)]


def layer():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def of_shortcut():
    return parts(Shortcut(*chain(layer)))


def of_averages():
    return parts(nn.Sequential(*chain(Averaging)))


def of_spectral_norm():
    return parts(nn.Sequential(*chain(lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh()))))


def of_tied():
    model, tokens = Tied(), torch.randint(0, 20, (16, 8))

    def loss(output, target):
        return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return model, torch.optim.SGD(model.parameters(), lr=0.1), (tokens, tokens), loss


def of_complex():
    return parts(Complex(), torch.optim.Adam)


def of_sparse():
    tokens = torch.randint(0, 20, (16,))
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8))
    return parts(model, torch.optim.Adagrad, (tokens, torch.randn(16, 8)))


def of_classes():
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(16, 8), torch.randint(0, 4, (16,))),
        loss,
    )


def of_attention():
    return parts(Attending(), batch=(torch.randn(2, 4, 8), torch.randn(2, 4, 8)))


def batch_statistics():
    return nn.BatchNorm1d(8, track_running_stats=False), None, (torch.randn(16, 8),), None


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (of_shortcut, "checkpoint_sequential", "no nn.Sequential of 4 layers"),
        (of_shortcut, "sqrt_segments", "no nn.Sequential of 4 layers"),
        (of_averages, "checkpoint", "changes its buffer 'mean'"),
        (of_averages, "checkpoint_sequential", "changes its buffer 'mean'"),
        (of_spectral_norm, "checkpoint", "changes its buffer .*_u"),
        (of_tied, "chunked_loss", "the loss is not of logits alone"),
        (of_tied, "feature_extraction", "shares its weight with embedding"),
        (of_complex, "autocast_fp16", "complex"),
        (of_complex, "adafactor", "complex"),
        (of_sparse, "adafactor", "sparse"),
        (batch_statistics, "micro_batching", "without running statistics"),
    ],
)
def test_what_would_be_wrong_is_refused_in_one_line(make, name, why):
    with pytest.raises(DoesNotApply, match=why) as caught:
        trial(work_of(make), [name], steps=2, timed=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "name", "verdicts"),
    [
        (of_tied, "pure_bf16", {"equal", "close", "different"}),  # an output of a class of its own stays one
        (of_classes, "loader_workers", {"equal"}),  # workers take no number from those that dropout draws
        (of_classes, "float32", {"close"}),  # the loss has weights, which are made double too
        (of_attention, "pruning", {"different"}),  # a layer of MultiheadAttention is never called
    ],
)
def test_what_is_right_runs(make, name, verdicts):
    before = trial(work_of(make), habits=habits_of([name]), steps=2, timed=False)
    after = trial(work_of(make), [name], steps=2, timed=False)
    assert memlab.compare(before, after).results.verdict in verdicts


def test_names_are_a_list():
    with pytest.raises(MemlabError, match="a list of names, got 'checkpoint'"):
        techniques.ordered("checkpoint")


class Checkpointing(nn.Sequential):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_what_a_backward_runs_again_is_no_model_of_its_own():
    model = Checkpointing(*chain(layer))
    found = []
    with on_models(found.append):
        model(torch.ones(1, 8)).sum().backward()
    assert found == [model]


def test_autocast_from_outside_goes_with_what_is_run_again():
    model = nn.Sequential(*chain(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))))
    with techniques["autocast_bf16"].outside(), techniques["checkpoint"].outside():
        model(torch.randn(4, 8)).square().mean().backward()
    assert all(one.grad is not None for one in model.parameters())
