"""IPython without a notebook: the same measurement, reported as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import started

# Typed into the simple prompt, a cell magic ends with two blank lines.
SCRIPT = """
%load_ext memlab
import torch, memlab
%%memtrack --name typed
kept = torch.ones(1000)
kept.sum().item()


print("Out:", Out[max(Out)])
%memtrack --name line torch.zeros(500)
%%memtrack --name failing
1 / 0


%%memtrack --budget 1KiB
torch.ones(5000).sum()


%%memtrack --bogus
ran = 1


%%time
2


print("names:", sorted(n for n in globals() if "mem" in n), "ran" in globals())
print("runs:", list(memlab.runs))
%unload_ext memlab
%%memtrack
1


print("modes:", torch._C._len_torch_dispatch_stack())
"""


def python(*arguments: str, text: str = "", folder: Path) -> str:
    process = started(folder, *arguments, IPYTHONDIR=str(folder), NO_COLOR="1")
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(process.communicate(text, timeout=600)))


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> str:
    """What a terminal shows when the script is typed into it, line by line."""
    folder = tmp_path_factory.mktemp("terminal")
    options = ("-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor", "--no-confirm-exit")
    return python(*options, text=SCRIPT.strip() + "\n", folder=folder)


def test_a_cell_can_be_typed_line_by_line(session):
    assert "Out: 1000.0" in session


@pytest.mark.parametrize("name", ["typed", "line", "failing"])
def test_the_report_is_text(session, name):
    assert f"memlab · {name} · " in session


def test_nothing_but_text_is_shown(session):
    for sign in ("<svg", "<table", "vnd.plotly", "LiveView", "display_id", "memlab is measuring"):
        assert sign not in session


def test_errors_budgets_and_refusals_are_told(session):
    assert "ZeroDivisionError: division by zero" in session
    assert "The cell raised ZeroDivisionError" in session
    assert "BudgetExceeded: run " in session
    assert "UsageError: %memtrack: unknown '--bogus'" in session
    assert "Wall time" in session


def test_no_name_is_left_and_the_runs_are_kept(session):
    assert "names: ['memlab'] False" in session
    assert "runs: ['typed', 'line', 'failing', 'run 1']" in session


def test_after_unloading_the_magic_is_gone(session):
    assert "`%%memtrack` not found" in session
    assert "modes: 0" in session


def test_a_script_of_ipython_runs_its_cells_too(tmp_path):
    (tmp_path / "cells.ipy").write_text("%load_ext memlab\n%memtrack --name scripted 1 + 1\n")
    assert "memlab · scripted · " in python("-m", "IPython", "--no-banner", "cells.ipy", folder=tmp_path)


def test_plain_python_gets_text_when_it_asks(tmp_path):
    program = (
        "import memlab as m\nwith m.track('plain', show=True): pass\nwith m.track('quiet'): pass\nprint(m.last_run())"
    )
    shown = python("-c", program, folder=tmp_path)
    assert shown.count("memlab · plain") == 1
    assert shown.count("memlab · quiet") == 1  # by the last line alone
