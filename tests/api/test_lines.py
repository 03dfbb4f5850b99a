"""`track(lines=True)`: which code is watched, by what name, and the value that `run.lines()` gives."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memlab
from memlab.api.run import Run
from memlab.api.runs import load
from memlab.api.watched_code import codes_of, label_of, source_of
from memlab.cells import ARM, armed, as_written
from memlab.errors import MemlabError

KB = 4000


def made(count: int = 1) -> list[torch.Tensor]:
    return [torch.ones(1000) for _ in range(count)]


class Maker:
    def make(self): ...
    @staticmethod
    def static(): ...
    @classmethod
    def of_class(cls): ...
    @property
    def computed(self): ...

    class Inner:
        def inner(self): ...


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args: function(*args))


@decorated
def wrapped(): ...


@torch.no_grad()
def without_grad(): ...


@functools.lru_cache
def cached(): ...


# --- names ---------------------------------------------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    "made": made, "Maker": Maker, "maker": Maker(), "torch": torch, "nn": nn, "wrapped": wrapped, "cached": cached,
    "without_grad": without_grad, "model": nn.Sequential(nn.Identity()), "partial": functools.partial(made, 3), "x": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("made partial", "made"),
        ("Maker.make maker.make", "make"),
        ("Maker.static", "static"),
        ("Maker.of_class", "of_class"),
        ("Maker.computed", "computed"),
        ("Maker", "make static of_class computed"),
        ("wrapped", "wrapped"),
        ("without_grad", "without_grad"),
        ("cached", "cached"),
        ("nn.functional.layer_norm", "layer_norm"),
        ("torch.nn.Linear.forward model.0.forward", "forward"),
    ],
)
def test_a_name_leads_to_code(names, expected):
    for name in names.split():
        assert [code.co_name for code in codes_of(name, NAMES)] == expected.split()


def test_things_lead_to_code_as_well():
    assert [code.co_name for code in codes_of(made, {})] == ["made"]
    assert [code.co_name for code in codes_of(Maker().make, {})] == ["make"]
    assert "forward" in [code.co_name for code in codes_of(nn.Linear(1, 1), {})]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "there is no such name here"),
        ("maker.nothing", "there is no such name here"),
        ("torch.nn", "it is a module. Name a function"),
        ("torch.relu", "it is not written in Python"),
        ("x", "it is of type int, without lines of Python"),
        ("", "there is no such name here"),
        ("a b(", "there is no such name here"),
    ],
)
def test_what_cannot_be_watched_is_said_before_anything_runs(name, why):
    with pytest.raises(MemlabError, match=rf"cannot watch .*: {why}"):
        codes_of(name, NAMES)


def test_looking_up_a_name_runs_nothing():
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        __getattribute__ = __getattr__  # type: ignore[assignment]

    with pytest.raises(MemlabError, match="no such name"):
        codes_of("h.forward", {"h": Hostile()})
    with pytest.raises(MemlabError, match="cannot watch"):
        codes_of("h", {"h": Hostile()})


def test_labels():
    assert label_of("/a/b/train.py") == "train.py"
    assert label_of("<stdin>") == "<stdin>"
    assert label_of("/tmp/ipykernel_123/4567.py", "/tmp/ipykernel_123/4567.py") == "cell"


@pytest.mark.parametrize("options", ["", "--lines", "--name 'a b' --lines"])
def test_a_cell_is_shown_as_it_was_written(monkeypatch, options):
    written = [f"%%memtrack {options}".rstrip() + "\n", "from __future__ import annotations\n", "x = 1\n"]
    for cell in (written, [written[0], written[2]]):
        shown = armed(list(cell), lambda rest: rest)
        assert ARM in "".join(shown)
        shown = list(map(as_written, shown))
        ast.parse("".join(shown))
        monkeypatch.setattr("linecache.getlines", lambda file, shown=shown: shown)
        assert [line.rstrip() for line in source_of("f")][-1] == "x = 1"
        assert ARM not in "".join(source_of("f"))
    assert source_of("f")[0] == written[0]


# --- the value -----------------------------------------------------------------------------------------------------------


def line_of(run: Run, text: str) -> Any:
    report = run.lines()
    here = report.table.sources["test_lines.py"]
    return next(row for row in report if row.source == "test_lines.py" and text in here.get(row.line, ""))


def test_the_lines_of_the_block_and_of_named_functions():
    with memlab.track("a", functions=[made], show=False) as run:
        kept = made(3)  # first
        kept += made()  # second
    assert (line_of(run, "# first").total_bytes, line_of(run, "# second").total_bytes) == (3 * KB, KB)
    assert (line_of(run, "return [torch.ones").held_bytes, line_of(run, "return [torch.ones").executions) == (4 * KB, 2)
    assert run.breakdown("line")[line_of(run, "return [torch.ones").text] == 4 * KB
    assert "executions" in run.trace.notes


def test_a_report_in_all_its_forms(tmp_path):
    with memlab.track("b", lines=True, shapes=True, show=False, save=tmp_path / "b.memlab") as run:
        kept = torch.ones(10, 100)  # here
    report = run.lines()
    assert "kept = torch.ones(10, 100)  # here" in str(report)
    assert "+ | 1 * Size:(10, 100) | Memory: 0.0040000 MB | float32" in report.plain()
    assert set(report._repr_mimebundle_()) == set(report.section()) == {"text/html", "text/plain"}
    assert report.to_pandas()["held_bytes"].sum() == KB == len(kept) * 400
    assert len(report) == len(list(report))
    assert str(load(tmp_path / "b.memlab").lines()) == str(report)
    assert report[line_of(run, "# here").text].held_bytes == KB


@pytest.mark.parametrize("lines", [True, False])
def test_the_report_begins_with_the_line_of_the_peak_in_backward_with_the_one_that_waited(lines):
    x = torch.ones(1000, requires_grad=True)
    with memlab.track(lines=lines, show=False) as run:
        loss = (x * x).sum()
        loss.backward()
    line = inspect.currentframe().f_lineno - 1
    assert ("(backward)" in "".join(run.trace.texts["mark"])) is lines
    assert str(run.report()).splitlines()[0].endswith(f"in backward, test_lines.py:{line}")


def test_without_lines_there_are_none():
    with memlab.track(show=False) as run:
        torch.ones(1)
    assert "executions" not in run.trace.notes
    with pytest.raises(MemlabError, match="this run has no lines"):
        run.lines()


@pytest.mark.parametrize("functions", ["made", made, ["made"], (made,)])
def test_functions_may_be_given_in_many_ways(functions):
    with memlab.track(functions=functions, show=False) as run:
        kept = made()
    assert line_of(run, "return [torch.ones").held_bytes == KB * len(kept)


def test_a_function_that_is_not_there_stops_the_track_before_it_begins():
    with pytest.raises(MemlabError, match="cannot watch 'nowhere'"), memlab.track(functions=["nowhere"], show=False):
        pytest.fail("the block must not run")
    assert sys.gettrace() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_interrupts_leave_nothing_and_the_lines_are_there(error):
    with pytest.raises(error), memlab.track(lines=True, show=False) as run:
        kept = torch.ones(1000)  # before
        raise error
    assert line_of(run, "# before").held_bytes == KB == kept.nbytes


def test_each_thread_has_its_own_lines():
    runs: list[Run] = []

    def work(count: int) -> None:
        with memlab.track(lines=True, show=False, device="cpu") as run:
            kept = [torch.ones(1000) for _ in range(count)]  # in a thread
        runs.append(run)
        del kept

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert [line_of(run, "# in a thread").held_bytes for run in runs] == [KB, 2 * KB]


def test_a_hot_loop_of_plain_python_is_bounded(monkeypatch):
    monkeypatch.setattr("memlab.probes.line_log.MAX_ROWS", 50_000)
    with memlab.track(lines=True, show=False) as run:
        kept = torch.ones(1000)  # first
        total = 0
        for number in range(100_000):
            total += number  # hot
        kept = torch.ones(2000)  # last
    assert line_of(run, "# hot").executions == 100_000
    assert (line_of(run, "# first").held_bytes, line_of(run, "# last").held_bytes) == (KB, KB)
    assert kept.nbytes == 2 * KB
    assert len(run.trace.marks) < 50
    assert not [gap for gap in run.gaps if gap.name == "lines"]


def test_functions_that_the_same_code_defines_are_found_by_name_also_with_a_closure():
    size = 1000

    def outer():
        def inner():
            return torch.ones(size)

        return inner()

    with memlab.track(functions=["inner"], show=False) as run:
        kept = outer()
    number = inspect.getsourcelines(outer)[1] + 2
    assert run.lines()[f"test_lines.py:{number}"].held_bytes == kept.nbytes
    with pytest.raises(MemlabError, match=r"cannot watch 'inner\.nothing'"):
        memlab.track(functions=["inner.nothing"], show=False).__enter__()
