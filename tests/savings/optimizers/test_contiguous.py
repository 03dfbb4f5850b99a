"""One buffer for all parameters: the same values, and not fewer bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.optimizers.choice import adam_of_many_layers
from memlab.session.trial import trial, work_of
from memlab.workloads.job import Job, Parts, seeded

NAME = "contiguous_parameters"


def ran(make, *names: str, steps: int = 3) -> Job:
    job = Job("cpu", steps)
    with seeded():
        techniques.prepare(job, make, names)
        job.run()
    return job


def grouped() -> Parts:
    """Two groups of settings, a frozen layer, a shared one."""
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 8).requires_grad_(False), shared, nn.Linear(8, 2))
    groups = [{"params": shared.parameters(), "lr": 0.2}, {"params": [*model[2].parameters(), *model[4].parameters()]}]
    return (
        model,
        torch.optim.Adam(groups, lr=0.01),
        (torch.randn(4, 8), torch.randint(0, 2, (4,))),
        nn.CrossEntropyLoss(),
    )


@pytest.mark.parametrize("make", [grouped, adam_of_many_layers])
def test_the_same_values(make) -> None:
    plain, flat = ran(make), ran(make, NAME)
    assert torch.allclose(plain.outcome()["weights"], flat.outcome()["weights"], rtol=1e-6, atol=1e-7)


def test_parameters_and_gradients_are_views_of_one_buffer_also_after_steps() -> None:
    job = ran(grouped, NAME)
    assert job.optimizer is not None
    buffers = [group["params"][0] for group in job.optimizer.param_groups]
    assert [one.numel() for one in buffers] == [72, 18] and [one["lr"] for one in job.optimizer.param_groups] == [
        0.2,
        0.01,
    ]
    homes = {one.untyped_storage().data_ptr() for one in buffers}
    gradients = {one.grad.untyped_storage().data_ptr() for one in buffers}
    for one in job.model.parameters():
        if one.requires_grad:
            assert one.untyped_storage().data_ptr() in homes
            assert one.grad is not None and one.grad.untyped_storage().data_ptr() in gradients


def test_it_saves_nothing() -> None:
    plain = trial(work_of(adam_of_many_layers), timed=False).peak_allocated_bytes
    flat = trial(work_of(adam_of_many_layers), [NAME], timed=False).peak_allocated_bytes
    assert flat > plain


def test_a_parameter_without_gradient_counts_as_one_with_zeros() -> None:
    """What its claim leaves open: weight decay moves it."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def half() -> Parts:
        model = Half()
        batch = torch.randn(2, 4), torch.randn(2, 4)
        return model, torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5), batch, nn.MSELoss()

    plain, flat = ran(half).model, ran(half, NAME).model
    assert torch.allclose(plain.used.weight, flat.used.weight)
    assert torch.allclose(0.95**3 * plain.spare.weight, flat.spare.weight)


def test_what_does_not_fit_one_buffer() -> None:
    def mixed() -> Parts:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        return model, torch.optim.SGD(model.parameters(), 0.1), (torch.ones(1, 2), torch.ones(1, 2)), nn.MSELoss()

    def by_matrix() -> Parts:
        model = nn.Linear(2, 2, bias=False)
        return model, torch.optim.Muon(model.parameters()), (torch.ones(1, 2), torch.ones(1, 2)), nn.MSELoss()

    for make, why in ((mixed, "2 dtypes or devices"), (by_matrix, "Muon looks at each parameter as a whole")):
        with pytest.raises(DoesNotApply, match=why):
            techniques.prepare(Job("cpu"), make, [NAME])


def test_the_two_turns_of_a_gan() -> None:
    make = workloads["gan"].sized("tiny", batch=4)
    job = ran(make, NAME, steps=1)
    assert all(one.isfinite() for one in job.losses)
