"""A tracked cell in a real kernel: the ten promises of the survey, and sections 2 and 3 of the design's."""

from __future__ import annotations

import re

import pytest
from kernel import Kernel, Reply

pytestmark = pytest.mark.usefixtures("leaves_the_kernel_as_it_was")


FIGURE = {"application/vnd.plotly.v1+json", "image/svg+xml", "text/plain"}
TABLE = {"text/html", "text/plain"}
SETUP = ("import torch", "%load_ext memlab", "%%memtrack\n1")
RUNS = "__import__('memlab').runs"


def is_reported(reply: Reply) -> bool:
    return reply.kinds[-2:] == [FIGURE, TABLE]


def same(notebook: Kernel, body: str, options: str = "") -> Reply:
    """Run a body plain and tracked: what the user sees of it is the same, and a report comes besides."""
    plain, tracked = notebook.run(body), notebook.run(f"%%memtrack {options}\n{body}")
    for what in ("status", "error", "out", "stdout", "stderr"):
        assert getattr(tracked, what) == getattr(plain, what), what
    assert [line - 1 for line in tracked.lines] == plain.lines
    assert len(tracked.shown) == len(plain.shown) + 2
    return tracked


# --- 1, 2, 4: the text runs as it is, the value arrives, await works ---


@pytest.mark.parametrize(
    ("body", "out"),
    [
        ("3 + 4", "7"),
        ("x = 3\nx + 4  # done", "7"),
        ("3 + 4;", None),
        ("3 + 4; # quiet", None),
        ("None", None),
        ("import asyncio\nawait asyncio.sleep(0)\n7", "7"),
        ("async def f():\n    return 5\nawait f()", "5"),
        ('"""a\n  b"""', "'a\\n  b'"),
        ("naïve = 'ö🚀'\nnaïve", "'ö🚀'"),
        ("   x = 1\n   x", "1"),
        ("\n\n5", "5"),
        ("x = 1\r\nx + 1\r\n", "2"),
        ("a = %sx echo 3\na[0]", "'3'"),
        ("!echo hi", None),
        ("print('out')\n%env HOME\n", None),
        ("def f(x):\n    return x\n\nf(f)(2)", "2"),
        ("[__name__, 'get_ipython' in globals()]", "['__main__', True]"),
        ("from __future__ import annotations\ndef f(a: Undefined): ...\nf.__annotations__", "{'a': 'Undefined'}"),
    ],
)
def test_promises_1_and_2_the_body_runs_as_without_the_magic(notebook, body, out):
    tracked = same(notebook, body)
    assert tracked.status == "ok"
    if not body.startswith("print"):
        assert tracked.out == out
    assert is_reported(tracked)
    notebook.run("get_ipython().compile.reset_compiler_flags()")


def test_promise_2_the_value_is_out_and_underscore(notebook):
    reply = notebook.run("%%memtrack\n['the value']")
    assert (reply.out, notebook.value("(_, Out[max(Out)])")) == ("['the value']", (["the value"], ["the value"]))


@pytest.mark.parametrize(
    "body",
    [
        "1 / 0",
        "x = 1\n\n\ndef f():\n    return 1 / 0\n\nf()",
        "import asyncio\nawait asyncio.sleep(0)\n1 / 0",
        "from __future__ import annotations\n\n1 / 0",
        "from __future__ import (annotations,\n  division)  # why\n1 / 0",
        '"""doc"""\nfrom __future__ import annotations; 1 / 0',
        'text = """a\nb\nc"""\n1 / 0',
        "raise ValueError('mine')",
        "assert False, 'no'",
        "%run absent.py",
    ],
)
def test_promises_1_and_3_errors_come_from_their_own_line_and_go_out(notebook, body):
    tracked = same(notebook, body)
    assert tracked.status == "error"
    assert is_reported(tracked)
    assert f"The cell raised {tracked.error}" in tracked.report
    assert "memlab/" not in tracked.traceback  # no frame of ours


