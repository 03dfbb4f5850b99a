"""Where the size of a cell's batch is found, and the cell with another one."""

from __future__ import annotations

import ast

import IPython  # noqa: F401  # as in a notebook: it tells magics from operators
import pytest
import torch

from memlab.api.cell_batch import batches
from memlab.api.cell_names import names_read


@pytest.mark.parametrize(
    ("text", "size", "said", "changed"),
    [
        ("batch = 8\nx = f(batch)", 8, "`batch = 2`", "batch = 2\nx = f(batch)"),
        ("ä, batch_size = 'é', 16", 16, "`batch_size = 2`", "ä, batch_size = 'é', 2"),
        ("B, T = 8, 1024\nx = randint(9, (B, T))", 8, "`B = 2`", "B, T = 2, 1024\nx = randint(9, (B, T))"),
        ("def load(n=8): return torch.randn(n, 4)\nload()", 8, "`n=2`", None),
        ("net = GPT(d=64, n=12, b=4)\nn = 8", None, "", None),
        ("run(model, per_device_train_batch_size=32)", 32, "`per_device_train_batch_size=2`", None),
        ("def train(batch=64, steps=8): pass\ntrain()", 64, "`batch=2`", None),
        ("%time loader = DataLoader(data, batch_size=8)", None, "", None),
        ("cfg.batch_size = 8\ncfg.width = 4", 8, "`cfg.batch_size = 2`", "cfg.batch_size = 2\ncfg.width = 4"),
        ('config["batch_size"] = 8', 8, "`config['batch_size'] = 2`", 'config["batch_size"] = 2'),
        ('config = {"batch_size": 8, **more}', 8, '`"batch_size": 2`', 'config = {"batch_size": 2, **more}'),
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


def test_magics_are_where_a_line_begins_and_no_operators():
    text = "!ls \\\n  -a (\nprint('%d'\n      % 8)\nif x:\n    x?\nbs = "
    assert [one.text_with(2) for one in batches(f"{text}8", {})] == [f"{text}2"]


def test_numbers_that_differ_are_candidates_of_their_own():
    text = "train = DataLoader(data, batch_size=32)\nval = DataLoader(more, batch_size=128)\nbatch = 32"
    assert [(one.size, one.said(2)) for one in batches(text, {})] == [(32, "`batch = 2`"), (128, "`batch_size=2`")]
    assert [one.text_with(2).count("32") for one in batches(text, {})] == [0, 2]


def test_a_name_of_many_things_is_a_batch_where_it_is_the_first_dimension_of_data():
    names = {"n": 12}
    assert not list(batches("net = GPT(n)", names))
    assert [one.size for one in batches("x = torch.zeros(n, 4)", names)] == [12]


def ran(text: str, names: dict) -> dict:
    """The names after a changed cell, which may begin with magics."""
    exec("\n".join(line for line in text.split("\n") if line[:1] != "%"), names)
    return names


def test_a_name_that_the_cell_or_its_functions_read_is_set():
    names: dict = {"bs": 8, "batch": 16, "unused_batch": 4}
    exec("def step():\n    return [bs for _ in range(2)]", names)
    found = list(batches("step()", names))
    assert [(one.size, one.said(2)) for one in found] == [(8, "`bs = 2`, set by an earlier cell")]
    assert found[0].set_names is None and found[0].text_with(2) == "bs = 2\nstep()"
    assert not list(batches("bs = f()\nuse(bs)", names))  # the cell assigns it itself


@pytest.mark.parametrize("first", ["", "%%time\n", "\n%%time\n", "from __future__ import annotations\n"])
def test_what_an_earlier_cell_set_is_set_where_the_cell_begins(first: str):
    names: dict = {}
    exec(
        """
from types import SimpleNamespace
config = {"batch_size": 32, "epochs": 4, "num_batches": 8}
cfg = SimpleNamespace(bs=16, lr=8)
class CFG: train_batch_size, width = 64, 8
def step(): return config, cfg, CFG
""",
        names,
    )
    found = list(batches(f"{first}step()", names))
    sizes = {"config['batch_size']": 32, "cfg.bs": 16, "CFG.train_batch_size": 64}
    assert {one.said(2): one.size for one in found} == {
        f"`{target} = 2`, set by an earlier cell": size for target, size in sizes.items()
    }
    for one in found:
        changed = one.text_with(2)
        assert changed.startswith(first)
        ran(changed, names)
    assert [eval(target, names) for target in sizes] == [2, 2, 2]


@pytest.mark.parametrize(
    ("cell", "changed"),
    [
        ("fit()", "fit(bs=2)"),
        ("x = [fit(3), 4]", "x = [fit(3, bs=2), 4]"),
        ("fit(epochs=3,)", "fit(epochs=3,bs=2)"),
        ("fit(3, 96)", "fit(3, 2)"),
        ("fit(*x)\nfit(**y)\nfit(3, f())\nfit(bs=f())\nother(96)", None),
    ],
)
def test_a_call_leaves_the_batch_to_a_default_or_passes_it(cell: str, changed: str | None):
    names: dict = {}
    exec("def fit(epochs=2, bs=96): pass\ndef other(width=8, *, lr=4): pass", names)
    assert [one.text_with(2) for one in batches(cell, names)] == ([changed] if changed else [])
    if changed:
        assert [(one.size, one.said(2)) for one in batches(cell, names)] == [(96, f"a batch of 2: `{changed}`")]


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
    changed = found.text_with(2)
    assert changed.endswith("\nfor x, in loader: print(x)")
    assert [len(x) for (x,) in ran(changed, names)["loader"]] == [2] * 6


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
