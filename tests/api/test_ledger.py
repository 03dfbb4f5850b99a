"""The ledger of cells on the CPU: what it says against sums over objects, and that it changes and keeps nothing."""

from __future__ import annotations

import gc
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from ledger_cells import cells, level, paths  # noqa: F401

import memlab
from memlab.api.ledger import LedgerReading, LedgerReport, Polls, peak_between
from memlab.references.live_storages import storages

MiB = 1 << 20
KiB = 1 << 10


# --- what it says ---


def test_a_cell_leaves_what_it_made_by_name(cells):
    cells.run("x = torch.ones(1 << 18); y = [torch.ones(1 << 16)]; torch.ones(1 << 20).sum().item()")
    assert paths(cells.last) == {"x": MiB, "y[0]": 256 * KiB}
    assert level(cells.last).left_bytes == MiB + 256 * KiB
    assert (cells.last.status, cells.last.number, cells.last.is_whole, cells.last.notes) == ("ok", 2, True, ())
    assert level(cells.last).peak is None  # nobody measured it


def test_before_and_after_are_the_sums_over_all_storages(cells):
    for code in ("a = torch.ones(999)", "b = a[:5]", "c = a.clone(); del a", "del b", "d = nn.Linear(30, 40)", "1"):
        before = sum(one.nbytes for one in storages("cpu"))
        cells.run(code)
        after = sum(one.nbytes for one in storages("cpu"))
        assert (level(cells.last).before_bytes, level(cells.last).after_bytes) == (before, after), code


def test_a_model_its_gradients_and_the_optimizer_states(cells):
    cells.run(
        "model = nn.Linear(100, 100, bias=False); opt = torch.optim.Adam(model.parameters()); x = torch.ones(7, 100)"
    )
    cells.run("loss = model(x).sum()")
    cells.run("loss.backward()")
    assert paths(cells.last) == {"model.weight.grad": 40_000}
    cells.run("opt.step()")
    assert sorted(one.nbytes for one in cells.last.left) == [4, 40_000, 40_000]
    assert {one.root for one in cells.last.left} == {"opt"}
    assert {one.category for one in cells.last.left} == {"optimizer"}


def test_what_only_a_graph_keeps_is_found_and_named_by_who_keeps_the_graph(cells):
    cells.run("x = torch.ones(100, 100, requires_grad=True)")
    cells.run("y = (x.exp().sin() * 2).sum()")
    held = sum(one.nbytes for one in cells.last.left)
    assert 40_004 <= held < 40_100  # what exp made, once, and the sum; the constant is an extra
    assert {one.root for one in cells.last.left} == {"y"}
    cells.run("del y")
    assert level(cells.last).left_bytes == -held


def test_what_a_cell_left_and_another_let_go(cells):
    cells.run("x = torch.ones(1000)")
    cells.run("del x")
    first, second = cells.entries
    assert (first.left[0].died, level(second).left_bytes, second.left) == (1, -4000, ())


def test_a_failed_cell_says_so_and_what_its_frames_keep_is_there(cells):
    error = cells.run("def f():\n    big = torch.ones(1 << 18)\n    1 / 0\nf()")
    assert (cells.last.status, level(cells.last).left_bytes) == ("ZeroDivisionError", MiB)
    del error
    gc.collect()
    assert cells.last.left[0].died is not None


def test_an_interrupted_cell_without_a_result(cells):
    cells.run("x = torch.ones(1000); raise KeyboardInterrupt", told="nothing")
    assert (cells.last.status, cells.last.number, paths(cells.last)) == ("interrupted", 0, {"x": 4000})


def test_the_same_text_is_the_same_cell_tracked_or_not(cells):
    cells.run("x = 1\n")
    cells.ledger.before_cell(info := SimpleNamespace(raw_cell="%%memtrack --name a\nx = 1"))
    cells.ledger.after_cell(SimpleNamespace(info=info, error_in_exec=None, error_before_exec=None, execution_count=9))
    cells.run("x = 2")
    assert [(one.again, one.text) for one in cells.entries] == [(0, "x = 1"), (1, "x = 1"), (0, "x = 2")]
    assert len({one.cell for one in cells.entries}) == 2


def test_a_tracked_cell_has_the_exact_peak_of_its_run(cells):
    with memlab.track("cell", show=False) as run:
        torch.ones(1 << 18) + 1
    cells.run("x = 1", runs=[run])
    peak = level(cells.last).peak
    assert (peak.low_bytes, peak.is_exact, cells.last.is_tracked) == (run.peak_bytes, True, True)
    broken = memlab.Run("broken")
    cells.run("x = 1", runs=[broken])
    assert level(cells.last).peak is None
    memlab.runs.discard(memlab.runs["cell"])


def in_another_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("called", [lambda function: function(), in_another_thread])
def test_cells_in_cells_count_for_the_outermost_those_of_another_thread_too(cells, called):
    cells.names["inner"] = lambda: called(lambda: cells.run("y = torch.ones(2000)"))
    cells.run("x = torch.ones(1000); inner(); z = torch.ones(3000)")
    assert [paths(one) for one in cells.entries] == [{"x": 4000, "y": 8000, "z": 12_000}]


