"""Which parameters there are and which are trained: frozen parts, adapters, tied tables, unused layers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from job_runs import one_inference, one_layer, prepared, ran, training
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques.parameters import RANK, LowRank, adapt, several_heads, untied, unused_in
from memlab.workloads.job import Job, Parts

BOTH = ("freezing", "feature_extraction")


def trained_by(job: Job) -> set[int]:
    assert job.optimizer is not None
    return {id(one) for group in job.optimizer.param_groups for one in group["params"]}


# --- the last layer alone ---


def backbone() -> Parts:
    body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    model = nn.Sequential(body, nn.ReLU(inplace=True), nn.Linear(8, 3), nn.LogSoftmax(-1))
    batch = torch.randn(4, 8), torch.randint(0, 3, (4,))
    return training(model, *batch, loss=functional.nll_loss, kind=torch.optim.AdamW, weight_decay=0.1)


@pytest.mark.parametrize("name", BOTH)
def test_the_head_learns_what_it_learnt_when_the_rest_was_left_out_of_the_optimizer(name: str) -> None:
    habit, frozen = ran(backbone, (), (name,)), ran(backbone, (name,))
    assert habit.outcome()["digest"] == frozen.outcome()["digest"]
    assert habit.outcome()["losses"] == frozen.outcome()["losses"]
    assert all(torch.equal(a, b) for a, b in zip(habit.model.buffers(), frozen.model.buffers(), strict=True))
    assert [one.grad is not None for one in frozen.model.parameters()] == [False] * 6 + [True, True]
    assert frozen.optimizer is not None and set(frozen.optimizer.state) == set(frozen.model[2].parameters())
    assert all(one.grad is not None for one in habit.model.parameters()), "what the habit costs"


@pytest.mark.parametrize(("name", "expected"), [(BOTH[0], [True, True]), (BOTH[1], [False, True])])
def test_nothing_is_recorded_before_the_head(name: str, expected: list[bool]) -> None:
    recorded: list[bool] = []
    job = prepared(backbone, name, steps=1)
    job.model[0].register_forward_hook(lambda module, x, y: recorded.append(torch.is_grad_enabled()))
    job.model[3].register_forward_hook(lambda module, x, y: recorded.append(y.requires_grad))
    job.run()
    assert recorded == expected


def test_gradients_are_on_again_also_after_an_error() -> None:
    job = prepared(backbone, "feature_extraction")
    job.model[0][0].weight.data = torch.zeros(3, 3)
    with pytest.raises(RuntimeError):
        job.run()
    assert torch.is_grad_enabled()
    assert not any(one._forward_pre_hooks for one in job.model.modules())


def test_the_user_s_groups_stay() -> None:
    def grouped() -> Parts:
        model, _, batch, loss = backbone()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.7}]
        return model, torch.optim.SGD(groups, lr=0.1), batch, loss

    groups = ran(grouped, ("freezing",)).optimizer.param_groups
    assert [(len(one["params"]), one["lr"]) for one in groups] == [(0, 0.1), (2, 0.7)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.token(x))


def test_a_head_that_is_also_the_embedding_stays_trained() -> None:
    def tied() -> Parts:
        return training(Tied(), torch.randint(0, 5, (6,)), torch.randint(0, 5, (6,)), loss=functional.cross_entropy)

    assert all(one.requires_grad for one in ran(tied, ("freezing",)).model.parameters())


def frozen_head() -> Parts:
    parts = backbone()
    parts[0][2].requires_grad_(False)
    return parts


def broken() -> Parts:
    return training(nn.Linear(4, 4), torch.randn(2, 5), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        *((name, one_layer, "1 layers with parameters") for name in BOTH),
        *((name, frozen_head, "nothing would be trained") for name in BOTH),
        *((name, one_inference, "inference") for name in BOTH),
        *((name, workloads["gan"].sized("tiny"), "a step of its own") for name in (*BOTH, "low_rank", "unused_layers")),
        ("weight_tying", workloads["gpt"].sized("tiny", tied=True), "share their weight"),
        ("weight_tying", workloads["mlp"].sized("tiny"), "no embedding"),
        ("low_rank", one_layer, "no linear layer"),
        ("low_rank", workloads["unet"].sized("tiny"), "no linear layer"),
        ("unused_layers", broken, "could not be tried"),
        *(
            ("unused_layers", workloads[name].sized("tiny"), "every layer with parameters is used")
            for name in sorted(set(workloads) - {"gan", "vgg19", "densenet121", "resnet50"})
        ),
    ],
)
def test_refusals(name: str, make: Callable[[], Parts], why: str) -> None:
    with pytest.raises(DoesNotApply, match=why):
        prepared(make, name)


# --- one table for both ends, and adapters ---


def test_tied_is_one_tensor_for_the_optimizer_too() -> None:
    job = prepared(untied, "weight_tying")
    assert job.model[3].weight is job.model[0].weight and job.optimizer is not None
    assert len(job.optimizer.param_groups[0]["params"]) == len(list(job.model.parameters())) == 3
    job.run()
    assert len(job.optimizer.state) == 3 and all(one.isfinite() for one in job.losses)


def linear_stack() -> Parts:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(nn.Linear(32, 32, bias=False), shared), nn.Linear(32, 2))
    batch = torch.randn(4, 32), torch.randint(0, 2, (4,))
    return training(model, *batch, loss=functional.cross_entropy, kind=torch.optim.AdamW, lr=0.01, weight_decay=0.3)


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


def test_a_layer_in_two_places_has_one_bypass() -> None:
    model = linear_stack()[0]
    parts = adapt(model)
    assert model[0] is model[2][1] and isinstance(model[0], LowRank) and len(parts) == 4
    assert type(model[3]) is nn.Linear, "a layer as narrow as its adapter would be stays"


def test_values_against_the_sum_written_out() -> None:
    layer, x = nn.Linear(16, 12), torch.randn(5, 3, 16)
    adapted = LowRank(layer)
    with torch.no_grad():
        adapted.up.normal_()
    expected = x @ (layer.weight + adapted.up @ adapted.down).T + layer.bias
    torch.testing.assert_close(adapted(x), expected, atol=1e-5, rtol=0)
    assert adapted.down.shape == (RANK, 16) and adapted.weight is layer.weight


class AttentionAndLast(nn.Module):
    """MultiheadAttention reads the weight of its last layer and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def test_attention_s_own_layer_is_left_alone() -> None:
    job = ran(lambda: training(AttentionAndLast(), torch.randn(2, 5, 32), torch.randn(2, 5, 32)), ["low_rank"])
    assert not isinstance(job.model.attention.out_proj, LowRank) and isinstance(job.model.last, LowRank)


