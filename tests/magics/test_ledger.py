"""`%memledger` in a real kernel: entries of executed cells, by their numbers and names; on, off, clear."""

from __future__ import annotations

import pytest
from kernel import Kernel

# Without the extension, so that exactly this ledger is told of the cells.
SETUP = (
    "import torch",
    """
from memlab.magics.line_magics import LineMagics
from memlab.api import ledger as cell_ledger
from memlab.api.ledger import ledger, the_ledger
cell_ledger.NAMES_S = cell_ledger.LOOK_S = 60.0
get_ipython().register_magics(LineMagics)
get_ipython().events.register("pre_run_cell", the_ledger.before_cell)
get_ipython().events.register("post_run_cell", the_ledger.after_cell)
""",
)
LAST = "ledger().entries[-1]"


@pytest.fixture(autouse=True)
def cleared(notebook: Kernel):
    notebook.run("%memledger clear")


def entries(notebook: Kernel, *fields: str) -> list[tuple]:
    """These fields of every entry, but the latest, which is that of `clear`."""
    wanted = ", ".join(f"one.{field}" for field in fields)
    return notebook.value(f"[({wanted},) for one in ledger().entries][1:]")


def test_the_ledger_is_shown_as_a_table_and_as_text(notebook):
    notebook.run("x = torch.ones(1 << 18)")
    reply = notebook.ok("%memledger")
    assert "x 1.00 MiB" in reply.out
    assert reply.out.startswith("memlab ledger · ")
    assert notebook.value("sorted(ledger()._repr_mimebundle_())") == ["text/html", "text/plain"]
    notebook.run("del x")


def test_entries_have_the_numbers_of_the_cells(notebook):
    notebook.run("x = torch.ones(1000)")
    number = notebook.value("get_ipython().execution_count") - 2  # this cell's own, and what the next one will have
    assert entries(notebook, "number", "text", "status")[0] == (number, "x = torch.ones(1000)", "ok")
    notebook.run("del x")


def test_a_value_that_is_shown_stays_in_out_and_grows_with_each_run(notebook):
    for _ in range(3):
        notebook.run("torch.ones(1 << 16)")
    assert entries(notebook, "again", "text")[:3] == [(again, "torch.ones(1 << 16)") for again in range(3)]
    grows = "[(one.name, one.bytes_per_run, one.runs) for one in ledger().growths]"
    assert notebook.value(grows) == [("Out", 1 << 18, 3)]
    assert "grows when run again: Out by 256.0 KiB in each of the last 3 runs" in notebook.run("%memledger").out
    notebook.run(
        "Out.clear(); del _, __, ___; globals().update({n: 0 for n in list(globals()) if n[:1] == '_' and n[1:].isdigit()})"
    )


def test_what_a_failed_cell_keeps_is_named_by_its_traceback(notebook):
    notebook.run("def f():\n    big = torch.ones(1 << 18)\n    1 / 0\nf()")
    status, paths = notebook.value(f"({LAST}.status, [one.path for one in {LAST}.left])".replace("[-1]", "[1]"))
    assert status == "ZeroDivisionError"
    assert len(paths) == 1
    assert paths[0].startswith("traceback of cell") and paths[0].endswith("big")
    notebook.run("1 / 0")  # the next error takes the place of this one


LOOP = "import time\nx = torch.ones(1000)\nprint('ready')\nfor _ in range(300): time.sleep(0.1)"
ASYNC_LOOP = "import asyncio\ny = torch.ones(1000)\nprint('ready')\nfor _ in range(300): await asyncio.sleep(0.1)"


@pytest.mark.parametrize("body", [LOOP, ASYNC_LOOP], ids=["loop", "await"])
def test_an_interrupted_cell_has_its_entry_and_the_next_one_too(notebook, body):
    assert notebook.run(body, interrupt_at="ready").status == "error"
    notebook.run("z = 1")
    found = entries(notebook, "text", "status")
    assert found[0] == (body.split("\n")[0], found[0][1])
    assert found[0][1] in ("KeyboardInterrupt", "CancelledError", "interrupted")
    assert found[1] == ("z = 1", "ok")


def test_cells_in_cells_have_one_entry(notebook):
    notebook.run('get_ipython().run_cell("a = torch.ones(1000)"); get_ipython().run_cell("")\nb = torch.ones(2000)')
    notebook.run("%%capture\nc = torch.ones(3000)")
    lefts = notebook.value("[sorted(left.path for left in one.left) for one in ledger().entries][1:3]")
    assert lefts == [["a", "b"], ["c"]]


def test_off_on_and_what_is_neither(notebook):
    notebook.run("%memledger off")
    notebook.run("d = torch.ones(1000)")
    assert notebook.run("%memledger").out.splitlines()[0].endswith("off (%memledger on)")
    notebook.run("%memledger on")
    notebook.run("e = torch.ones(1000)")
    assert [text for (text,) in entries(notebook, "text")][-1:] == ["e = torch.ones(1000)"]
    assert "d = torch.ones(1000)" not in [text for (text,) in entries(notebook, "text")]
    reply = notebook.run("%memledger of")
    assert "UsageError: %memledger: unknown 'of'. %memledger shows what each cell did not free" in reply.stderr


def test_nothing_is_left_in_the_notebook(notebook):
    notebook.run("_names = set(globals())")
    notebook.run("%memledger")
    assert notebook.value("sorted(n for n in set(globals()) - _names if not n.startswith('_'))") == []