def test_the_end_of_a_cell_that_never_began_is_nothing(cells):
    result = SimpleNamespace(info=SimpleNamespace(raw_cell=""), success=True, execution_count=1)
    cells.ledger.after_cell(result)
    cells.ledger.after_cell(None)
    cells.ledger.before_cell(SimpleNamespace(raw_cell="x"))
    cells.ledger.after_cell(result)  # of an empty cell, which begins without a word
    assert cells.entries == ()
    cells.ledger.after_cell(None)
    assert len(cells.entries) == 1


# --- peaks from counters ---


@pytest.mark.parametrize(
    ("before", "after", "polled", "peak"),
    [
        ((5, 10), (6, 30), 0, (30, 30)),  # a counter that rose is the peak of the cell
        ((5, 10), (6, 10), 0, (6, 10)),  # one that did not rise is the upper end of a range
        ((5, 10), (6, 10), 9, (9, 10)),
        ((5, 10), (10, 10), 0, (10, 10)),
        ((5, 100), (6, 8), 7, (8, 1 << 40)),  # one that the user reset proves no upper end
        ((5, -1), (6, -1), 9, (9, 1 << 40)),  # without a counter of peaks readings are a lower end
    ],
)
def test_the_peak_of_a_cell_from_counters_and_readings(before, after, polled, peak):
    found = peak_between(LedgerReading(*before), LedgerReading(*after), polled)
    assert (found.low_bytes, min(found.high_bytes, 1 << 40)) == peak


def test_nothing_is_polled_where_there_is_nothing_to_read():
    if torch.cuda.is_initialized():
        pytest.skip("another test has brought up CUDA")
    polls, before = Polls(), threading.active_count()
    polls.start()
    assert (threading.active_count(), polls.stop()) == (before, {})
    assert not torch.cuda.is_initialized()


# --- growth ---


@pytest.mark.parametrize(
    ("setup", "again", "name"),
    [
        ("losses = []; w = torch.ones(5000, requires_grad=True)", "losses.append(w.exp().sum())", "losses"),
        ("total = torch.zeros((), requires_grad=False); w = torch.ones(5000, requires_grad=True)",
         "total += w.exp().sum()", "total"),
        ("Out = {}", "Out[len(Out)] = torch.ones(5000)", "Out"),
        ("cfg = {'kept': []}", "cfg['kept'] += [torch.ones(5000), torch.ones(5000)]", "cfg"),
    ],
    ids=["losses with graphs", "a total with its graph", "Out", "in a dict"],
)  # fmt: skip
def test_a_cell_that_grows_when_run_again(cells, setup, again, name):
    cells.run(setup)
    for _ in range(2):
        cells.run(again)
    assert [found for found, _ in cells.flags()] == [name]
    cells.run(again)
    (growth,) = cells.ledger.accounts().growths
    assert (growth.name, growth.runs, growth.text) == (name, 3, again)
    assert growth.bytes_per_run >= 20_000


@pytest.mark.parametrize(
    ("setup", "again"),
    [
        ("losses = []; w = torch.ones(5000, requires_grad=True)", "losses.append(w.exp().sum().item())"),
        ("", "x = torch.ones(5000)"),
        ("", "x = torch.ones(5000); torch.ones(70_000)"),
        ("new = None", "old, new = new, torch.ones(5000)"),
        ("model = nn.Linear(90, 90); opt = torch.optim.Adam(model.parameters())",
         "opt.zero_grad(); model(torch.ones(9, 90)).sum().backward(); opt.step()"),
        ("", "losses = []\nfor _ in range(9): losses.append(torch.ones(5000))"),
        ("import random; random.seed(5)", "x = torch.ones(random.randint(5000, 90_000))"),
    ],
    ids=["items", "replaced", "temporaries", "two in turn", "a step", "a list made anew", "random sizes"],
)  # fmt: skip
def test_a_cell_that_does_not_grow(cells, setup, again):
    cells.run(setup)
    for number in range(6):
        cells.run(again)
        assert number % 2 or cells.flags() == []
    assert cells.flags() == []


def test_copies_that_get_larger(cells):
    cells.run("k = torch.ones(0)")
    for _ in range(5):
        cells.run("k = torch.cat([k, torch.ones(5000)])")
    assert cells.flags() == [("k", 20_000)]


# --- on and off ---


def test_off_and_on_again_and_clear(cells):
    cells.run("x = torch.ones(1000)")
    cells.ledger.off()
    cells.run("y = torch.ones(2000); del x")
    assert [one.died for one in cells.last.left] == [1]  # it went meanwhile
    cells.ledger.on()
    cells.run("z = torch.ones(3000)")
    assert [[one.nbytes for one in entry.left] for entry in cells.entries] == [[4000], [12_000]]
    assert level(cells.last).before_bytes == sum(one.nbytes for one in storages("cpu")) - 12_000
    cells.run("z = torch.ones(3000)")
    cells.ledger.clear()
    cells.run("z = torch.ones(3000)")
    assert [one.again for one in cells.entries] == [0]


def test_off_within_a_cell(cells):
    cells.names["off"] = cells.ledger.off
    cells.run("x = torch.ones(1000); off()")
    cells.run("y = 1")
    assert cells.entries == ()


def test_the_public_function_shows_the_ledger_of_the_process():
    report = memlab.api.ledger.ledger()
    assert isinstance(report, LedgerReport)
    assert str(report) == report.text == report._repr_mimebundle_()["text/plain"]
    assert report.to_pandas().columns[0] == "cell"
    assert "ipykernel" not in report.text
    assert sys.modules["__main__"].__name__ == "__main__"