# --- unused layers ---


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
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss(output["out"], target)

    return training(Odd(), *(torch.randn(3, 4) for _ in range(3)), loss=loss, kind=torch.optim.AdamW)


def test_what_is_unused() -> None:
    model, _, batch, _ = odd()
    assert list(unused_in(model, batch[:-1])) == ["spare", "others.0", "others.1", "spare_frozen"]
    assert not model.frozen.weight.requires_grad, "put back"
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_without_them_training_goes_on_as_before() -> None:
    plain, lean = ran(odd, steps=3), ran(odd, ["unused_layers"], steps=3)
    assert plain.outcome()["losses"] == lean.outcome()["losses"]
    kept = dict(lean.model.named_parameters())
    assert len(kept) == len(dict(plain.model.named_parameters())) - 10
    assert all(torch.equal(one, plain.model.get_parameter(name)) for name, one in kept.items())
    assert trained_by(lean) == {id(one) for one in kept.values()}
    assert "spare, others.0, others.1, spare_frozen" in lean.notes[0]


def test_an_inference_too() -> None:
    model, x = several_heads()[0], torch.randn(2, 256)
    expected = copy.deepcopy(model).eval()
    job = ran(lambda: (model, None, (x,), None), ["unused_layers"])
    assert torch.equal(job.output, expected(x)) and len(list(job.model[1].parameters())) == 0
