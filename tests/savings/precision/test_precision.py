"""Fewer bits: what is halved and what is not, the scaler, the dangers of half precision, doubles by accident."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jobbing import naive, prepared, tried
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.precision.autocast import wide_stack
from memlab.workloads.job import Parts

AUTOCASTS = ("autocast_fp16", "autocast_bf16")


def heavy(rows: int = 8) -> Parts:
    """Weights and Adam's state, and hardly an activation."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    batch = torch.randn(rows, 512), torch.randn(rows, 512)
    return model, torch.optim.Adam(model.parameters(), 1e-3), batch, functional.mse_loss


def state_bytes(make: Callable[[], Parts], *names: str) -> dict[str, int]:
    """What stays after the steps: weights, gradients and optimizer state, by what holds them."""
    job = prepared(make, *names)
    job.run()
    weights = list(job.model.parameters())
    assert job.optimizer is not None
    state = [
        one for held in job.optimizer.state.values() for one in held.values() if torch.is_tensor(one) and one.dim()
    ]
    gradients = [one.grad for one in weights if one.grad is not None]
    return {key: sum(one.nbytes for one in group) for key, group in
            {"weights": weights, "gradients": gradients, "state": state}.items()}  # fmt: skip


@pytest.mark.parametrize("name", AUTOCASTS)
def test_autocast_halves_neither_weights_nor_gradients_nor_state(name: str) -> None:
    assert state_bytes(heavy, name) == state_bytes(heavy)


def test_pure_half_halves_them_all() -> None:
    whole, half = state_bytes(heavy), state_bytes(heavy, "pure_bf16")
    assert {key: 2 * one for key, one in half.items()} == whole


@pytest.mark.parametrize("name", AUTOCASTS)
def test_where_weights_are_most_of_it_the_copies_come_on_top(name: str) -> None:
    def no_state() -> Parts:
        model, _, batch, loss = heavy()
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, loss

    plain, cast = tried(no_state, steps=1), tried(no_state, name, steps=1)
    weights = 4 * sum(one.numel() for one in no_state()[0].parameters())
    assert cast.peak_bytes - plain.peak_bytes > 0.1 * weights
    assert tried(wide_stack).share(tried(wide_stack, name)) > 0.25


def test_it_says_what_is_not_halved() -> None:
    for name in AUTOCASTS:
        assert any("in float32" in one and "weights" in one for one in tried(wide_stack, name).notes)


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
    def make() -> Parts:
        model, _, batch, loss = heavy()
        return model, torch.optim.SGD(model.parameters(), 0.1, fused=fused), batch, loss

    assert tried(make).off(tried(make, "autocast_fp16")) < 0.01


def test_an_update_that_others_wrapped_goes_as_a_whole() -> None:
    job = prepared(heavy, steps=1)
    calls: list[str] = []
    update = job.update
    job.update = lambda: (calls.append("clipped"), update())[1]  # as a technique before this one would
    techniques["autocast_fp16"].apply(job)  # type: ignore[misc]
    job.run()
    assert calls == ["clipped"]


def test_sums_in_half_precision_overflow_and_stand_still() -> None:
    """Why autocast on CUDA leaves reductions in float32."""
    ones = torch.full((70_000,), 1.0, dtype=torch.float16)
    assert ones.sum().isinf() and ones.float().sum() == 70_000
    total = torch.tensor(256.0, dtype=torch.bfloat16)
    assert total + 1 == total


def test_float16_and_adam_end_in_no_number() -> None:
    """What `equality` of pure_fp16 says: epsilon is zero in float16, and a gradient of zero gives 0 / 0."""
    assert torch.tensor(1e-8).half() == 0
    assert tried(heavy, "pure_fp16").values.size and not (tried(heavy, "pure_fp16").off(tried(heavy)) < 1)


def test_small_updates_are_lost_in_bfloat16() -> None:
    def slowly() -> Parts:
        model, _, batch, loss = heavy()
        return model, torch.optim.SGD(model.parameters(), 1e-3), batch, loss

    first = prepared(slowly, "pure_bf16").model.state_dict()["0.weight"].clone()
    job = prepared(slowly, "pure_bf16", steps=5)
    job.run()
    kept = (first == job.model.state_dict()["0.weight"]).float().mean()
    assert kept > 0.99
    whole = prepared(slowly, steps=5)
    exact = whole.model.state_dict()["0.weight"].clone()
    whole.run()
    assert (exact == whole.model.state_dict()["0.weight"]).float().mean() < 0.9


@pytest.mark.parametrize("name", ["autocast_fp16", "autocast_bf16", "pure_bf16"])
def test_inference(name: str) -> None:
    def make() -> Parts:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), None, (torch.randn(2, 4),), None

    assert tried(make).off(tried(make, name)) < 0.02


def test_what_is_half_already_is_refused() -> None:
    def make() -> Parts:
        model, optimizer, (x, y), loss = heavy()
        return model.bfloat16(), optimizer, (x.bfloat16(), y.bfloat16()), loss

    for name in AUTOCASTS:
        with pytest.raises(
            DoesNotApply, match=r"autocast halves float32, and the weights of Sequential are torch\.bfloat16"
        ):
            prepared(make, name)
    with pytest.raises(DoesNotApply, match="no float32 weights to halve"):
        prepared(make, "pure_bf16")


def test_recurrent_layers_in_float16_on_the_cpu() -> None:
    with pytest.raises(DoesNotApply, match="no recurrent layers in float16"):
        prepared(workloads["lstm"].sized("tiny", batch=1), "autocast_fp16")


def test_from_outside_weights_are_cast_anew_each_step() -> None:
    outside = techniques["autocast_bf16"].outside
    assert outside is not None
    before, _ = naive(wide_stack, steps=3)
    with outside():
        after, losses = naive(wide_stack, steps=3)
    assert 1 - after / before > 0.25
    job_losses = tried(wide_stack, "autocast_bf16", steps=3).values[:3]
    assert losses == pytest.approx(job_losses, rel=1e-3) and len(set(losses)) == 3
    assert not torch.is_autocast_enabled("cpu")


def test_from_outside_autocast_ends_with_an_error() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_autocast_enabled("cpu")
            raise ArithmeticError

    outside = techniques["autocast_bf16"].outside
    assert outside is not None
    with outside():
        with pytest.raises(ArithmeticError):
            Failing(2, 2)(torch.ones(1, 2))
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(DoesNotApply, match="no module with float32 weights"), outside():
        nn.Linear(2, 2).double()(torch.ones(1, 2).double())


def test_doubles_by_accident() -> None:
    make = workloads["mlp"].sized("tiny")
    accident, mended = tried(make, habits=["float32"]), tried(make, "float32")
    assert accident.share(mended) == pytest.approx(0.5, abs=0.02)
    assert tried(make).same(mended)

    def doubled() -> Parts:
        model, optimizer, batch, loss = heavy()
        return model.double(), optimizer, tuple(one.double() for one in batch), loss

    job = prepared(doubled, "float32")
    job.run()
    assert {one.dtype for one in (*job.batch, *job.model.parameters())} == {torch.float32}
