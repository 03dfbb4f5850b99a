"""What a batch may be, what a job makes of it, and that the user's random numbers go on where they were."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from memlab.errors import MemlabError
from memlab.workloads.job import checked, moved, sample_of, seeded
from memlab.workloads.nested import mapped, tensors_in

Pair = namedtuple("Pair", "x y")


class Answer(OrderedDict):
    """As an output of a library: a dict with a face of its own."""

    @property
    def logits(self):
        return self["logits"]


class Encoded(UserDict):
    pass


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    name: str = "one"


@pytest.mark.parametrize(
    "around",
    [
        lambda one: Pair(one, 3),
        lambda one: Answer(logits=one),
        lambda one: Encoded(x=one, name="one"),
        Example,
        lambda one: [one, (one.clone(), None)],
    ],
)
def test_what_holds_tensors_stays_of_its_kind_and_the_original_as_it_is(around):
    value = around(torch.ones(2))
    doubled = mapped(value, lambda one: 2 * one)
    assert type(doubled) is type(value)
    assert {float(one.sum()) for one in tensors_in(doubled)} == {4.0}
    assert {float(one.sum()) for one in tensors_in(value)} == {2.0}
    assert type(moved(value, torch.device("meta"))) is type(value)
    assert all(one.is_meta for one in tensors_in(moved(value, torch.device("meta"))))


def test_a_batch_that_knows_how_to_move_moves_itself():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    there = moved((packed,), torch.device("meta"))[0]
    assert there.data.is_meta
    assert not there.batch_sizes.is_meta  # which is to stay on the host


def test_a_training_batch_may_be_the_list_that_a_loader_gives():
    model = nn.Linear(2, 2)
    parts = model, torch.optim.SGD(model.parameters()), [torch.ones(1, 2), torch.ones(1, 2)], nn.MSELoss()
    assert len(checked(parts)[2]) == 2


def test_an_optimizer_that_wants_a_closure_is_refused_in_one_line():
    model = nn.Linear(2, 2)
    with pytest.raises(MemlabError, match="steps without a closure, got LBFGS"):
        checked((model, torch.optim.LBFGS(model.parameters()), (1, 2), nn.MSELoss()))


def test_random_numbers_of_numpy_begin_anew_and_go_on():
    np.random.seed(7)
    first, again = np.random.rand(), np.random.rand()
    np.random.seed(7)
    np.random.rand()
    with seeded():
        one = np.random.rand()
    with seeded():
        assert np.random.rand() == one
    assert first != again == np.random.rand()


def test_the_imaginary_parts_are_part_of_the_sample():
    assert sample_of([torch.tensor([1 + 2j])]).tolist() == [1.0, 2.0]
