"""`%memoom` and `%memoom release` in a real kernel, with an out-of-memory error of the CPU."""

from __future__ import annotations

import re

import pytest
from kernel import Kernel

SETUP = (
    """
import sys, torch
from memlab.magics.line_magics import LineMagics
from memlab.api import oom
get_ipython().register_magics(LineMagics(get_ipython()))
get_ipython().events.register("post_run_cell", lambda result: oom.note_oom(result.error_in_exec) and None)
def step():
    held = torch.ones(1_000_000)
    return torch.empty(1 << 45) + held
""",
)


def test_before_any_there_is_one_clear_line(notebook: Kernel):
    reply = notebook.run("%memoom")
    assert "nothing in this session ended out of memory" in reply.said
    assert "Traceback" not in reply.traceback


def test_the_last_one_is_shown_as_html_and_text_until_the_next(notebook: Kernel):
    count = "get_ipython().execution_count - 1"  # IPython counts on before it runs the code
    notebook.run(f"defined = {count}\ndef again():\n    return step()")
    assert notebook.run(f"called = {count}; again()").error == "RuntimeError"
    defined, called = notebook.value("(defined, called)")
    notebook.run("1 / 0")
    reply = notebook.ok("%memoom")
    # SETUP is the first cell; the one that called is named, whatever cells its functions come from.
    assert called > defined > 1
    assert reply.out.startswith(f"memlab · cell [{called}] · cpu ran out of memory: 128.0 TiB requested, ")
    assert re.search(r"It was raised at line \d+ of cell \[1\], in step\(\)\.", reply.out)
    assert "text/html" in notebook.value("list(get_ipython().run_line_magic('memoom', '')._repr_mimebundle_())")


def test_release_gives_back_what_the_explanation_said(notebook: Kernel):
    notebook.run("%memoom release")
    notebook.run("step()")
    assert "  1.  3.81 MiB  `%memoom release`" in notebook.run("%memoom").out
    reply = notebook.run("%memoom release")
    assert reply.out.startswith("memlab · released 3.81 MiB on cpu\n\nReleased the frames of RuntimeError: [enforce")
    assert "No traceback" in notebook.run("%debug").stderr
    assert notebook.run("%memoom release --keep-outputs").out.startswith("memlab · nothing to release")
    after = notebook.run("%memoom").out  # it is still explained, from what was noted
    assert "`%memoom release` was run since, and gave back nothing; what is alive is as of before." in after
    assert after.count("%memoom release") == 1


def test_after_a_release_it_is_said_once_and_not_advised_again(notebook: Kernel):
    notebook.run("step()")
    notebook.run("%memoom release")
    after = notebook.run("%memoom").out
    assert "was run since, and gave back 3.81 MiB on cpu; what is alive" in after
    assert after.count("%memoom release") == 1
    notebook.run("step()")  # the next one is a new one
    assert "  1.  3.81 MiB  `%memoom release`" in notebook.run("%memoom").out
    notebook.run("%memoom release")
    assert notebook.value("get_ipython().run_line_magic('memoom', 'release').released.errors") == ()


@pytest.mark.parametrize("line", ["relese", "release all", "--keep-outputs", "release --keep-outputs x", "'"])
def test_anything_else_is_refused_in_one_line(notebook: Kernel, line: str):
    reply = notebook.run(f"%memoom {line}")
    assert reply.status == "error"
    assert f"%memoom: unknown {line!r}." in reply.said and "%memoom release [--keep-outputs]" in reply.said
