"""A batch in pieces against the whole batch: shares, refusals, what BatchNorm and dropout make of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.errors import DoesNotApply
from memlab.savings import techniques
from memlab.savings.loop.pieces import pieces_of, shares_of
from memlab.workloads.job import Job, Parts, seeded


def outcome(make: Callable[[], Parts], *names: str) -> tuple[dict[str, Any], list[str]]:
    job = Job("cpu", steps=2)
    with seeded():
        techniques.prepare(job, make, names)
        job.run()
    return job.outcome(), job.notes


def same(make: Callable[[], Parts]) -> bool:
    (plain, _), (split, _) = outcome(make), outcome(make, "accumulation")
    assert torch.tensor(plain["losses"]).isfinite().all()
    return torch.allclose(plain["weights"], split["weights"], atol=1e-5) and torch.allclose(
        torch.tensor(plain["losses"]), torch.tensor(split["losses"]), rtol=1e-4
    )


def classifier(examples: int = 8, loss: Any = None, *layers: nn.Module) -> Parts:
    model = nn.Sequential(nn.Linear(6, 6), *(layers or (nn.Tanh(),)), nn.Linear(6, 3))
    batch = torch.randn(examples, 6), torch.randint(0, 3, (examples,))
    return model, torch.optim.SGD(model.parameters(), 0.5), batch, loss or nn.CrossEntropyLoss()


@pytest.mark.parametrize("examples", [2, 3, 8, 10, 11])
def test_pieces_of_unequal_size_have_unequal_shares(examples: int) -> None:
    assert same(functools.partial(classifier, examples))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        functools.partial(functional.cross_entropy, reduction="sum"),
        functools.partial(functional.cross_entropy, reduction="mean"),
    ],
)
def test_sums_have_no_shares(loss: Any) -> None:
    assert same(functools.partial(classifier, 10, loss))


def test_targets_that_are_ignored_do_not_count() -> None:
    def masked() -> Parts:
        model = nn.Linear(6, 3)
        target = torch.randint(0, 3, (8,))
        target[torch.tensor([0, 1, 5])] = -100
        return model, torch.optim.SGD(model.parameters(), 0.5), (torch.randn(8, 6), target), nn.CrossEntropyLoss()

    assert same(masked)


def test_a_piece_of_ignored_targets_alone_has_no_share() -> None:
    pieces = [(torch.zeros(2, 1), torch.tensor([-100, -100])), (torch.zeros(2, 1), torch.tensor([1, 2]))]
    assert shares_of(pieces) == [0.0, 1.0]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(2, 4)

    def forward(self, left: dict[str, Tensor], scale: float, right: Tensor) -> Tensor:
        return self.a(left["x"]) * scale + self.b(right)


def two_inputs() -> Parts:
    model = TwoInputs()
    batch = {"x": torch.randn(8, 4)}, 2.0, torch.randn(8, 2), torch.randn(8, 4)
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, nn.MSELoss()


def test_several_inputs_in_dicts_with_numbers_between_them() -> None:
    assert same(two_inputs)


def test_pieces_are_views_that_make_up_the_batch() -> None:
    batch = (torch.arange(10), {"y": [torch.arange(20).reshape(10, 2)]}, "text")
    pieces = pieces_of(batch)
    assert [len(one[0]) for one in pieces] == [2, 3, 2, 3]
    assert torch.equal(torch.cat([one[0] for one in pieces]), batch[0])
    assert torch.equal(torch.cat([one[1]["y"][0] for one in pieces]), batch[1]["y"][0])
    assert pieces[0][0].untyped_storage().data_ptr() == batch[0].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (((1, 2), (1, 2)), "one example"),
        (((8, 2), (7, 2)), "8, 7 in its tensors"),
        (((), ()), "no tensors"),
    ],
)
def test_batches_that_cannot_be_split(batch: tuple[tuple[int, ...], ...], why: str) -> None:
    def make() -> Parts:
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), 0.1), tuple(map(torch.ones, batch)), nn.MSELoss()

    with pytest.raises(DoesNotApply, match=why):
        techniques.prepare(Job("cpu"), make, ["accumulation"])


def test_batchnorm_sees_the_pieces_and_the_run_says_so() -> None:
    make = functools.partial(classifier, 8, None, nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    assert not same(make)
    _, notes = outcome(make, "accumulation")
    assert len(notes) == 1 and "BatchNorm (1 and 1 more)" in notes[0] and "changes training" in notes[0]


def test_batchnorm_at_rest_does_not_matter() -> None:
    def make() -> Parts:
        parts = classifier(8, None, nn.BatchNorm1d(6))
        parts[0].train = lambda mode=True: parts[0]  # type: ignore[method-assign]  # as frozen backbones are often kept
        parts[0].eval = parts[0].train  # type: ignore[method-assign, assignment]
        for one in parts[0].modules():
            one.training = False
        return parts

    assert same(make) and outcome(make, "accumulation")[1] == []


def test_dropout_is_named_and_its_absence_too() -> None:
    assert "dropout" in outcome(functools.partial(classifier, 8, None, nn.Dropout(0.5)), "accumulation")[1][0]
    assert outcome(functools.partial(classifier, 8, None, nn.Dropout(0.0)), "accumulation")[1] == []


def test_half_of_the_batch_in_pieces() -> None:
    (half, _), (both, _) = outcome(classifier, "smaller_batch"), outcome(classifier, "smaller_batch", "accumulation")
    assert torch.allclose(half["weights"], both["weights"], atol=1e-6)


def inferring() -> Parts:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), None, (torch.randn(10, 6),), None


def test_micro_batches_are_joined_in_order() -> None:
    (plain, _), (split, notes) = outcome(inferring), outcome(inferring, "micro_batching")
    assert split["output"].shape == (10, 6) and torch.allclose(plain["output"], split["output"], atol=1e-6)
    assert len(notes) == 1 and "keeps its graph" in notes[0]
    assert outcome(inferring, "micro_batching", "no_grad")[1] == []


def test_each_refuses_what_is_the_work_of_the_other() -> None:
    with pytest.raises(DoesNotApply, match="use accumulation"):
        techniques.prepare(Job("cpu"), classifier, ["micro_batching"])
    with pytest.raises(DoesNotApply, match="inference"):
        techniques.prepare(Job("cpu"), inferring, ["accumulation"])
