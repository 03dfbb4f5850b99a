"""Half the batch and half the input: sizes, targets, and what a trial forward leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.workloads.job import Job, Parts, seeded


def prepared(make, *names: str) -> Job:
    job = Job("cpu", steps=1)
    with seeded():
        techniques.prepare(job, make, names)
    return job


def test_half_a_batch_lets_go_of_the_other_half() -> None:
    job = prepared(workloads["unet"].sized("tiny", batch=5), "smaller_batch")
    assert [len(one) for one in job.batch] == [2, 2]
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in job.batch)
    job.run()


@pytest.mark.parametrize("name", ["unet", "resnet18", "gpt", "bert", "llama", "lstm"])
def test_inputs_of_half_the_size_and_their_targets(name: str) -> None:
    plain, job = prepared(workloads[name].sized("tiny")), prepared(workloads[name].sized("tiny"), "smaller_input")
    for before, after in zip(plain.batch, job.batch, strict=True):
        if before.dim() > 1:
            assert after.shape[-1] == before.shape[-1] // 2 and after.shape[0] == before.shape[0]
    job.run()
    assert job.losses[0].isfinite()


def test_classes_of_pixels_are_picked_not_averaged() -> None:
    plain, job = prepared(workloads["unet"].sized("tiny")), prepared(workloads["unet"].sized("tiny"), "smaller_input")
    target = job.batch[-1]
    assert not target.is_floating_point()
    assert torch.equal(target, plain.batch[-1][..., ::2, ::2])


def test_odd_sides() -> None:
    def odd() -> Parts:
        model = nn.Conv2d(3, 2, 1)
        batch = torch.randn(2, 3, 7, 9), torch.randint(0, 2, (2, 7, 9))
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.CrossEntropyLoss()

    job = prepared(odd, "smaller_input")
    assert job.batch[0].shape == (2, 3, 3, 4) and job.batch[1].shape == (2, 3, 4)
    job.run()


def test_a_model_of_one_size_says_so() -> None:
    def flat() -> Parts:
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
        batch = torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4,))
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.CrossEntropyLoss()

    with pytest.raises(DoesNotApply, match=r"takes no smaller input: mat1 and mat2"):
        prepared(flat, "smaller_input")


def test_inputs_without_a_size_say_so() -> None:
    with pytest.raises(DoesNotApply, match="no input is a batch of pictures"):
        prepared(workloads["mlp"].sized("tiny"), "smaller_input")


class Noisy(nn.Module):
    """Counts and draws when it is called: a trial must change neither."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


def test_the_trial_leaves_no_trace() -> None:
    def noisy() -> Parts:
        model = Noisy()
        batch = torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))
        return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.CrossEntropyLoss()

    states = []
    for names in ([], ["smaller_input"]):
        job = Job("cpu")
        with seeded():
            techniques.prepare(job, noisy, names)
            states.append(torch.get_rng_state())
        assert all(one.training for one in job.model.modules())
        assert int(job.model.get_buffer("layers.1.num_batches_tracked")) == 0
    assert torch.equal(*states)


def test_one_example_has_no_half() -> None:
    with pytest.raises(DoesNotApply, match="one example"):
        prepared(workloads["unet"].sized("tiny", batch=1), "smaller_batch")
