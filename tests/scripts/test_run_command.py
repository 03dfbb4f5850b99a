"""`memlab run` as a user calls it: every script here runs in a process of its own, beside the same one under plain python."""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from processes import memlab_ran, ran, read_until, started

import memlab
from memlab.errors import MemlabError
from memlab.scripts.recording import folder as run_folder

TRAIN = """
import sys
import torch

def main(steps):
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.randn(50, 100)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("done", steps)

if __name__ == "__main__":
    main(5)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


ODD = """
import atexit, os, sys, __main__
atexit.register(print, "at exit")
os.environ["OMP_NUM_THREADS"] = "3"
print(sys.argv, __name__, __file__, __spec__, __package__, sys.path[0], vars(__main__) is globals(), "torch" in sys.modules)
import torch
print(torch.get_num_threads(), torch.ones(3).sum().item())
sys.stderr.write("err\\n")
sys.exit(int(sys.argv[1]))
"""


def test_a_script_runs_as_python_runs_it(folder):
    inner = folder / "in ner"
    inner.mkdir()
    (inner / "odd.py").write_text(ODD)
    plain, run = (
        ran(folder, "in ner/odd.py", "7", "--steps"),
        memlab_ran(folder, "run", "in ner/odd.py", "7", "--steps"),
    )
    assert run[:2] == plain[:2]
    assert plain[0] == 7
    assert run[2].startswith("err\n")
    assert "allocated" in run[2]


def test_a_module_runs_as_python_runs_it(folder):
    (folder / "tools").mkdir()
    (folder / "tools" / "__init__.py").write_text("")
    (folder / "tools" / "odd.py").write_text(ODD.replace("__spec__", "__spec__.name"))
    plain, run = ran(folder, "-m", "tools.odd", "0", "-m"), memlab_ran(folder, "run", "-m", "tools.odd", "0", "-m")
    assert run[:2] == plain[:2]


IN_BACKWARD = """
    class Fails(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x * 1)
        backward = staticmethod(lambda ctx, grad: grad / nothing)
    Fails.apply(torch.ones(1, requires_grad=True)).backward()
