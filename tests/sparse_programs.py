"""Programs with sparse tensors, and their peaks: measured on a simulated GPU, or predicted.

A simulated GPU reads zeros, so nothing is left of tensors whose equal indices it adds up: predictions to compare assume that, too.

python tests/sparse_programs.py measured|predicted NAME CAPABILITY    # prints JSON: [allocated, reserved, both at the end]
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import peaks_and_ends
import torch
from peaks_and_ends import Steps, print_and_leave
from torch import nn

import memlab
from memlab.units import GiB


class Tagger(nn.Module):
    """A large table with sparse gradients, and dense layers."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding, **how: Any) -> None:
        super().__init__()
        self.table = kind(40_000, 96, sparse=True, **how)
        self.body = nn.Sequential(nn.Linear(96, 512), nn.ReLU(), nn.Linear(512, 20))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids))


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(40_000, shape, device="cuda")


def train(model: nn.Module, *optimizers: Any, batch: tuple[int, ...] = (64, 50), times: int = 3) -> Any:
    for _ in range(times):
        loss = model(ids(*batch)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def sgd() -> Any:
    model = Tagger().cuda()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def sparse_adam() -> Any:
    model = Tagger().cuda()
    return train(model, torch.optim.SparseAdam(model.table.parameters()), torch.optim.AdamW(model.body.parameters()))


def momentum() -> Any:
    """The buffer is sparse and gets longer with each step."""
    model = Tagger().cuda()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def adagrad() -> Any:
    model = Tagger().cuda()
    return train(model, torch.optim.Adagrad(model.parameters()), times=2)


def bags() -> Any:
    model = Tagger(nn.EmbeddingBag, mode="sum").cuda()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=(500, 40))


def accumulated() -> Any:
    """Two batches a step, and the table is used twice in each."""
    model = Tagger().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(2):
            first, second = ids(64, 30), ids(64, 30)
            (model(first) * model(second)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


def grid(size: int, count: int) -> torch.Tensor:
    """Indices of a sparse matrix on the host, all different."""
    rows = torch.arange(count) // 7 % size
    return torch.stack([rows, (torch.arange(count) * 3) % size])


def graph_convolution() -> Any:
    """Two layers on a sparse matrix of neighbors; what cuSPARSE takes for itself is 0 here."""
    i = torch.randint(3000, (2, 6000), device="cuda")
    neighbors = torch.sparse_coo_tensor(i, torch.rand(6000, device="cuda"), (3000, 3000), is_coalesced=True)
    x, first, second = torch.randn(3000, 200, device="cuda"), nn.Linear(200, 128).cuda(), nn.Linear(128, 10).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    for _ in range(3):
        h = torch.relu(torch.sparse.mm(neighbors, first(x)))
        loss = (neighbors @ second(h)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return neighbors, first, second


def elements() -> Any:
    """What is done with a sparse tensor that is made on the host, on the GPU, from lists."""
    indices, found = grid(2000, 90_000), torch.randn(90_000)
    one = torch.sparse_coo_tensor(indices, found, (2000, 2000)).to("cuda")
    two = torch.sparse_coo_tensor(indices.cuda(), found.cuda(), (2000, 2000), is_coalesced=True)
    few = torch.sparse_coo_tensor([[0, 1], [2, 0]], [1.0, 2.0], (3, 3), device="cuda")
    three = (two * 2 + one / 3).half().float()
    dense = two.to_dense() + one
    dense.add_(three.t())
    dense.add_(two, alpha=-2)
    masked = dense.sparse_mask(two)
    four = torch.cat([two, -two]).neg_()
    return one, two.pow(2), few, three, masked, four, torch.sparse.sum(two), two.sqrt(), dense * two


def coalesced() -> Any:
    """Equal indices are added up: in two dimensions, in one with rows of values, and transposed."""
    one = torch.sparse_coo_tensor(
        torch.randint(900, (2, 300_000), device="cuda"), torch.randn(300_000, device="cuda"), (900, 900)
    )
    rows = torch.sparse_coo_tensor(ids(1, 9000), torch.randn(9000, 64, device="cuda"), (40_000, 64))
    kept = one.coalesce(), rows.coalesce()
    total = torch.sparse.sum(one.t())
    return kept, total, one, rows.to_dense()


def totals() -> Any:
    """Sums do not add up equal indices, norms do; a single element is coalesced as it is."""

    def random(count: int) -> torch.Tensor:
        found = torch.randn(count, device="cuda")
        return torch.sparse_coo_tensor(torch.randint(900, (2, count), device="cuda"), found, (900, 900))

    many, few = random(900_000), random(300_000)
    row = torch.sparse_coo_tensor(ids(1, 1), torch.randn(1, 500_000, device="cuda"), (40_000, 500_000))
    return many.sum(), many, few.norm(), few, row.coalesce(), row


def known_rows() -> Any:
    """Gradients without equal indices, as someone makes them who has added them up; then both optimizers of sparse gradients."""
    table = nn.Parameter(torch.randn(30_000, 64, device="cuda"))
    rows = torch.arange(5000, device="cuda")[None]
    for kind in (torch.optim.SparseAdam, torch.optim.Adagrad):
        optimizer = kind([table])
        for _ in range(2):
            table.grad = torch.sparse_coo_tensor(
                rows, torch.randn(5000, 64, device="cuda"), table.shape, is_coalesced=True
            )
            optimizer.step()
        optimizer.zero_grad()
    return table, optimizer


def compressed() -> Any:
    """CSR: made of parts, of COO and on the host, and times dense matrices."""
    rows, columns = torch.arange(0, 20_001, 10), torch.arange(20_000) % 900
    one = torch.sparse_csr_tensor(rows, columns, torch.randn(20_000), (2000, 900)).cuda()
    two = torch.sparse_csr_tensor(rows.cuda(), columns.cuda(), torch.randn(20_000, device="cuda"), (2000, 900))
    order = torch.stack([torch.arange(4000), torch.arange(4000) % 900])
    three = torch.sparse_coo_tensor(order, torch.randn(4000), (4000, 900), is_coalesced=True).cuda().to_sparse_csr()
    dense = torch.randn(900, 300, device="cuda")
    kept = [one @ dense, torch.sparse.mm(two, dense), three @ dense[:, :50]]
    return one, two, three, kept, one.values() * 2


TRAINED = (sgd, sparse_adam, momentum, adagrad, bags, accumulated, known_rows, graph_convolution)
PROGRAMS: dict[str, Steps] = {one.__name__: one for one in (*TRAINED, elements, coalesced, totals, compressed)}


def card(major: int, minor: int) -> memlab.Card:
    return memlab.Card("a card", 8 * GiB, (major, minor), 0, 8 * GiB, 8 * GiB, {7: 40, 8: 108, 9: 132}[major])


CARD = card(8, 0)


def keys_of_counts(step: Steps, on: memlab.Card) -> dict[str, int]:
    """What the simulated GPU leaves of each sparse tensor whose equal indices are added up: nothing."""
    found = memlab.predict(step, on).assumptions.values
    return {one.key: 0 for one in found if one.key.endswith(" coalesce")}


def predicted(step: Steps, on: memlab.Card = CARD, **how: Any) -> list[int]:
    return peaks_and_ends.predicted(step, on, assume=keys_of_counts(step, on), **how)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # CSR is "in beta"
    way = {"measured": peaks_and_ends.measured, "predicted": predicted}[sys.argv[1]]
    print_and_leave(way(PROGRAMS[sys.argv[2]], card(*map(int, sys.argv[3].split(".")))))
