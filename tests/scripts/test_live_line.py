"""The live line of `memlab run` in a real terminal: it is there, and what the script wrote is as without it."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

if os.name != "posix":
    pytest.skip("needs a pty", allow_module_level=True)
from scripts.terminal import Session

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLES = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "", "LINES": ""}
# What a script writes: lines, half a line, two nested bars as tqdm draws them, a long line, more lines than fit.
TALKS = r"""
import sys, time
def talk():
    for i in range(3): print("line", i, flush=True)
    print("begun ... ", end="", flush=True); time.sleep(0.4); print("ended", flush=True)
    for i in range(4):
        sys.stderr.write(f"\router: {i}/4"); sys.stderr.flush()
        for j in range(3):
            sys.stderr.write(f"\n\rinner: {j}/3\x1b[A"); sys.stderr.flush(); time.sleep(0.03)
        sys.stderr.write("\n\r\x1b[K\x1b[A"); sys.stderr.flush()
    print(file=sys.stderr); print("x" * 100, flush=True)
    for i in range(20): print("row", i, flush=True); time.sleep(0.03)
"""
LINE_ALONE = """
import sys, threading
from memlab.scripts import live_line
live_line.SILENT_S, live_line.EVERY_S = 0, 0.02
line = live_line.LiveLine.if_possible()
def tick(stop=threading.Event()):
    while line is not None and not stop.wait(0.01): line.show("MEMLAB " + "now " * 40)
threading.Thread(target=tick, daemon=True).start()
talk()
"""
TRAIN = """
import time
import torch
model = torch.nn.Linear(100, 300)
optimizer = torch.optim.Adam(model.parameters())
for step in range(30):
    model(torch.randn(50, 100)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
print("done")
"""


def session(folder: Path, text: str, *words: str, **environment: str) -> Session:
    (folder / "talks.py").write_text(text)
    return Session([sys.executable, *words, "talks.py"], folder, **VARIABLES, **environment)


def test_what_the_script_wrote_is_as_without_the_line(tmp_path):
    bare, lined = session(tmp_path, TALKS + "talk()"), session(tmp_path, TALKS + LINE_ALONE + "line.close()")
    lined.read(until=lambda one: "row 3" in one.written and one.screen.lines[-1].startswith("MEMLAB now"))
    assert lined.screen.lines[-1].startswith("MEMLAB now")
    assert [bare.status(), lined.status()] == [0, 0]
    assert lined.screen.everything == bare.screen.everything
    assert lined.screen.bottom == bare.screen.bottom
    assert lined.written.count("MEMLAB") > 10
    assert "\x1b[c" not in lined.written  # it asks nothing, so nothing arrives on stdin


@pytest.mark.parametrize("end", ["import os; os.kill(os.getpid(), 9)", "import os; os._exit(3)",
                                 "import os; os.execv('/bin/echo', ['echo', 'other program'])"])  # fmt: skip
def test_a_killed_script_leaves_the_terminal_as_it_was(tmp_path, end):
    lined = session(tmp_path, TALKS + LINE_ALONE + end)
    lined.status()
    assert lined.screen.bottom == lined.screen.last
    assert not any("MEMLAB" in line for line in lined.screen.everything)


def test_a_script_that_waits_for_all_its_children_meets_no_other(tmp_path):
    text = """
import os
try: print(os.wait())
except ChildProcessError: print("no child")
"""
    lined = session(tmp_path, TALKS + LINE_ALONE + text)
    assert lined.status() == 0
    assert "no child" in lined.written


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"LOCAL_RANK": "1"}])
def test_no_line_where_none_belongs(tmp_path, variables):
    lined = session(tmp_path, TALKS + LINE_ALONE, **variables)
    assert lined.status() == 0
    assert "MEMLAB" not in lined.written
    assert "\x1b7" not in lined.written


def test_without_colours_it_has_none(tmp_path):
    lined = session(tmp_path, TALKS + LINE_ALONE, NO_COLOR="1")
    lined.status()
    assert "MEMLAB" in lined.written
    assert "\x1b[7m" not in lined.written


def test_a_run_shows_memory_and_steps(tmp_path):
    run = session(tmp_path, TRAIN, "-m", "memlab", "run")
    run.read(until=lambda one: "/step" in one.screen.lines[-1])
    shown = run.screen.lines[-1]
    assert re.match(
        r"memlab cpu [\d.]+ KiB now · peak [\d.]+ [KM]iB of [\d.]+ [GT]iB · step \d+ · [\d.]+ m?s/step", shown
    )
    assert run.status() == 0
    assert run.screen.bottom == run.screen.last
    assert not any(line.startswith("memlab cpu ") for line in run.screen.everything)
    assert "Peak" in run.written


def test_quiet_shows_neither_line_nor_report(tmp_path):
    run = session(tmp_path, TRAIN, "-m", "memlab", "run", "--quiet")
    assert run.status() == 0
    assert run.written == "done\r\n"


def test_ctrl_c_and_sigterm_give_the_row_back(tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        run = session(tmp_path, TRAIN.replace("range(30)", "range(3000)"), "-m", "memlab", "run")
        run.read(until=lambda one: "/step" in one.screen.lines[-1])
        run.kill(number)
        assert run.status() == -number
        assert run.screen.bottom == run.screen.last
        assert "Peak" in run.written
