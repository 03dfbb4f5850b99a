"""Where the size of a cell's batch is found, and the cell with another one."""

from __future__ import annotations

import ast

import pytest
import torch

from memlab.api.cell_batch import batches
from memlab.api.cell_names import names_read


@pytest.mark.parametrize(
    ("text", "size", "said", "changed"),
    [
        ("batch = 8\nx = f(batch)", 8, "`batch = 2`", "batch = 2\nx = f(batch)"),
        ("ä, batch_size = 'é', 16", 16, "`batch_size = 2`", "ä, batch_size = 'é', 2"),
        ("B, T = 8, 1024\nstep(B, T)", 8, "`B = 2`", "B, T = 2, 1024\nstep(B, T)"),
        ("run(model, per_device_train_batch_size=32)", 32, "`per_device_train_batch_size=2`", None),
        ("def train(batch=64, steps=8): pass\ntrain()", 64, "`batch=2`", None),
        ("%time loader = DataLoader(data, batch_size=8)", None, "", None),
        ("%matplotlib inline\nbatch: int = 8", 8, "`batch = 2`", "%matplotlib inline\nbatch: int = 2"),
        (
            "x = torch.randn(8, 3, 32, 32, device='cuda')",
            8,
            "a batch of 2: `x = torch.randn(2, 3, 32, 32, device='cuda')`",
            None,
        ),
        (
            "x = torch.randint(0, 100, (8, 64))\ny = torch.zeros(8)",
            8,
            "a batch of 2: `x = torch.randint(0, 100, (2, 64))`, `y = torch.zeros(2)`",
            None,
        ),
        ("num_batches = 8\nbatch_norm = 4\nlog_every_n_batches = 100", None, "", None),
        ("batch = True\nbs = 1\nn = 2.5", None, "", None),
        ("batch = ", None, "", None),
        ("bat\0ch = 8", None, "", None),
    ],
)
def test_sizes_that_stand_in_the_text(text: str, size: int | None, said: str, changed: str | None):
    found = next(batches(text, {}), None)
    if size is None:
        assert found is None
        return
    assert found is not None
    assert (found.size, found.said(2)) == (size, said)
    again = found.text_with(2)
    assert changed in (None, again)
    assert again.count("\n") == text.count("\n") and str(size) not in again.replace("1024", "")
    ast.parse(again.replace("%", "#"))


def test_every_place_with_the_same_number_is_changed_and_others_stay():
    text = "batch = 8\nloader = DataLoader(data, batch_size=8)\nlayers = 8\nother_batch = 4"
    found = next(batches(text, {}))
    assert found.text_with(3) == "batch = 3\nloader = DataLoader(data, batch_size=3)\nlayers = 8\nother_batch = 4"


def test_a_name_that_the_cell_or_its_functions_read_is_set():
    names: dict = {"bs": 8, "batch": 16, "unused_batch": 4}
    exec("def step():\n    return [bs for _ in range(2)]", names)
    found = list(batches("step()", names))
    assert [(one.size, one.said(2)) for one in found] == [(8, "`bs = 2`")]
    assert found[0].set_names is not None
    found[0].set_names(2)
    assert names["bs"] == 2 and names["batch"] == 16
    assert not list(batches("bs = f()\nuse(bs)", names))  # the cell assigns it itself


def test_names_are_followed_through_functions():
    names: dict = {"data": 1, "net": 2, "other": 3}
    exec("def inner():\n    return net\ndef outer():\n    return [inner() for _ in range(2)]", names)
    assert set(names_read("%time x\nouter(data)", names)) == {"data", "outer", "inner", "net"}
    assert names_read("data = 1\ndata", names) == names_read("this is no Python", names) == []


def test_a_loader_gives_batches_of_the_size():
    data = torch.utils.data.TensorDataset(torch.arange(12))
    names = {"loader": torch.utils.data.DataLoader(data, batch_size=6)}
    found = next(batches("for x, in loader: print(x)", names))
    assert (found.size, found.said(2)) == (6, "`batch_size=2` in the DataLoader `loader`")
    assert found.set_names is not None
    found.set_names(2)
    assert [len(x) for (x,) in names["loader"]] == [2] * 6


def test_tensors_of_one_length_are_cut_together_and_weights_are_not():
    x, weight = torch.zeros(8, 3), torch.zeros(8, 8, requires_grad=True)
    names = {
        "x": x,
        "y": torch.zeros(8),
        "weight": weight,
        "table": torch.zeros(5),
        "tokens": {"ids": torch.zeros(8, 2)},
    }
    found = next(batches("loss(x @ weight, y, table, tokens)", names))
    assert found.said(2) == "the first 2 rows of `tokens` and `x[:2]` and `y[:2]` instead of all 8 rows"
    assert found.set_names is not None
    found.set_names(2)
    assert [len(names[one]) for one in ("x", "y", "weight", "table")] == [2, 2, 8, 5]
    assert names["tokens"]["ids"].shape == (2, 2) and len(x) == 8