def test_promise_3_an_operator_that_fails_is_found_on_its_own_line(notebook):
    body = "x = 1\ntorch.ones(2) @ torch.ones(3)"
    plain, tracked = notebook.run(body), notebook.run(f"%%memtrack\n{body}")
    assert (tracked.error, tracked.status) == (plain.error, "error")
    assert [line - 1 for line in tracked.lines][
        : len(plain.lines)
    ] == plain.lines  # the tracker's own frame comes below
    assert tracked.traceback.splitlines()[-1] == plain.traceback.splitlines()[-1]


@pytest.mark.parametrize("body", ["x = = 3", "def f(:\n", "'open", "if 1:\n"])
def test_a_syntax_error_is_told_as_always_and_nothing_is_measured(notebook, body):
    runs = notebook.value(f"len({RUNS})")
    plain, tracked = notebook.run(body), notebook.run(f"%%memtrack\n{body}")
    assert (tracked.status, tracked.error, tracked.shown) == ("error", plain.error, [])
    assert notebook.value(f"len({RUNS})") == runs


@pytest.mark.parametrize(
    "cell",
    ["%%memtrack", "%%memtrack\n", "%%memtrack\n\n\n", "%%memtrack\n# nothing\n", "\n\n  \n%%memtrack\n2", "   %%memtrack\n   2"],
)  # fmt: skip
def test_empty_bodies_and_blanks_above_the_magic(notebook, cell):
    reply = notebook.run(cell)
    assert (reply.status, reply.out) == ("ok", "2" if "2" in cell else None)
    assert is_reported(reply)


def test_lines_are_counted_as_the_editor_counts_them_and_other_magics_are_not_ours(notebook):
    assert notebook.run("%%memtrack\n\n\nx = 1\nundefined").lines == [5]
    assert "Cell magic `%%memtrackx` not found" in notebook.run("%%memtrackx\n1").stderr


def test_the_history_has_the_cell_as_it_was_typed(notebook):
    notebook.run("%%memtrack --name typed\n2 + 2")
    raw = "list(get_ipython().history_manager.get_tail(1, raw=True, include_latest=False))[-1][2]"
    assert notebook.value(raw) == "%%memtrack --name typed\n2 + 2"


# --- nested magics and cells ---


def test_over_and_under_other_cell_magics(notebook):
    for head in ("%%memtrack\n%%time", "%%time\n%%memtrack --name under"):
        reply = notebook.run(f"{head}\nx = 5\nx * 2")
        assert (reply.out, "Wall time" in reply.stdout, is_reported(reply)) == ("10", True, True)
    assert notebook.ok("%%memtrack\n\n%%time\n7").out == "7"


def test_inside_capture_the_report_is_captured_too(notebook):
    reply = notebook.run("%%capture cap\n%%memtrack --name captured\nprint(5)")
    assert (reply.status, reply.shown) == ("ok", [])
    assert notebook.value(f"(cap.stdout, len(cap.outputs) >= 2, 'captured' in {RUNS})") == ("5\n", True, True)
    notebook.run("del cap")
    above = notebook.run("%%memtrack --name above\n%%capture cap\nprint(5)")
    assert (above.stdout, is_reported(above)) == ("", True)
    notebook.run("del cap")


def test_promise_5_a_tracked_cell_in_a_tracked_cell_ends_first(notebook):
    body = """
import torch, memlab
a = torch.ones(1000)
get_ipython().run_cell("%%memtrack --name inner\\ntorch.ones(2000); 1")
assert list(memlab.runs)[-1] == "inner" and not memlab.runs.get("outer")
get_ipython().run_cell("1 + 1")
get_ipython().run_cell("")
get_ipython().run_cell("1 / 0")
b = torch.ones(50_000)
9"""
    reply = notebook.run(f"%%memtrack --name outer{body}")
    assert (reply.status, reply.out) == ("ok", "9")
    assert notebook.value("list(memlab.runs)[-2:]") == ["inner", "outer"]
    rises = "[r.peak_bytes - r.devices[0].levels[0].start_bytes for r in list(memlab.runs.values())[-2:]]"
    inner, outer = notebook.value(rises)
    assert (inner, outer) == (8000, 204_000)
    notebook.run("del a, b")


