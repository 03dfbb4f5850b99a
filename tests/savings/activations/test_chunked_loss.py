"""Cross-entropy in chunks: the same gradients, and every loss that is no mean over positions refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from jobbing import prepared, tried
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings.activations.chunked_loss import _Language, _next_token, large_vocabulary
from memlab.workloads.job import Parts


def language(
    loss: Callable[..., Tensor] = _next_token,
    time: int = 11,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> Callable[[], Parts]:
    def make() -> Parts:
        model = _Language(50, 8)
        change(model)
        batch = torch.randint(0, 50, (2, time)), torch.randint(0, 50, (2, time))
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, loss

    return make


def tie(model: nn.Module) -> None:
    model.head.weight = model.token.weight


def freeze(model: nn.Module) -> None:
    model.head.requires_grad_(False)


@pytest.mark.parametrize("make", [
    *(language(time=time) for time in (1, 7, 8, 64)), language(change=tie), language(change=freeze),
    workloads["lstm"].sized("tiny", batch=2), workloads["gpt"].sized("tiny", batch=1, tied=True),
])  # fmt: skip
def test_the_same_training(make: Callable[[], Parts]) -> None:
    assert tried(make).off(tried(make, "chunked_loss")) < 1e-4


def test_positions_in_one_row() -> None:
    def make() -> Parts:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 100))
        batch = torch.randn(20, 4), torch.randint(0, 100, (20,))
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, functional.cross_entropy

    assert tried(make).off(tried(make, "chunked_loss")) < 1e-5


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), torch.linspace(0.1, 2, logits.shape[-1]))


def summed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


@pytest.mark.parametrize("loss", [weighted, summed])
def test_other_losses_are_refused(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(DoesNotApply, match="no mean over positions"):
        prepared(language(loss), "chunked_loss")


def test_positions_that_do_not_count_are_refused() -> None:
    def make() -> Parts:
        model, optimizer, (tokens, target), loss = language()()
        target[0, 3] = -100
        return model, optimizer, (tokens, target), loss

    with pytest.raises(DoesNotApply, match="some targets are -100"):
        prepared(make, "chunked_loss")


class Scaled(_Language):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2


def test_a_model_that_goes_on_after_its_last_layer_is_refused() -> None:
    def make() -> Parts:
        model = Scaled(50, 8)
        return model, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(2, 3).long(),) * 2, _next_token

    job = prepared(make, "chunked_loss")
    with pytest.raises(DoesNotApply, match="does something after its last Linear layer"):
        job.run()


def test_what_has_no_vocabulary_is_refused() -> None:
    for name in ("mlp", "resnet18", "unet"):
        with pytest.raises(DoesNotApply, match="does not end in a Linear layer that makes its input larger"):
            prepared(workloads[name].sized("tiny"), "chunked_loss")


def test_the_logits_never_exist_at_once() -> None:
    """256 positions more of 4000 scores each, in plain training three times as many bytes, here an eighth of that."""

    def longer(time: int) -> Callable[[], Parts]:
        return lambda: large_vocabulary(time=time)

    logits = 2 * 256 * 4000 * 4
    plain = tried(longer(512)).peak_bytes - tried(longer(256)).peak_bytes
    chunked = tried(longer(512), "chunked_loss").peak_bytes - tried(longer(256), "chunked_loss").peak_bytes
    assert plain >= 2 * logits and chunked <= logits
