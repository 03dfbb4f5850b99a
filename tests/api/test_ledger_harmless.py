"""The ledger keeps nothing of the user's, runs none of it, and looks no longer than cells have time for."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ledger_cells import cells, level, paths  # noqa: F401
from processes import python

from memlab.api import ledger as cell_ledger
from memlab.api import live_set
from memlab.api.ledger import Ledger
from memlab.api.live_set import Graphs
from memlab.torch_internals import graph

MiB = 1 << 20
KiB = 1 << 10


def test_no_tensor_is_kept_alive(cells):
    gc.disable()  # what dies must die at once
    try:
        cells.run(
            "x = torch.ones(1 << 19); w = torch.ones(1000, requires_grad=True); y = w.exp().sum(); s = x.untyped_storage()"
        )
        cells.run("x2 = x[1:]; z = [x]")
        report = cells.ledger.accounts()
        alive = [weakref.ref(cells.names[name]) for name in ("x", "w", "y")]
        alive.append(weakref.ref(cells.names.pop("s")))
        cells.run("del x, w, y, x2, z")
        assert [ref() for ref in alive] == [None] * 4
        assert level(cells.last).left_bytes == -sum(one.nbytes for one in cells.entries[0].left)
    finally:
        gc.enable()
    assert report.entries[0].left


def test_an_error_is_not_kept(cells):
    code = "class Mine(Exception): ...\ndef f():\n    big = torch.ones(1000)\n    raise Mine(big)\nf()"
    error = cells.run(code)
    ref = weakref.ref(error)
    del error
    gc.collect()  # its traceback leads to the frame that had it
    assert ref() is None


def test_objects_that_run_code_when_asked_are_not_asked(cells):
    code = """
class Proxy:
    asked = 0
    def __getattribute__(self, name): Proxy.asked += 1; raise SystemExit(name)
    @property
    def __class__(self): Proxy.asked += 1; raise SystemExit
    def __eq__(self, other): Proxy.asked += 1; raise SystemExit
    def __len__(self): Proxy.asked += 1; raise SystemExit
    def __repr__(self): Proxy.asked += 1; raise SystemExit
    __hash__ = object.__hash__