def test_a_cell_magic_called_after_an_inner_cell_ends_with_the_outer_cell(notebook):
    body = 'get_ipython().run_cell("1")\nget_ipython().run_cell_magic("time", "", "%%memtrack --name late\\n1")\n'
    assert is_reported(notebook.ok(body))
    assert notebook.value(f"'late' in {RUNS}") is True


def test_a_silent_cell_is_refused_because_nobody_tells_its_end(notebook):
    reply = notebook.run("%%memtrack --name hush\nhush = 1", silent=True)
    assert reply.status == "error"
    assert notebook.value("'hush' in globals()") is False


# --- 5: interrupts, exits, and again ---

LOOP = "import time\nprint('ready')\nfor _ in range(300): time.sleep(0.1)"
ASYNC_LOOP = "import asyncio\nprint('ready')\nfor _ in range(300): await asyncio.sleep(0.1)"


@pytest.mark.parametrize(("body", "error"), [(LOOP, "KeyboardInterrupt"), (ASYNC_LOOP, "CancelledError")])
def test_promise_5_an_interrupt_ends_the_run_with_its_report_and_the_next_is_as_ever(notebook, body, error):
    for _ in range(2):
        reply = notebook.run(f"%%memtrack --name stopped\n{body}", interrupt_at="ready")
        assert (reply.status, reply.error) == ("error", error)
        assert is_reported(reply)
    assert same(notebook, "1 + 1").out == "2"


def test_sys_exit_ends_the_cell_and_not_the_kernel(notebook):
    reply = notebook.run("%%memtrack\nimport sys\nsys.exit(3)")
    assert (reply.status, reply.error) == ("error", "SystemExit")
    assert is_reported(reply)


# --- 3: budget ---


def test_a_budget_fails_the_cell_after_it_ran_and_says_by_how_much(notebook):
    cell = "%%memtrack --budget 1KiB --name over\nimport torch\ndone = torch.ones(1000).sum()"
    reply = notebook.run(cell)
    assert (reply.status, reply.error) == ("error", "BudgetExceeded")
    assert "run 'over': cpu peaked at" in reply.traceback
    assert "above its budget of 1.00 KiB." in reply.traceback
    assert is_reported(reply)
    assert notebook.value("done.item()") == 1000.0
    assert notebook.run("%%memtrack --budget 100GiB\n1").status == "ok"
    assert notebook.run(cell + "\n1 / 0").error == "ZeroDivisionError"
    notebook.run("del done")


# --- 9: nothing is left ---


def test_promise_9_no_names_are_left(notebook):
    for cell in ("%%memtrack\n1", "%memtrack 1 + 1", "%%memtrack\n1 / 0"):
        notebook.run(cell)
    assert notebook.value("sorted(n for n in set(globals()) - _names if not n.startswith('_'))") == []
    hidden = "sorted(n for n in set(globals()) - _names if 'mem' in n.lower())"
    assert notebook.value(hidden) == []


def test_promise_7_no_widget_stays_in_the_cell(notebook):
    for name in ("one", "two"):
        reply = notebook.run(f"%%memtrack --name {name}\n1")
        assert not any("widget" in kind for kinds in reply.kinds for kind in kinds)
    assert notebook.value("list(__import__('comm').get_comm_manager().comms)") == []
    assert notebook.value(f"list({RUNS})[-2:]") == ["one", "two"]


def test_a_traceback_shows_the_cell_as_it_was_written(notebook):
    reply = notebook.run("%%memtrack --name shown\nx = 1\n1 / 0")
    assert reply.lines[-1] == 3
    assert "# %%memtrack --name shown" in reply.traceback
    assert "_memlab_arm" not in reply.traceback


def test_a_peak_in_backward_has_the_line_that_called_it(notebook: Kernel):
    cell = "%%memtrack\nx = torch.ones(1 << 20, requires_grad=True)\ny = x * x\n\ny.sum().backward()"
    report = notebook.ok(cell).report
    assert re.match(r"Peak \S+ MiB allocated in backward, cell \[\d+\] line 5\n", report)
