"""A Lab in a real kernel: what its cell shows, twice, closed, unloaded; and the magic."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from kernel import Kernel, kernel

from memlab.lab import widgets

WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = """
import threading, torch
torch.set_num_threads(1)
import memlab
from lab_samples import tiny
%load_ext memlab
"""
OPEN = "lab = memlab.Lab(tiny, steps=1, force=True, techniques=['checkpoint_sequential']); lab"
LEFT = (
    "import ipywidgets; "
    "print(len(ipywidgets.widgets.widget._instances), "
    "[one.name for one in threading.enumerate() if 'memlab' in one.name], "
    "[one for one in get_ipython().events.callbacks['pre_run_cell'] + get_ipython().events.callbacks['post_run_cell'] "
    "if 'lab.worker' in type(getattr(one, '__self__', None)).__module__])"
)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("kernel"), SETUP) as running:
        yield running


def quietly(notebook: Kernel, code: str) -> None:
    """Run a cell and look at nothing: it may change what an earlier one has shown."""
    reply = notebook.answer(code, lambda message: None)
    assert reply["status"] == "ok", reply


@pytest.fixture(autouse=True)
def closed(notebook: Kernel) -> Iterator[None]:
    yield
    quietly(notebook, "import memlab.lab.view; memlab.lab.view.close_all()")
    assert notebook.run(LEFT).stdout.strip() == "0 [] []"


def test_controls_stand_beside_static_outputs(notebook):
    reply = notebook.ok(OPEN)
    assert [WIDGET in data for data in reply.shown] == [True, False, False, False]
    assert reply.shown[1]["text/plain"] == widgets.USE
    assert reply.out is None


def test_the_result_takes_its_place_by_display_id(notebook):
    reply = notebook.ok(f"{OPEN[:-4]}\ndisplay(lab)\nrun = lab.run()")
    assert "application/vnd.plotly.v1+json" in reply.shown[2]
    assert "image/svg+xml" in reply.shown[2]
    assert "with checkpoint_sequential" in reply.shown[3]["text/html"]
    assert "Runs of this Lab (2)" in reply.shown[3]["text/plain"]


def test_a_thread_updates_the_outputs_of_its_cell(notebook):
    reply = notebook.run(f"{OPEN[:-4]}\ndisplay(lab)\nlab.start(); print(lab.wait(120))")
    assert reply.stdout == "True\n"
    assert "with checkpoint_sequential" in reply.shown[3]["text/plain"]


def test_closing_leaves_words_and_the_result(notebook):
    reply = notebook.ok(f"{OPEN[:-4]}\ndisplay(lab)\nrun = lab.run()\nlab.close(); lab.close()")
    assert reply.shown[0]["text/plain"] == widgets.CLOSED
    assert WIDGET not in reply.shown[0]
    assert "with checkpoint_sequential" in reply.shown[3]["text/plain"]
    assert notebook.value("len(lab.rows)") == 2


def test_a_lab_that_is_shown_again_moves(notebook):
    reply = notebook.run(f"{OPEN[:-4]}\ndisplay(lab)\ndisplay(lab)")
    assert [WIDGET in data for data in reply.shown] == [False, False, False, False, True, False, False, False]
    assert reply.shown[0]["text/plain"] == widgets.CLOSED


def test_a_cell_waits_for_the_run_that_goes_on(notebook):
    notebook.run(f"{OPEN[:-4]}\ndisplay(lab)")
    quietly(
        notebook,
        "import time; real = lab.listener.progress\n"
        "def slowly(*news): time.sleep(0.1); real(*news)\n"
        "lab.listener.progress = slowly; lab.start()",
    )
    quietly(notebook, "seen = lab.is_running, len(lab.rows)")
    assert notebook.value("seen") == (False, 2)


def test_nothing_is_predicted_in_the_cell_that_opens_it(notebook):
    notebook.ok("from memlab.lab.worker import execution_lock")
    reply = notebook.ok(
        f"{OPEN[:-4]}\ndisplay(lab)\nknown = lab.listener.controls.estimates.peaks\nexecution_lock.is_free"
    )
    assert reply.out == "False"
    assert notebook.ok("execution_lock.is_free").out == "False"
    until = time.monotonic() + 100
    while not notebook.value("len(known)") and time.monotonic() < until:
        time.sleep(2)
    assert notebook.value("len(known)")


def test_unloading_closes(notebook):
    reply = notebook.ok(f"{OPEN[:-4]}\ndisplay(lab)\n%unload_ext memlab\n%load_ext memlab")
    assert reply.shown[0]["text/plain"] == widgets.CLOSED


def test_the_magic_opens_it(notebook):
    reply = notebook.ok("%memlab gpt checkpoint, in_place")
    assert WIDGET in reply.shown[0]
    state = notebook.run("lab = %memlab gpt checkpoint,in_place\nprint(lab.state)").stdout
    assert "'workload': 'gpt'" in state
    assert "['checkpoint', 'in_place']" in state


def test_the_magic_knows_the_notebooks_functions(notebook):
    assert "'workload': 'tiny'" in notebook.run("lab = %memlab tiny\nprint(lab.state)").stdout


def test_the_magic_says_what_is_wrong_in_one_line(notebook):
    reply = notebook.run("%memlab nonsense")
    assert reply.error == "UsageError"
    assert "%memlab: workload 'nonsense'" in reply.stderr
    assert "exclude" in notebook.run("%memlab gpt checkpoint, checkpoint_sequential").stderr
