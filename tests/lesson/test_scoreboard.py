from __future__ import annotations

import torch
from torch import nn

import memlab
from memlab.lesson import Lesson
from memlab.units import MiB


def train(rows: int, steps: int) -> float:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 256), torch.randn(rows, 64)
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
    return loss.item()


def test_edits_are_scored_by_peak_time_and_loss_and_those_within_the_budget_are_marked():
    board = Lesson("x", needs="1 MiB").scoreboard("3 MiB", steps=2)
    board.score("whole", lambda steps: train(4096, steps))
    shown = board.score("small", lambda steps: train(512, steps))
    assert shown is board and str(board).startswith("1 of 2 within the budget")
    whole, small = (
        next(line for line in str(board).splitlines() if f"  {name}" in line) for name in ("whole", "small")
    )
    assert "✗ no" in whole and "1.00×" in whole and "✓ yes" in small
    assert board["whole"].peak_allocated_bytes > 3 * MiB > board["small"].peak_allocated_bytes
    assert f"{train(512, 2):.3f}" in small
    for name in ("whole", "small"):
        memlab.runs.discard(board[name])


def test_a_simulated_gpu_has_neither_times_nor_losses():
    from memlab.lesson.scoreboard import Scoreboard

    board = Scoreboard(3 * MiB, "cpu", 1, is_simulated=True).score("whole", lambda steps: train(512, steps))
    assert "time" not in str(board) and "loss" not in str(board) and "✓ yes" in str(board)
    memlab.runs.discard(board["whole"])
