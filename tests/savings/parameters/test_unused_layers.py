"""Which layers count as unused, and what is left of a model without them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.parameters.unused_layers import several_heads, unused_in
from memlab.workloads.job import Job, Parts, seeded


class Odd(nn.Module):
    """Used in many ways, and two layers in none."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.by_weight = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4))
        self.spare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.others = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        self.spare_frozen = nn.Linear(4, 4).requires_grad_(False)
        self.plain = nn.ReLU()
        self.alias = self.shared

    def forward(self, x: Tensor, unused: Tensor) -> dict[str, Tensor]:
        y = self.shared(self.called(x)) * self.scale
        y = functional.linear(y, self.by_weight.weight)
        return {"out": self.others[2](functional.linear(y, self.frozen.weight))}


def odd() -> Parts:
    model = Odd()
    batch = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, batch, lambda output, target: functional.mse_loss(output["out"], target)


def test_what_is_unused() -> None:
    model, _, batch, _ = odd()
    assert list(unused_in(model, batch[:-1])) == ["spare", "others.0", "others.1", "spare_frozen"]
    assert not model.frozen.weight.requires_grad, "put back"
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_without_them_training_goes_on_as_before() -> None:
    found = []
    for names in ([], ["unused_layers"]):
        job = Job("cpu", steps=3)
        with seeded():
            techniques.prepare(job, odd, names)
            job.run()
        found.append(job)
    plain, lean = found
    assert plain.outcome()["losses"] == lean.outcome()["losses"]
    kept = dict(lean.model.named_parameters())
    assert len(kept) == len(dict(plain.model.named_parameters())) - 10
    assert all(torch.equal(one, plain.model.get_parameter(name)) for name, one in kept.items())
    assert lean.optimizer is not None
    assert {id(one) for group in lean.optimizer.param_groups for one in group["params"]} == {
        id(one) for one in kept.values()
    }
    assert "spare, others.0, others.1, spare_frozen" in lean.notes[0]


@pytest.mark.parametrize("name", sorted(set(workloads) - {"gan", "vgg19", "densenet121", "resnet50"}))
def test_our_own_models_use_all_they_have(name: str) -> None:
    with pytest.raises(DoesNotApply, match="every layer with parameters is used"):
        techniques.prepare(Job("cpu"), workloads[name].sized("tiny"), ["unused_layers"])


def test_an_inference_too() -> None:
    job = Job("cpu", steps=1)
    model = several_heads()[0]
    expected = copy.deepcopy(model).eval()
    x = torch.randn(2, 256)
    techniques.prepare(job, lambda: (model, None, (x,), None), ["unused_layers"])
    job.run()
    assert torch.equal(job.output, expected(x)) and len(list(job.model.heads[1].parameters())) == 0


def test_a_model_that_cannot_be_tried_says_so() -> None:
    def broken() -> Parts:
        model = nn.Linear(4, 4)
        batch = torch.randn(2, 5), torch.randn(2, 4)
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.MSELoss()

    with pytest.raises(DoesNotApply, match="could not be tried"):
        techniques.prepare(Job("cpu"), broken, ["unused_layers"])
