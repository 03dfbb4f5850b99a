"""The report of a cell points to `memlab.advise`, and the cell is run again from its text, in a real kernel."""

from __future__ import annotations

import sys

import pytest
from kernel import Kernel, kernel

from memlab.cells import body_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")

SETUP = """%load_ext memlab
import torch, memlab
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.ReLU()) for _ in range(8)])
"""
CELL = """%%memtrack --name mine
x = torch.randn(4096, 128)
print("seen once")
loss = model(x).square().mean()
loss.backward()
loss.item()
"""
POINTER = "memlab.advise(memlab.runs['mine']) tries"
STATE = "(model[0][3].inplace, len(memlab.runs), memlab.last_run().name, torch.get_rng_state().sum().item(), x.sum().item())"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    with kernel(tmp_path_factory.mktemp("advise"), SETUP) as one:
        yield one


def test_the_report_points_and_the_cell_runs_again_in_a_child(notebook: Kernel):
    reply = notebook.run(CELL)
    assert reply.status == "ok", reply.traceback
    assert reply.report.splitlines()[-1].startswith("Activations hold ")
    assert POINTER in reply.report.splitlines()[-1]
    before = notebook.value(STATE)
    reply = notebook.run("advice = memlab.advise(memlab.runs['mine'], techniques=['checkpoint', 'in_place'])")
    assert reply.status == "ok", reply.traceback
    assert "seen once" not in reply.stdout
    assert notebook.value(
        "(advice.recommended[0], min(advice.saved_bytes) > 0.3 * advice.findings.before_bytes[0])"
    ) == (
        "checkpoint",
        True,
    )
    assert notebook.value(STATE) == before
    shown = notebook.run("from IPython.display import display; display(advice)").shown
    assert {"text/html", "text/plain"} == set(shown[0])


def test_a_prediction_of_a_cell_is_predicted_again(notebook: Kernel):
    reply = notebook.run(
        CELL.replace("mine", "foretold --predict T4").replace(
            "x = ", 'torch.set_default_device("cuda"); model.cuda(); x = '
        )
    )
    assert reply.status == "ok", reply.traceback
    reply = notebook.run("advice = memlab.advise(memlab.runs['foretold'], techniques=['checkpoint'])")
    assert reply.status == "ok", reply.traceback
    assert notebook.value("(advice.findings.on, advice.recommended, advice.findings.is_predicted)") == (
        "T4",
        ("checkpoint",),
        True,
    )


def test_a_small_cell_points_nowhere(notebook: Kernel):
    assert "memlab.advise" not in notebook.run("%%memtrack\ny = torch.randn(100)\n").report


def test_a_cell_that_cannot_run_twice_says_why(notebook: Kernel):
    notebook.run("z = torch.ones(1 << 20)")
    assert notebook.run("%%memtrack --name once\nw = z * 2\ndel z\n").status == "ok"
    reply = notebook.run("memlab.advise(memlab.runs['once'])")
    assert reply.error == "MemlabError"
    assert "the cell failed when it was run again: NameError" in reply.traceback


def test_a_statement_and_a_loaded_run(notebook: Kernel):
    notebook.run("%memtrack --name line model(x).sum().backward()")
    reply = notebook.run("advice = memlab.advise(memlab.runs['line'], techniques=['checkpoint'])")
    assert reply.status == "ok", reply.traceback
    reply = notebook.run("memlab.runs['mine'].save('mine.memlab'); memlab.advise(memlab.load('mine.memlab'))")
    assert "cannot be run again" in reply.traceback


def test_an_interrupt_keeps_what_was_tried(notebook: Kernel):
    notebook.run("import time\ndef slow():\n    model(x).sum().backward()\n    time.sleep(0.5)\n")
    notebook.run(
        "import os, signal\nfrom memlab.session.advise import search\n"
        "first = search.Search._figures\n"
        "def figures(*args):\n    os.kill(os.getpid(), signal.SIGINT) if args[0].tried else None\n    return first(*args)\n"
        "search.Search._figures = figures"
    )
    try:
        reply = notebook.run("advice = memlab.advise(slow, techniques=['checkpoint', 'in_place', 'retain_graph'])")
        assert reply.status == "ok", reply.traceback
        assert notebook.value("(len(advice.tried), advice.recommended)") == (1, ("checkpoint",))
        assert "interrupted after 1 of 3" in notebook.run("print(advice)").stdout
    finally:
        notebook.run("search.Search._figures = first")


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        ("%%memtrack\nx\n", "x\n"),
        ("\n\n%%memtrack --name a\n\nx\n", "\nx\n"),
        ("  %%memtrack\n  x", "  x"),
        ("%%memtracks\nx", ""),
        ("x = 1\n%%memtrack\n", ""),
        ("", ""),
    ],
)
def test_the_text_below_the_magic(raw, body):
    assert body_of(raw) == body
