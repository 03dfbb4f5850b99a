"""What an optimizer remembers, number by number; loop, foreach and fused; settings that stay; what only CUDA's build shows."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from job_runs import prepared, ran

from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.optimizers import adam_of_many_layers, decayed
from memlab.saving_techniques.patching import rebuild
from memlab.workloads.job import Job, Parts, seeded


def made_with(kind: type[torch.optim.Optimizer], **settings: object) -> Callable[[], Parts]:
    def make() -> Parts:
        model, _, batch, loss = decayed()
        layers = list(model.parameters())
        groups = [{"params": layers[:2], "lr": 0.02}, {"params": layers[2:]}]
        return model, kind(groups, **settings), batch, loss  # type: ignore[call-arg]

    return make


def remembered(job: Job) -> int:
    """Numbers of state, apart from counts of steps."""
    assert job.optimizer is not None
    states = [one for state in job.optimizer.state.values() for one in state.values()]
    return sum(one.numel() for one in states if isinstance(one, torch.Tensor) and one.numel() > 1)


def test_how_many_numbers_for_each_parameter() -> None:
    plain = ran(adam_of_many_layers)
    parameters = list(plain.model.parameters())
    count = sum(one.numel() for one in parameters)
    assert remembered(plain) == 2 * count
    assert remembered(ran(adam_of_many_layers, ["sgd"])) == 0
    assert remembered(ran(adam_of_many_layers, ["momentum"])) == count
    factored = sum(sum(one.shape) if one.dim() == 2 else one.numel() for one in parameters)
    assert remembered(ran(adam_of_many_layers, ["adafactor"])) == factored < count / 50
    assert remembered(ran(made_with(torch.optim.SGD, lr=0.1, momentum=0.9), ["sgd"])) == 0


SGD = made_with(torch.optim.SGD, lr=0.1)
ADAFACTOR = made_with(torch.optim.Adafactor)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        *(
            (name, SGD, "SGD keeps no more than .*: there is nothing to save")
            for name in ("sgd", "momentum", "adafactor")
        ),
        ("momentum", made_with(torch.optim.SGD, lr=0.1, momentum=0.9), "nothing to save"),
        ("adafactor", ADAFACTOR, "nothing to save"),
        ("momentum", ADAFACTOR, "nothing to save"),
        ("fused", made_with(torch.optim.RMSprop), "RMSprop has no fused"),
        ("fused", made_with(torch.optim.Adam, differentiable=True), "is not differentiable"),
        ("foreach_off", made_with(torch.optim.SparseAdam), "SparseAdam has no foreach"),
        ("foreach_off", made_with(torch.optim.SGD, lr=0.1, fused=True), "is fused"),
    ],
)
def test_what_would_save_nothing_or_is_not_there(name: str, make: Callable[[], Parts], why: str) -> None:
    with pytest.raises(DoesNotApply, match=why):
        prepared(make, name)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_the_user_s_settings_stay(kind: type[torch.optim.Optimizer]) -> None:
    make = made_with(kind, lr=0.01, weight_decay=0.05)
    plain, fused = ran(make, (), ["fused"]), ran(make, ["fused"])
    for before, after in zip(plain.optimizer.param_groups, fused.optimizer.param_groups, strict=True):
        for key in before.keys() - {"params", "foreach", "fused"}:
            assert before[key] == after[key], key
        assert (before["foreach"], after["foreach"], after["fused"]) == (True, False, True)
    torch.testing.assert_close(plain.outcome()["weights"], fused.outcome()["weights"], atol=1e-5, rtol=0)


def test_an_optimizer_that_cannot_be_rebuilt_says_so() -> None:
    class Strange(torch.optim.SGD):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1)

    with pytest.raises(DoesNotApply, match="Strange cannot be rebuilt"):
        rebuild(Strange(torch.nn.Linear(2, 2)), fused=True)


@pytest.mark.simulated
def test_foreach_is_the_default_on_cuda_and_takes_the_parameters_once_more() -> None:
    def peak(*names: str) -> int:
        """PyTorch's own counter, of one job."""
        gc.collect()
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job = Job("cuda", steps=2)
        with seeded():
            techniques.prepare(job, decayed, names)
            job.run()
        vars(job).clear()
        return torch.cuda.max_memory_allocated() - before

    peak()  # the library's workspace, once and for all
    parameters = sum(one.nbytes for one in decayed()[0].parameters())
    plain, loop, fused = peak(), peak("foreach_off"), peak("fused")
    assert plain - loop > 0.9 * parameters and plain - fused > 0.9 * parameters
