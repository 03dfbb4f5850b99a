"""Cross-entropy in chunks: the same gradients, and every loss that is no mean over positions refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from job_runs import prepared, training, tried
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.workloads.job import Parts


def _next_token(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


class Language(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.token, self.body = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.token(tokens))))


def language(
    loss: Callable[..., Tensor] = _next_token,
    time: int = 11,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> Callable[[], Parts]:
    def make() -> Parts:
        model = Language(50, 8)
        change(model)
        return training(model, *(torch.randint(0, 50, (2, time)) for _ in range(2)), loss=loss)

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
        return training(model, torch.randn(20, 4), torch.randint(0, 100, (20,)), loss=functional.cross_entropy)

    assert tried(make).off(tried(make, "chunked_loss")) < 1e-5


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), torch.linspace(0.1, 2, logits.shape[-1]))


def summed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


def with_ignored() -> Parts:
    model, optimizer, (tokens, target), loss = language()()
    target[0, 3] = -100
    return model, optimizer, (tokens, target), loss


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (language(weighted), "no mean over positions"),
        (language(summed), "no mean over positions"),
        (with_ignored, "some targets are -100"),
        *(
            (workloads[name].sized("tiny"), "does not end in a Linear layer that makes its input larger")
            for name in ("mlp", "resnet18", "unet")
        ),
    ],
)
def test_other_losses_and_models_are_refused(make: Callable[[], Parts], why: str) -> None:
    with pytest.raises(DoesNotApply, match=why):
        prepared(make, "chunked_loss")


class Scaled(Language):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 2


def test_a_model_that_goes_on_after_its_last_layer_is_refused() -> None:
    def make() -> Parts:
        return training(Scaled(50, 8), *(torch.ones(2, 3).long(),) * 2, loss=_next_token)

    job = prepared(make, "chunked_loss")
    with pytest.raises(DoesNotApply, match="does something after its last Linear layer"):
        job.run()


def test_the_logits_never_exist_at_once() -> None:
    """256 positions more of 4000 scores each, in plain training three times as many bytes, here an eighth of that."""

    def longer(time: int) -> Callable[[], Parts]:
        return lambda: training(Language(4000, 8), *(torch.ones(1, time).long(),) * 2, loss=_next_token)

    logits = 2 * 256 * 4000 * 4
    plain = tried(longer(512)).peak_bytes - tried(longer(256)).peak_bytes
    chunked = tried(longer(512), "chunked_loss").peak_bytes - tried(longer(256), "chunked_loss").peak_bytes
    assert plain >= 2 * logits // 2 and chunked <= logits // 2
