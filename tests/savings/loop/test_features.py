"""Features collected into lists: the same numbers with a graph and without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.loop.features import layers_of, pictures
from memlab.workloads.job import Job, seeded


def features(names: list[str], habits: list[str]) -> tuple[Job, list[torch.Tensor]]:
    job = Job("cpu", steps=2)
    with seeded():
        techniques.prepare(job, pictures, names, habits)
        job.run()
    return job, job.held[0]


def test_the_same_features_with_a_graph_and_without() -> None:
    with_graph, without = features([], ["feature_lists"])[1], features(["feature_lists"], [])[1]
    assert len(with_graph) == len(without) == 4, "the list is that of the last step alone"
    assert all(torch.equal(a, b) for a, b in zip(with_graph, without, strict=True))
    assert all(one.grad_fn is not None for one in with_graph)
    assert all(one.grad_fn is None for one in without)


def test_no_hook_stays() -> None:
    job, _ = features(["feature_lists"], [])
    assert not any(one._forward_hooks for one in job.model.modules())


def test_layers_are_spread_over_the_model() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(6)))
    found = layers_of(model)
    assert len(found) == 4 and len({id(one) for one in found}) == 4
    assert layers_of(nn.Linear(2, 2)), "a single layer is one to look at"


def test_training_needs_its_graph() -> None:
    def training():
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(1, 2), torch.ones(1, 2)), nn.MSELoss()

    with pytest.raises(DoesNotApply, match="trains"):
        techniques.prepare(Job("cpu"), training, ["feature_lists"])
