"""Weight tying and low-rank adapters: what is shared, what is trained, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.parameters.low_rank import RANK, LowRank, adapt
from memlab.savings.parameters.weight_tying import untied
from memlab.workloads.job import Job, Parts, seeded


def prepared(make, *names: str) -> Job:
    job = Job("cpu", steps=2)
    with seeded():
        techniques.prepare(job, make, names)
    return job


def test_tied_is_one_tensor_for_the_optimizer_too() -> None:
    job = prepared(untied, "weight_tying")
    assert job.model.head.weight is job.model.token.weight and job.optimizer is not None
    assert len(job.optimizer.param_groups[0]["params"]) == len(list(job.model.parameters())) == 3
    job.run()
    assert len(job.optimizer.state) == 3 and all(one.isfinite() for one in job.losses)


def test_what_cannot_be_tied() -> None:
    refused = [
        (workloads["gpt"].sized("tiny", tied=True), "share their weight"),
        (workloads["mlp"].sized("tiny"), "no embedding"),
    ]
    for make, why in refused:
        with pytest.raises(DoesNotApply, match=why):
            prepared(make, "weight_tying")


def linear_stack() -> Parts:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(nn.Linear(32, 32, bias=False), shared), nn.Linear(32, 2))
    batch = torch.randn(4, 32), torch.randint(0, 2, (4,))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.3), batch, nn.CrossEntropyLoss()


def test_adapters_begin_as_the_model_was_and_alone_are_trained() -> None:
    plain, job = prepared(linear_stack), prepared(linear_stack, "low_rank")
    x = job.batch[0]
    assert torch.equal(plain.model(x), job.model(x))
    before = {name: one.clone() for name, one in job.model.named_parameters()}
    job.run()
    moved = {name for name, one in job.model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {f"{path}.{part}" for path in ("0", "2.0") for part in ("down", "up")}
    assert job.optimizer is not None and job.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert len(job.optimizer.state) == 4


def test_a_layer_in_two_places_has_one_detour() -> None:
    model = linear_stack()[0]
    parts = adapt(model)
    assert model[0] is model[2][1] and isinstance(model[0], LowRank) and len(parts) == 4
    assert type(model[3]) is nn.Linear, "a layer as narrow as its adapter would be stays"


def test_values_against_the_sum_written_out() -> None:
    layer = nn.Linear(16, 12)
    adapted = LowRank(layer)
    with torch.no_grad():
        adapted.up.normal_()
    x = torch.randn(5, 3, 16)
    assert torch.allclose(adapted(x), x @ (layer.weight + adapted.up @ adapted.down).T + layer.bias, atol=1e-5)
    assert adapted.down.shape == (RANK, 16) and adapted.weight is layer.weight


class Attending(nn.Module):
    """MultiheadAttention reads the weight of its last layer and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def test_attention_s_own_layer_is_left_alone() -> None:
    def attending() -> Parts:
        model = Attending()
        batch = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.MSELoss()

    job = prepared(attending, "low_rank")
    assert not isinstance(job.model.attention.out_proj, LowRank) and isinstance(job.model.last, LowRank)
    job.run()


def test_what_cannot_be_adapted() -> None:
    def narrow() -> Parts:
        model = nn.Linear(4, 4)
        return model, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(1, 4), torch.ones(1, 4)), nn.MSELoss()

    refused = [(narrow, "no linear layer"), (workloads["unet"].sized("tiny"), "no linear layer")]
    refused += [(workloads["gan"].sized("tiny"), "a step of its own")]
    for make, why in refused:
        with pytest.raises(DoesNotApply, match=why):
            prepared(make, "low_rank")
