"""What an optimizer remembers, number by number, and which choice is none."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.optimizers.choice import adam_of_many_layers
from memlab.workloads.job import Job, Parts, seeded


def with_optimizer(kind: type[torch.optim.Optimizer], **settings: object) -> Callable[[], Parts]:
    def make() -> Parts:
        model, _, batch, loss = adam_of_many_layers()
        return model, kind(model.parameters(), **settings), batch, loss  # type: ignore[call-arg]

    return make


def ran(make: Callable[[], Parts], *names: str) -> Job:
    job = Job("cpu", steps=2)
    with seeded():
        techniques.prepare(job, make, names)
        job.run()
    return job


def remembered(job: Job) -> int:
    """Numbers of state, apart from counts of steps."""
    assert job.optimizer is not None
    return sum(
        one.numel()
        for state in job.optimizer.state.values()
        for one in state.values()
        if isinstance(one, torch.Tensor) and one.numel() > 1
    )


def test_how_many_numbers_for_each_parameter() -> None:
    plain = ran(adam_of_many_layers)
    count = sum(one.numel() for one in plain.model.parameters())
    assert remembered(plain) == 2 * count
    assert remembered(ran(adam_of_many_layers, "sgd")) == 0
    assert remembered(ran(adam_of_many_layers, "momentum")) == count
    matrices = [one for one in plain.model.parameters() if one.dim() == 2]
    vectors = [one for one in plain.model.parameters() if one.dim() == 1]
    factored = sum(sum(one.shape) for one in matrices) + sum(one.numel() for one in vectors)
    assert remembered(ran(adam_of_many_layers, "adafactor")) == factored < count / 50


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.1}),
        ("momentum", torch.optim.SGD, {"lr": 0.1}),
        ("momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("adafactor", torch.optim.SGD, {"lr": 0.1}),
        ("adafactor", torch.optim.Adafactor, {}),
        ("momentum", torch.optim.Adafactor, {}),
        ("adam_8bit", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_what_would_save_nothing(name: str, kind: type[torch.optim.Optimizer], settings: dict[str, float]) -> None:
    with pytest.raises(DoesNotApply, match="nothing to save"):
        techniques.prepare(Job("cpu"), with_optimizer(kind, **settings), [name])


def test_plain_sgd_in_the_place_of_momentum() -> None:
    assert remembered(ran(with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9), "sgd")) == 0


def test_without_a_library_8_bits_say_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("bitsandbytes", "bitsandbytes.optim", "torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DoesNotApply, match=r"8-bit Adam .* bitsandbytes or torchao\.$"):
        techniques.prepare(Job("cpu"), adam_of_many_layers, ["adam_8bit"])


def test_with_a_library_its_adam_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class AdamW8bit(torch.optim.SGD):
        """In the place of the library's."""

    optim = types.ModuleType("torchao.optim")
    optim.AdamW8bit = AdamW8bit  # type: ignore[attr-defined]
    for name, module in {
        "bitsandbytes.optim": None,
        "torchao": types.ModuleType("torchao"),
        "torchao.optim": optim,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    job = ran(adam_of_many_layers, "adam_8bit")
    assert type(job.optimizer) is AdamW8bit and job.optimizer.param_groups[0]["lr"] == 1e-3


def test_an_inference_has_no_optimizer() -> None:
    def inference() -> Parts:
        return nn.Linear(2, 2), None, (torch.ones(1, 2),), None

    for name in ("sgd", "momentum", "adafactor", "adam_8bit", "foreach_off", "fused", "contiguous_parameters"):
        with pytest.raises(DoesNotApply, match="inference"):
            techniques.prepare(Job("cpu"), inference, [name])
