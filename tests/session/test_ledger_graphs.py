"""What the ledger sees of graphs: new nodes only, and never so many in a row that freeing them ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from memlab.seams import graph, sequence
from memlab.session.ledger import graphs as graphing
from memlab.session.ledger.graphs import Graphs


def chain(length: int, start: torch.Tensor | None = None) -> torch.Tensor:
    """Nodes in a row, each of which keeps a tensor of its own."""
    one = torch.ones(10, requires_grad=True) if start is None else start
    for _ in range(length):
        one = one.sin()
    return one


def walked(graphs: Graphs, *tensors: torch.Tensor) -> int:
    """How many tensors a walk finds."""
    found = []
    graphs.walk([one for one in tensors if not one.is_leaf], found.append)
    return len(found)


def test_nodes_are_numbered_in_the_order_of_their_making():
    first = sequence.next_number()
    one, leaf = chain(3), torch.ones(1, requires_grad=True)
    numbers = [sequence.number_of(node) for node in (one.grad_fn, one.grad_fn.next_functions[0][0])]
    assert numbers == [first + 2, first + 1]
    assert sequence.next_number() == first + 3
    gathers = leaf.sin().grad_fn.next_functions[0][0]
    assert sequence.number_of(gathers) == sequence.LEAF == sequence.number_of(object())


def test_only_new_nodes_are_walked_each_once():
    graphs = Graphs()
    one = chain(5)
    assert (walked(graphs, one), walked(graphs, one), graphs.unseen) == (5, 0, "")
    other = chain(3, one)
    assert walked(graphs, one, other, other[:2]) == 3
    assert walked(graphs, chain(4), one) == 4


def test_rows_that_get_long_are_left_alone_before_their_end_could_end_the_process(monkeypatch):
    monkeypatch.setattr(graph, "nodes_stay", True)
    monkeypatch.setattr(graphing, "MAX_DEPTH", 50)
    graphs, one, total = Graphs(), chain(1), 0
    for _ in range(30):
        one = chain(7, one)
        total += walked(graphs, one)
    assert total == 50
    assert "PyTorch could not free" in graphs.unseen
    assert walked(graphs, one, chain(3)) == 0
    assert (graphs.may_search(), graphs.may_search()) == (True, False)
    assert walked(graphs) == 0  # all of them have gone
    assert (walked(graphs, chain(3)), graphs.unseen) == (3, "")


def test_graphs_that_do_not_hang_together_do_not_add_up(monkeypatch):
    monkeypatch.setattr(graph, "nodes_stay", True)
    monkeypatch.setattr(graphing, "MAX_DEPTH", 100)
    graphs, trunk = Graphs(), chain(20)
    for _ in range(30):
        assert (walked(graphs, trunk, chain(20, trunk)) >= 20, graphs.unseen) == (True, "")


def test_too_many_nodes_at_once_are_said(monkeypatch):
    monkeypatch.setattr(graph, "nodes_stay", True)
    monkeypatch.setattr(graphing, "MAX_DEPTH", 50)
    graphs = Graphs()
    assert walked(graphs, *(chain(20) for _ in range(5))) == 50
    assert graphs.unseen == "what graphs keep: too many nodes for a quick look"


@pytest.mark.slow
def test_a_total_that_keeps_the_graph_of_every_step_does_not_end_the_process():
    code = """
import sys
sys.path.insert(0, "tests")
from celling import Cells
cells = Cells()
cells.run("w = torch.ones(30, requires_grad=True); total = torch.zeros(())")
for i in range(36):
    cells.run("for _ in range(1500): total = total + w.exp().sum()")
    if not i % 9: cells.ledger.accounts()
cells.run("del total")
print(cells.last.levels[0].after_bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "120"), done.stderr