class Mine(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args, **kwargs): Proxy.asked += 1; raise SystemExit
proxies = [Proxy() for _ in range(10)]
mine = torch.ones(5000).as_subclass(Mine)
"""
    cells.run(code)
    cells.names["Proxy"].asked = 0
    cells.run("more = [proxies[0], torch.ones(100)]")
    assert cells.ledger.accounts().entries
    assert (cells.names["Proxy"].asked, dict(cells.ledger.failures)) == (0, {})


def test_a_cell_that_touches_no_tensor_is_not_looked_at(cells, monkeypatch):
    cells.run("x = torch.ones(100)")
    looks = []
    monkeypatch.setattr(live_set.LiveSet, "look", lambda self: looks.append(1) or [])
    was_on = gc.isenabled()
    gc.disable()  # a collection makes it doubt
    try:
        for _ in range(20):
            cells.run("y = [object() for _ in range(100)]; x.sum().item()")
        assert looks == []
        cells.run("x = torch.ones(200)")
        assert looks == [1]
    finally:
        if was_on:
            gc.enable()


def test_classes_that_run_code_when_hashed_are_not_hashed_to_see_whether_anything_was_made():
    class Meta(type(torch.Tensor)):
        def __hash__(cls):
            raise SystemExit

    class Mine(torch.Tensor, metaclass=Meta):
        pass

    before = live_set.young_tensors()
    mine = torch.Tensor._make_subclass(Mine, torch.ones(3))
    assert live_set.young_tensors() == before + 1
    Meta.__hash__ = type.__hash__  # others do hash
    del mine


def test_asking_for_young_tensors_leaves_no_garbage():
    gc.collect()
    for _ in range(10):
        live_set.young_tensors()
    assert gc.collect() == 0


def test_where_looking_takes_long_cells_pay_for_it_and_it_is_said(cells, monkeypatch):
    cells.run("x = torch.ones(100)")
    monkeypatch.setattr(cell_ledger, "LOOK_S", 0.1)
    cells.ledger.live.cost_s, cells.ledger.credit_s = 0.5, 0.0
    cells.run("y = torch.ones(5000)")
    entry = cells.ledger.records[-1][0]
    left = next(one for one in entry["levels"] if one.device == "cpu").left_bytes
    assert (entry["is_whole"], left) == (False, 0)
    assert entry["notes"] == ("not looked at, as that takes 0.50 s here: what it left may count for a later cell",)
    cells.ledger.credit_s = 10.0
    cells.run("z = torch.ones(7000)")
    assert paths(cells.last) == {"y": 20_000, "z": 28_000}


def test_more_storages_than_are_kept_apart(cells, monkeypatch):
    monkeypatch.setattr(cell_ledger, "MAX_LEFT", 10)
    cells.run("many = [torch.ones(100 + i) for i in range(30)]")
    assert sorted(one.nbytes for one in cells.last.left) == [4 * (120 + i) for i in range(10)]
    assert cells.last.notes == ("more than 10 storages: the smallest are not named",)
    assert level(cells.last).left_bytes == sum(4 * (100 + i) for i in range(30))


def test_the_oldest_cells_go_and_the_dead_are_forgotten(cells, monkeypatch):
    monkeypatch.setattr(cell_ledger, "DEAD_FOR", 3)
    for i in range(8):
        cells.run(f"x = torch.ones({1000 + i})")
    assert [len(one.left) for one in cells.entries] == [0, 0, 0, 0, 0, 1, 1, 1]
    ledger = Ledger()
    assert ledger.records.maxlen == cell_ledger.MAX_CELLS


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_of_ours_is_counted_and_never_the_cells(cells, monkeypatch, error):
    def fail(self):
        raise error("no")

    monkeypatch.setattr(live_set.LiveSet, "look", fail)
    assert cells.run("x = torch.ones(10)") is None
    monkeypatch.undo()
    assert cells.ledger.accounts().notes == (f"the ledger failed 1 time: {error.__name__}",)
    cells.run("y = torch.ones(20)")
    assert cells.last.status == "ok"


def test_a_first_look_that_fails_is_no_beginning(cells, monkeypatch):
    def fail(self):
        raise RuntimeError("no")

    cells.ledger.close()
    with monkeypatch.context() as patch:
        patch.setattr(live_set.LiveSet, "look", fail)
        cells.run("x = torch.ones(10)")
    cells.run("y = torch.ones(20)")
    assert [[one.nbytes for one in entry.left] for entry in cells.entries] == [[80]]


# --- what it sees of graphs: never so many nodes in a row that freeing them ends the process ---


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
    first = graph.next_number()
    one, leaf = chain(3), torch.ones(1, requires_grad=True)
    numbers = [graph.number_of(node) for node in (one.grad_fn, one.grad_fn.next_functions[0][0])]
    assert numbers == [first + 2, first + 1]
    assert graph.next_number() == first + 3
    gathers = leaf.sin().grad_fn.next_functions[0][0]
    assert graph.number_of(gathers) == graph.LEAF == graph.number_of(object())


def test_only_new_nodes_are_walked_each_once():
    graphs = Graphs()
    one = chain(5)
    assert (walked(graphs, one), walked(graphs, one), graphs.unseen) == (5, 0, "")
    other = chain(3, one)
    assert walked(graphs, one, other, other[:2]) == 3
    assert walked(graphs, chain(4), one) == 4


def test_rows_that_get_long_are_left_alone_before_their_end_could_end_the_process(monkeypatch):
    monkeypatch.setattr(graph, "nodes_stay", True)
    monkeypatch.setattr(live_set, "MAX_DEPTH", 50)
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
    monkeypatch.setattr(live_set, "MAX_DEPTH", 100)
    graphs, trunk = Graphs(), chain(20)
    for _ in range(30):
        assert (walked(graphs, trunk, chain(20, trunk)) >= 20, graphs.unseen) == (True, "")


def test_too_many_nodes_at_once_are_said(monkeypatch):
    monkeypatch.setattr(graph, "nodes_stay", True)
    monkeypatch.setattr(live_set, "MAX_DEPTH", 50)
    graphs = Graphs()
    assert walked(graphs, *(chain(20) for _ in range(5))) == 50
    assert graphs.unseen == "what graphs keep: too many nodes for a quick look"


@pytest.mark.slow
def test_a_total_that_keeps_the_graph_of_every_step_does_not_end_the_process():
    code = """
from ledger_cells import Cells
cells = Cells()
cells.run("w = torch.ones(30, requires_grad=True); total = torch.zeros(())")
for i in range(36):
    cells.run("for _ in range(1500): total = total + w.exp().sum()")
    if not i % 9: cells.ledger.accounts()
cells.run("del total")
print(cells.last.levels[0].after_bytes)
"""
    assert python("-c", code) == "120\n"