"""


@pytest.mark.parametrize(
    "more", [IN_BACKWARD, "    raise ValueError('mine')\n", "    x = = 3\n", "    sys.exit('mine')\n"]
)
def test_an_error_is_shown_as_python_shows_it(folder, more):
    (folder / "fails.py").write_text(TRAIN + more)
    plain, run = ran(folder, "fails.py"), memlab_ran(folder, "run", "fails.py")
    assert run[0] == plain[0] == 1
    assert run[2].endswith(plain[2])
    assert "Traceback" not in run[2].removesuffix(plain[2])


@pytest.mark.parametrize("options", [(), ("--lines", "--shapes")])
def test_after_out_of_memory_the_script_is_spoken_of_and_its_line_is_the_last_shown(folder, options):
    text = TRAIN.replace("import torch\n", "import torch\nx = torch.ones(100, 100)\n").replace("main(5)", "main(4)")
    (folder / "fails.py").write_text(f"{text}    torch.nn.functional.linear(x, x).expand(1 << 40, 100, 100).clone()\n")
    plain = ran(folder, "fails.py")
    run = memlab_ran(folder, "run", "--skip", "2", "--out", "runs", *options, "fails.py")
    assert run[0] == plain[0] == 1
    assert run[2].endswith(plain[2][plain[2].index("Traceback") :])
    assert "ran out of memory" in run[2]
    page = (folder / "runs" / "fails.html").read_text()
    for shown in (run[2], page):
        assert "before the run" in shown
        assert not re.search(r"\bcells?\b|%mem|%%mem", shown.replace("table-cell", ""))
    (first, *_), facts = (
        memlab_ran(folder, "show", *how, "runs/fails.memlab")[1].splitlines() for how in ((), ("--json",))
    )
    assert "ran out of memory" in first and first in run[2]
    assert json.loads(facts[0])["out_of_memory"]["title"] in first
    memlab_ran(folder, "show", "--html", "shown.html", "runs/fails.memlab")
    html = (folder / "shown.html").read_text()
    assert html.index("ran out of memory") < html.index("<svg")


def test_ctrl_c_ends_it_as_it_ends_python(folder):
    text = TRAIN.replace("main(5)", "main(5); import time; print('now', flush=True); time.sleep(60)")
    (folder / "waits.py").write_text(text)
    statuses, errors = [], []
    for words in (("waits.py",), ("-m", "memlab", "run", "waits.py")):
        process = started(folder, *words)
        read_until(process.stdout, "now")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        statuses.append(process.returncode)
        errors.append(err)
    assert statuses == [-signal.SIGINT, -signal.SIGINT]
    # It may come while the line prints or while it sleeps: the marks below the line differ.
    plain, run = ("\n".join(line for line in error.splitlines() if line.strip(" ^~")) for error in errors)
    assert run.endswith(plain)
    assert "Peak" in run


def test_some_steps_are_measured_and_the_run_and_its_page_are_kept(folder):
    status, out, err = memlab_ran(folder, "run", "--skip", "2", "--steps", "2", "--out", "runs/new", "train.py")
    assert (status, out) == (0, "done 5\n")
    run = memlab.load(folder / "runs/new/train.memlab")
    marks = run.trace.marks
    begun = [run.trace.texts["mark"][name] for name, kind in zip(marks.name, marks.kind, strict=True) if kind == 0]
    assert begun.count("backward") == 2
    assert begun.count("optimizer") == 2
    page = (folder / "runs/new/train.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert not {"http://www.w3.org/2000/svg"} ^ {word for word in page.split('"') if word.startswith("http")}
    assert str(run.report().text.splitlines()[0]) in err


def test_a_folder_that_the_script_deletes_is_made_again(folder):
    (folder / "train.py").write_text(TRAIN + "import shutil; shutil.rmtree('runs')")
    code, _, err = memlab_ran(folder, "run", "--out", "runs", "train.py")
    assert code == 0, err
    assert err.startswith("Peak")
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["train.html", "train.memlab"]


def test_a_report_as_json_has_the_figures_of_the_run(folder):
    status, _, err = memlab_ran(folder, "run", "--json", "--out", "runs", "train.py")
    facts, run = json.loads(err.splitlines()[0]), memlab.load(folder / "runs/train.memlab")
    assert status == 0
    assert facts["devices"][0]["allocated"]["peak_low_bytes"] == run.peak_bytes
    assert facts["devices"][0]["peak_by"]["category"] == dict(run.breakdown())
    assert facts["provenance"] == "measured"


def test_a_budget_is_an_exit_status_unless_the_script_failed(folder):
    assert memlab_ran(folder, "run", "--budget", "1MiB", "train.py")[0] == 0
    status, out, err = memlab_ran(folder, "run", "--budget", "200KiB", "train.py")
    assert (status, out) == (1, "done 5\n")
    assert "above its budget of 200.0 KiB" in err


FULL = """
import resource
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1, unlimited))  # every write to a file fails from here on, as on a full disk
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of resources there")
def test_a_full_disk_costs_the_files_and_not_the_report(folder):
    (folder / "train.py").write_text(TRAIN.replace("import torch\n", f"import torch\n{FULL}"))
    status, out, err = memlab_ran(folder, "run", "--budget", "200KiB", "--out", "runs", "train.py")
    assert (status, out) == (1, "done 5\n")
    assert "above its budget of 200.0 KiB" in err
    assert "Peak allocated: " in err
    lines = [line for line in err.splitlines() if line.startswith("memlab run: ")]
    assert [line.split(" cannot ")[0] for line in lines] == [
        "memlab run: the run is not kept:",
        "memlab run: the page is not kept:",
    ]
    assert not list((folder / "runs").iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_the_script_runs(folder, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(MemlabError, match=r"cannot write to '.*': it is read-only\. Name another folder\."):
        run_folder(folder)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
def test_sigusr1_reports_and_the_script_goes_on(folder):
    text = TRAIN.replace("main(5)", "main(5); print('now', flush=True); input(); main(6)")
    (folder / "waits.py").write_text(text)
    process = started(folder, "-m", "memlab", "run", "--out", "runs", "waits.py")
    read_until(process.stdout, "now")
    process.send_signal(signal.SIGUSR1)
    read_until(process.stderr, "memlab: page")
    out, err = process.communicate("\n", timeout=300)
    assert (process.returncode, out) == (0, "done 6\n")
    assert sorted(path.name for path in (folder / "runs").iterdir()) == [
        "waits.2.html", "waits.2.memlab", "waits.html", "waits.memlab",
    ]  # fmt: skip
    assert "Peak" in err


def test_what_a_killed_script_left_is_shown(folder):
    text = TRAIN.replace("main(5)", "main(5); import time; time.sleep(2.5); print('now', flush=True); time.sleep(60)")
    (folder / "waits.py").write_text(text)
    process = started(folder, "-m", "memlab", "run", "--out", "runs", "waits.py")
    read_until(process.stdout, "now")
    process.kill()
    process.communicate()
    assert [path.name for path in (folder / "runs").iterdir()] == ["waits.memlab.partial"]
    status, out, _ = memlab_ran(folder, "show", "runs")
    assert status == 0
    assert "samples of a run that did not end" in out


def test_a_script_without_torch_runs_and_says_so(folder):
    (folder / "plain.py").write_text("print(6 * 7)")
    status, out, err = memlab_ran(folder, "run", "plain.py")
    assert (status, out) == (0, "42\n")
    assert err == "memlab run: nothing was measured: the script did not import torch.\n"


def test_nothing_here_imports_ipython_or_torch_before_the_script(folder):
    (folder / "asks.py").write_text(
        textwrap.dedent("""
        import sys
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        import torch
        torch.ones(3)
        assert "IPython" not in sys.modules, "IPython"
        """)
    )
    assert memlab_ran(folder, "run", "asks.py")[0] == 0


def test_what_cannot_be_measured_does_not_stop_the_script(folder):
    status, out, err = memlab_ran(folder, "run", "--device", "cuda:77", "train.py")
    assert (status, out) == (0, "done 5\n")
    assert err.startswith("memlab run: nothing is measured: cannot measure cuda:77")
    assert len(err.splitlines()) == 1


def test_growth_over_steps_is_noticed_and_its_holder_named(folder):
    leak = "losses.append(model(torch.randn(500, 100)))\n        optimizer.step()"
    text = TRAIN.replace("optimizer.step()", leak).replace("def main", "losses = []\ndef main")
    (folder / "leaks.py").write_text(text.replace("main(5)", "main(12)"))
    status, _, err = memlab_ran(folder, "run", "--lines", "--out", "runs", "leaks.py")
    assert status == 0
    assert re.search(r"Grows by [\d.]+ KiB with each optimizer step, since number [12] of 12, [\d.]+ MiB in all", err)
    assert "allocated at leaks.py:11" in err
    assert re.search(r"what grew is held by losses \([\d.]+ MiB\)", err)
    assert "held by losses" in (folder / "runs/leaks.html").read_text()
    assert "held by" not in memlab_ran(folder, "run", "train.py")[2]


HELD = """
import gc, weakref
import torch
gc.disable()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())

def step():
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    optimizer.step()
    return weakref.ref(loss)

print([step()() is None for _ in range(4)])
"""


@pytest.mark.parametrize("options", [(), ("--skip", "1", "--steps", "2"), ("--skip", "1", "--steps", "2", "--lines")])
def test_what_a_function_held_is_freed_when_it_returns(folder, options):
    (folder / "held.py").write_text(HELD)
    code, out, err = memlab_ran(folder, "run", *options, "held.py")
    assert (code, out) == (0, "[True, True, True, True]\n"), err
