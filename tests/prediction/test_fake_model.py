"""Fakes of what a model and its inputs hold: what is counted, and what can still be read."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

import memlab


class ByLength(nn.Linear):
    def forward(self, batch):
        return super().forward(batch.x[: max(batch.lengths.tolist())])


def test_values_inside_of_plain_objects_can_be_read():
    batch = SimpleNamespace(x=torch.ones(8, 8), lengths=torch.tensor([3, 4]))
    found, plain = memlab.size(ByLength(8, 8), batch), memlab.size(nn.Linear(8, 8), torch.ones(4, 8))
    assert found.parts["outputs"] == plain.parts["outputs"] == 128


def test_an_optimizer_that_has_stepped_is_sized_as_a_new_one_and_stays_as_it_is():
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    optimizer = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which puts a step of its own into it
    model(x).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"] = torch.ones(1000)
    assert memlab.size(model, x, optimizer=optimizer).parts == memlab.size(model, x, optimizer="adam").parts
    assert optimizer.state[model.bias]["exp_avg"].sum() == 1000


class Slotted(torch.Tensor):
    __slots__ = ("extra",)


def test_a_tensor_of_a_class_with_slots_is_sized():
    rows = torch.ones(4, 8)
    assert memlab.size(nn.Linear(8, 8), rows.as_subclass(Slotted)).parts == memlab.size(nn.Linear(8, 8), rows).parts
