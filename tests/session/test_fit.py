"""`memlab.fit`: what a table over the cards says of the run it is about."""

from __future__ import annotations

import torch

import memlab


def test_the_assumptions_of_the_rehearsal_stand_below_the_table():
    def step() -> None:
        x = torch.ones(100, device="cuda")
        x[x > 0].sum()

    table = memlab.fit(memlab.predict(step, "8GiB"), ["T4"])
    assert "kernels are those of 8.00 GiB card" in str(table)
    assert "its shape depends on values, the largest possible was taken" in str(table)
    assert "PyTorch sees 95%" not in str(table)  # which is about the card of the rehearsal
