"""Fewer bits: what is halved and what is not, the scaler, the dangers of half precision, doubles by accident, int8."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from job_runs import loop, prepared, ran, training, tried
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.demos import Serving
from memlab.saving_techniques.precision import Int8Linear, quantized, wide_stack
from memlab.workloads.job import Parts

AUTOCASTS = ("autocast_fp16", "autocast_bf16")


def heavy(kind: type[torch.optim.Optimizer] = torch.optim.Adam, **settings: object) -> Parts:
    """Weights and Adam's state, and hardly an activation."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    return training(model, torch.randn(8, 512), torch.randn(8, 512), kind=kind, **{"lr": 1e-3, **settings})


def by_sgd(**settings: object) -> Callable[[], Parts]:
    return lambda: heavy(torch.optim.SGD, **settings)


def state_bytes(make: Callable[[], Parts], *names: str) -> dict[str, int]:
    """What stays after the steps: weights, gradients and optimizer state, by what holds them."""
    job = ran(make, names)
    weights = list(job.model.parameters())
    assert job.optimizer is not None
    state = [one for held in job.optimizer.state.values() for one in held.values()]
    held = {
        "weights": weights,
        "gradients": [one.grad for one in weights if one.grad is not None],
        "state": [one for one in state if torch.is_tensor(one) and one.dim()],
    }
    return {key: sum(one.nbytes for one in group) for key, group in held.items()}


@pytest.mark.parametrize("name", AUTOCASTS)
def test_autocast_halves_neither_weights_nor_gradients_nor_state(name: str) -> None:
    assert state_bytes(heavy, name) == state_bytes(heavy)
    cast = tried(wide_stack, name)
    assert tried(wide_stack).share(cast) > 0.25
    assert any("in float32" in one and "weights" in one for one in cast.notes), "it says what is not halved"


def test_pure_half_halves_them_all() -> None:
    whole, half = state_bytes(heavy), state_bytes(heavy, "pure_bf16")
    assert {key: 2 * one for key, one in half.items()} == whole


def test_the_loss_of_16_bit_results_is_taken_in_single_precision() -> None:
    output = torch.tensor([300.0, 302.0], dtype=torch.bfloat16)  # which cannot hold the mean of their squares
    assert prepared(heavy, "pure_bf16").loss(output, torch.zeros_like(output)).item() == (300**2 + 302**2) / 2


@pytest.mark.parametrize("name", AUTOCASTS)
def test_where_weights_are_most_of_it_the_copies_come_on_top(name: str) -> None:
    no_state = by_sgd(lr=0.1)
    plain, cast = tried(no_state, steps=1), tried(no_state, name, steps=1)
    weights = 4 * sum(one.numel() for one in no_state()[0].parameters())
    assert cast.peak_bytes - plain.peak_bytes > 0.1 * weights


def test_a_step_whose_gradients_overflow_is_skipped() -> None:
    def exploding() -> Parts:
        model, optimizer, batch, _ = heavy()
        return model, optimizer, batch, lambda output, target: functional.mse_loss(output.float(), target) * 1e6

    job = prepared(exploding, "autocast_fp16", steps=1)
    before = [one.detach().clone() for one in job.model.parameters()]
    job.run()
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizer_gets_unscaled_gradients(fused: bool) -> None:
    make = by_sgd(lr=0.1, fused=fused)
    assert tried(make).off(tried(make, "autocast_fp16")) < 0.01


def test_an_update_that_others_wrapped_goes_as_a_whole() -> None:
    job = prepared(heavy, steps=1)
    calls: list[str] = []
    update = job.update
    job.update = lambda: (calls.append("clipped"), update())[1]  # as a technique before this one would
    techniques["autocast_fp16"].apply(job)
    job.run()
    assert calls == ["clipped"]


def test_sums_in_half_precision_overflow_and_stand_still() -> None:
    """Why autocast on CUDA leaves reductions in float32."""
    ones = torch.full((70_000,), 1.0, dtype=torch.float16)
    assert ones.sum().isinf() and ones.float().sum() == 70_000
    total = torch.tensor(256.0, dtype=torch.bfloat16)
    assert total + 1 == total


def test_small_updates_are_lost_in_bfloat16() -> None:
    def kept(*names: str) -> float:
        job = prepared(by_sgd(lr=1e-3), *names, steps=5)
        first = job.model.state_dict()["0.weight"].clone()
        job.run()
        return float((first == job.model.state_dict()["0.weight"]).float().mean())

    assert kept("pure_bf16") > 0.99 and kept() < 0.9


@pytest.mark.parametrize("name", ["autocast_fp16", "autocast_bf16", "pure_bf16"])
def test_inference(name: str) -> None:
    def make() -> Parts:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), None, (torch.randn(2, 4),), None

    assert tried(make).off(tried(make, name)) < 0.02


