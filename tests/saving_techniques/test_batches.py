"""A batch in pieces against the whole batch, half the batch, half the input: shares, targets, refusals, no trace of a trial."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from job_runs import prepared, ran, training
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.batches import pieces_of, shares_of
from memlab.workloads.job import Job, Parts, seeded


def same(make: Callable[[], Parts]) -> bool:
    plain, split = ran(make).outcome(), ran(make, ["accumulation"]).outcome()
    losses = torch.tensor(plain["losses"]), torch.tensor(split["losses"])
    assert losses[0].isfinite().all()
    return torch.allclose(plain["weights"], split["weights"], atol=1e-5) and torch.allclose(*losses, rtol=1e-4)


def notes(make: Callable[[], Parts], *names: str) -> list[str]:
    return ran(make, names).notes


def classifier(examples: int = 8, loss: Any = functional.cross_entropy, *layers: nn.Module) -> Parts:
    model = nn.Sequential(nn.Linear(6, 6), *(layers or (nn.Tanh(),)), nn.Linear(6, 3))
    return training(model, torch.randn(examples, 6), torch.randint(0, 3, (examples,)), loss=loss, lr=0.5)


def masked() -> Parts:
    target = torch.randint(0, 3, (8,))
    target[torch.tensor([0, 1, 5])] = -100
    return training(nn.Linear(6, 3), torch.randn(8, 6), target, loss=nn.CrossEntropyLoss(), lr=0.5)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, left: dict[str, Tensor], scale: float, right: Tensor) -> Tensor:
        return self.a(left["x"]) * scale + self.b(right)


def two_inputs() -> Parts:
    """Several inputs in dicts, with a number between them."""
    return training(TwoInputs(), {"x": torch.randn(8, 4)}, 2.0, torch.randn(8, 2), torch.randn(8, 4))


def at_rest() -> Parts:
    """BatchNorm as frozen backbones often keep it."""
    parts = classifier(8, functional.cross_entropy, nn.BatchNorm1d(6))
    parts[0].train = parts[0].eval = lambda mode=True: parts[0]  # type: ignore[method-assign]
    for one in parts[0].modules():
        one.training = False
    return parts


SUMMED = functools.partial(functional.cross_entropy, reduction="sum")
MEAN = functools.partial(functional.cross_entropy, reduction="mean")


@pytest.mark.parametrize(
    "make",
    [
        *(functools.partial(classifier, examples) for examples in (2, 3, 8, 10, 11)),  # pieces of unequal size
        *(functools.partial(classifier, 10, loss) for loss in (nn.CrossEntropyLoss(reduction="sum"), SUMMED, MEAN)),
        *(masked, two_inputs, at_rest),
    ],
)
def test_pieces_train_as_the_whole_batch(make: Callable[[], Parts]) -> None:
    assert same(make) and notes(make, "accumulation") == []


def test_a_piece_of_ignored_targets_alone_has_no_share() -> None:
    pieces = [(torch.zeros(2, 1), torch.tensor([-100, -100])), (torch.zeros(2, 1), torch.tensor([1, 2]))]
    assert shares_of(pieces) == [0.0, 1.0]


def test_pieces_are_views_that_make_up_the_batch() -> None:
    batch = (torch.arange(10), {"y": [torch.arange(20).reshape(10, 2)]}, "text")
    pieces = pieces_of(batch)
    assert [len(one[0]) for one in pieces] == [2, 3, 2, 3]
    assert torch.equal(torch.cat([one[0] for one in pieces]), batch[0])
    assert torch.equal(torch.cat([one[1]["y"][0] for one in pieces]), batch[1]["y"][0])
    assert pieces[0][0].untyped_storage().data_ptr() == batch[0].untyped_storage().data_ptr()


def test_batchnorm_and_dropout_are_named() -> None:
    norms = functools.partial(classifier, 8, functional.cross_entropy, nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    assert not same(norms)
    (note,) = notes(norms, "accumulation")
    assert "BatchNorm (1 and 1 more)" in note and "changes training" in note
    for share, count in ((0.5, 1), (0.0, 0)):
        dropout = functools.partial(classifier, 8, functional.cross_entropy, nn.Dropout(share))
        assert ["dropout" in one for one in notes(dropout, "accumulation")] == [True] * count


def inferring() -> Parts:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), None, (torch.randn(10, 6),), None


def test_micro_batches_are_joined_in_order() -> None:
    plain, split = ran(inferring), ran(inferring, ["micro_batching"])
    assert split.output.shape == (10, 6) and torch.allclose(plain.output, split.output, atol=1e-6)
    assert len(split.notes) == 1 and "keeps its graph" in split.notes[0]
    assert notes(inferring, "micro_batching", "no_grad") == []


# --- less work ---


def test_half_a_batch_frees_the_other_half() -> None:
    job = prepared(workloads["unet"].sized("tiny", batch=5), "smaller_batch")
    assert [len(one) for one in job.batch] == [2, 2]
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in job.batch)
    half, both = ran(classifier, ["smaller_batch"]), ran(classifier, ["smaller_batch", "accumulation"])
    torch.testing.assert_close(half.outcome()["weights"], both.outcome()["weights"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["unet", "resnet18", "gpt", "bert", "llama", "lstm"])
def test_inputs_of_half_the_size_and_their_targets(name: str) -> None:
    plain, job = (
        prepared(workloads[name].sized("tiny")),
        prepared(workloads[name].sized("tiny"), "smaller_input", steps=1),
    )
    for before, after in zip(plain.batch, job.batch, strict=True):
        if before.dim() > 1:
            assert after.shape[-1] == before.shape[-1] // 2 and after.shape[0] == before.shape[0]
        if name == "unet" and not before.is_floating_point():
            assert torch.equal(after, before[..., ::2, ::2]), "classes of pixels are picked, not averaged"
    job.run()
    assert job.losses[0].isfinite()


def test_odd_sides() -> None:
    def odd() -> Parts:
        batch = torch.randn(2, 3, 7, 9), torch.randint(0, 2, (2, 7, 9))
        return training(nn.Conv2d(3, 2, 1), *batch, loss=functional.cross_entropy)

    job = ran(odd, ["smaller_input"])
    assert job.batch[0].shape == (2, 3, 3, 4) and job.batch[1].shape == (2, 3, 4)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


def images(model: Callable[[], nn.Module]) -> Callable[[], Parts]:
    return lambda: training(model(), torch.randn(4, 3, 8, 8), torch.randint(0, 2, (4,)), loss=functional.cross_entropy)


def test_the_trial_leaves_no_trace() -> None:
    states = []
    for names in ([], ["smaller_input"]):
        job = Job("cpu")
        with seeded():
            techniques.prepare(job, images(Noisy), names)
            states.append(torch.get_rng_state())
        assert all(one.training for one in job.model.modules())
        assert int(job.model.get_buffer("layers.1.num_batches_tracked")) == 0
    assert torch.equal(*states)


def of_sizes(*shapes: tuple[int, ...]) -> Callable[[], Parts]:
    return lambda: training(nn.Linear(2, 2), *map(torch.ones, shapes))


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (of_sizes((1, 2), (1, 2)), "accumulation", "one example"),
        (of_sizes((8, 2), (7, 2)), "accumulation", "8, 7 in its tensors"),
        (of_sizes((), ()), "accumulation", "no tensors"),
        (of_sizes((1, 2), (1, 2)), "smaller_batch", "one example"),
        (of_sizes((4, 2), (4, 2)), "smaller_input", "no input is a batch of images"),
        (
            images(lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 2))),
            "smaller_input",
            "no smaller input: mat1 and mat2",
        ),
    ],
)
def test_what_cannot_be_split_or_halved(make: Callable[[], Parts], name: str, why: str) -> None:
    with pytest.raises(DoesNotApply, match=why):
        prepared(make, name)
