"""A hundred times out of memory and released: allocated bytes and the collector's objects end where they began."""

from __future__ import annotations

import json

import pytest
from kernel import kernel
from processes import python
from simulated_machines import machine_at

pytestmark = [pytest.mark.simulated, pytest.mark.slow]

ROUNDS = 100
# Python and IPython move a few dozen objects about; one leaked in each round would be a hundred.
MOST = 60

SETUP = """
import gc, json, sys, torch
from memlab.api import oom
def step():
    held = []
    while True:
        held.append(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
def count():
    gc.collect()
    return torch.cuda.memory_allocated(), len(gc.get_objects())
def let_go():
    noted = oom.note_oom(getattr(sys, "last_exc", sys.last_value))
    assert "ran out of memory" in noted.text
    freed = oom.release().released.levels[-1].freed_bytes
    assert freed > 1 << 30, freed
weights = torch.zeros(1000, device="cuda")
"""

IN_A_SHELL = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
assert shell.run_cell({SETUP!r}).success
def rounds(number, cell, then):
    for _ in range(number):
        assert not shell.run_cell(cell).success
        shell.run_cell(then).raise_error()
def growth(cell, then):
    rounds(3, cell, then)
    before = shell.user_ns["count"]()
    rounds({ROUNDS}, cell, then)
    return before, shell.user_ns["count"]()
import json
print(json.dumps([growth("1/0", "0;"), growth("step()", "let_go()")]))
"""


def ends_where_it_began(before: list[int], after: list[int], grows_anyway: int = 0) -> None:
    assert after[0] == before[0]
    assert after[1] - before[1] - grows_anyway < MOST


def test_in_an_ipython_shell(tmp_path):
    printed = python("-c", IN_A_SHELL, gpu={"total_mb": 2048}, IPYTHONDIR=str(tmp_path))
    (plain_before, plain_after), (before, after) = json.loads(printed.splitlines()[-1])
    # IPython itself keeps two objects of every cell that fails.
    ends_where_it_began(before, after, plain_after[1] - plain_before[1])


def test_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv(*machine_at(tmp_path / "gpu", 2048).popitem())
    with kernel(tmp_path, SETUP) as notebook:

        def quietly(cell: str) -> str:
            """Run a cell that leaves nothing in IPython's history, which grows by design."""
            reply = notebook.client.execute_interactive(
                cell, store_history=False, output_hook=lambda message: None, timeout=300, allow_stdin=False
            )
            return reply["content"].get("ename", "")

        def rounds(number: int) -> None:
            for _ in range(number):
                assert quietly("step()") == "OutOfMemoryError"
                assert quietly("let_go()") == ""

        rounds(3)
        before = notebook.value("count()")
        rounds(ROUNDS)
        ends_where_it_began(before, notebook.value("count()"))