def halved() -> Parts:
    model, optimizer, (x, y), loss = heavy()
    return model.bfloat16(), optimizer, (x.bfloat16(), y.bfloat16()), loss


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        *(
            (name, halved, r"autocast halves float32, and the weights of Sequential are torch\.bfloat16")
            for name in AUTOCASTS
        ),
        ("pure_bf16", halved, "no float32 weights to halve"),
        ("autocast_fp16", workloads["lstm"].sized("tiny", batch=1), "no recurrent layers in float16"),
        ("half_inference", lambda: (nn.ReLU(), None, (torch.ones(1),), None), "float32"),
    ],
)
def test_what_cannot_be_halved_is_refused(name: str, make: Callable[[], Parts], why: str) -> None:
    with pytest.raises(DoesNotApply, match=why):
        prepared(make, name)


def test_from_outside_weights_are_cast_anew_each_step() -> None:
    with techniques["autocast_bf16"].patch():
        losses = loop(wide_stack)
    job_losses = tried(wide_stack, "autocast_bf16", steps=3).values[:3]
    assert losses == pytest.approx(job_losses, rel=1e-3) and len(set(losses)) == 3
    assert not torch.is_autocast_enabled("cpu")


def test_doubles_by_accident() -> None:
    make = workloads["mlp"].sized("tiny")
    accident, mended = tried(make, habits=["float32"]), tried(make, "float32")
    assert accident.share(mended) == pytest.approx(0.5, abs=0.02)
    assert tried(make).same(mended)

    def doubled() -> Parts:
        model, optimizer, batch, loss = heavy()
        return model.double(), optimizer, tuple(one.double() for one in batch), loss

    job = ran(doubled, ["float32"])
    assert {one.dtype for one in (*job.batch, *job.model.parameters())} == {torch.float32}


# --- half and int8 at inference ---


def served() -> Parts:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True)) for _ in range(4))
    return Serving(*layers, nn.Linear(64, 16)), None, (torch.randn(32, 64),), None


def off(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().float(), expected.detach().float()
    return float((got - expected).abs().max() / expected.abs().max())


class Tokens(nn.Module):
    """Numbers of words go in, a mask with them; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.first = self.again = nn.Linear(32, 32)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, mask: dict[str, Tensor]) -> Tensor:
        return self.head(self.again(self.first(self.embedding(words) * mask["keep"])))


def tokens() -> Parts:
    return Tokens(), None, (torch.randint(50, (2, 5)), {"keep": torch.ones(2, 5, 1)}), None


def test_half_is_half_throughout_and_leaves_whole_numbers_alone() -> None:
    job = ran(served, ["half_inference"])
    assert {one.dtype for one in job.model.parameters()} == {torch.bfloat16} == {job.batch[0].dtype, job.output.dtype}
    assert 0 < off(job.output, ran(served).output) < 0.05
    job = ran(tokens, ["half_inference"])
    assert job.batch[0].dtype == torch.int64 and job.batch[1]["keep"].dtype == torch.bfloat16


def test_int8_keeps_what_is_shared_and_what_is_tied() -> None:
    job = ran(tokens, ["int8_weights"])
    assert isinstance(job.model.first, Int8Linear) and job.model.first is job.model.again
    assert type(job.model.head) is nn.Linear and job.model.head.weight is job.model.embedding.weight
    assert off(job.output, ran(tokens).output) < 0.02


@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_within_half_a_step_of_each_weight(bias: bool) -> None:
    linear = nn.Linear(64, 32, bias=bias)
    linear.weight.data[0] = 0
    made = quantized(linear)
    unfolded = made.weight * made.scale
    step = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    assert made.weight.dtype == torch.int8
    assert ((unfolded - linear.weight).abs() <= step * 0.501 + 1e-12).all() and not unfolded[0].any()
    torch.testing.assert_close(made(torch.eye(64)), nn.functional.linear(torch.eye(64), unfolded, linear.bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_of_half_weights_does_not_wrap(dtype: torch.dtype) -> None:
    """In bfloat16 the largest weight of a row divided by its rounded scale can be 128."""
    linear = nn.Linear(64, 64).to(dtype)
    linear.weight.data[3] = 0
    made = quantized(linear)
    assert made.scale.dtype == dtype
    assert off(made.weight * made.scale.float(), linear.weight) < 0.02 and not made.weight[3].any()


def test_int8_holds_a_quarter() -> None:
    model = served()[0]
    before = sum(one.nbytes for one in model.state_dict().values())
    after = sum(one.nbytes for one in quantized(model).state_dict().values())
    assert after < 0.29 * before
    with pytest.raises(DoesNotApply, match=r"no nn\.Linear"):
        quantized(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_int8_from_outside() -> None:
    model, _, (x,), _ = served()
    expected = model(x)
    with techniques["int8_weights"].patch():
        got = model(x)
    assert isinstance(model[0][0], Int8Linear) and off(got, expected) < 0.05
    with pytest.raises(DoesNotApply, match="replaced from outside"), techniques["int8_weights"].patch():
        nn.Linear(2, 2)(torch.ones(1, 2))
