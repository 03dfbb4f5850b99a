"""Techniques on models that are not like memlab's own: right, or refused in one line that says why."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from job_runs import training
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

import memlab
from memlab.api.workload_run import baseline_patterns_of, run_workload, work_of
from memlab.errors import DoesNotApply


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


def parts(model, kind=torch.optim.SGD, batch=None):
    return training(model, *(batch or (torch.randn(16, 8), torch.randn(16, 8))), kind=kind)


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

    return training(model, tokens, tokens, loss=loss)


def of_complex():
    return parts(Complex(), torch.optim.Adam)


def of_sparse():
    tokens = torch.randint(0, 20, (16,))
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 8))
    return parts(model, torch.optim.Adagrad, (tokens, torch.randn(16, 8)))


def of_classes():
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    return training(model, torch.randn(16, 8), torch.randint(0, 4, (16,)), loss=loss)


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
        run_workload(work_of(make), [name], steps=2, timed=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "name", "verdicts"),
    [
        (of_tied, "pure_bf16", {"equal", "close", "different"}),  # an output of a class of its own stays one
        (of_classes, "float32", {"close"}),  # the loss has weights, which are made double too
    ],
)
def test_what_is_right_runs(make, name, verdicts):
    before = run_workload(work_of(make), habits=baseline_patterns_of([name]), steps=2, timed=False)
    after = run_workload(work_of(make), [name], steps=2, timed=False)
    assert memlab.compare(before, after).results.verdict in verdicts
