"""Assumed values of a predicted notebook cell, in a real kernel."""

from __future__ import annotations

import re

from kernel import Kernel

SETUP = ("%load_ext memlab", "import torch\ndef chosen(x):\n    return [1, 2][int(x.argmax()) + 4]")
SELECTS = "x = torch.randn(100, 1024, device='cuda')\ny = x[torch.randn(100, device='cuda') > 0]\n"


def test_a_cells_values_have_keys_that_stay_the_same_when_it_runs_again(notebook: Kernel):
    assert "cell:3 mask: assumed 100, at most 100" in notebook.ok(f"%%memtrack --predict T4\n{SELECTS}").report
    again = notebook.ok(f"%%memtrack --predict T4 --assume 'cell:3 mask=7'\n{SELECTS}")
    assert "cell:3 mask: set to 7, at most 100" in again.report


def test_what_the_report_says_how_to_set_is_set_as_it_says(notebook: Kernel):
    runs_on = (
        "n = int((torch.randn(9, device='cuda') > 0).sum())\ny = [torch.ones(9, device='cuda') for _ in range(n)]\n"
    )
    for cell, key in ((SELECTS, "cell:3 mask"), (SELECTS + runs_on, "cell:4 item")):  # the one that decides most
        report = notebook.ok(f"%%memtrack --predict T4\n{cell}").report
        option, _ = re.findall("`(.*?)`", next(line for line in report.splitlines() if "to set an" in line))
        option = re.sub("=[0-9]+", "=7", option)
        assert f"{key}: set to 7" in notebook.ok(f"%%memtrack --predict T4 {option}\n{cell}").report
    assert "to set an" not in notebook.ok("%%memtrack --predict T4\ntorch.ones(9, device='cuda')\n").report


def test_what_cannot_be_set_is_a_usage_error(notebook: Kernel):
    for option, text in (("cell:9 mask=1", "the keys are cell:3 mask"), ("cell:3 mask=101", "is 0 to 100, got 101")):
        reply = notebook.run(f"%%memtrack --predict T4 --assume '{option}'\n{SELECTS}")
        assert reply.error == "UsageError" and text in reply.said
    for line, text in (
        ("--predict T4 --assume x", "--assume takes KEY=VALUE"),
        ("--assume 'x=1'", "goes with --predict"),
    ):
        reply = notebook.run(f"%%memtrack {line}\nprint('ran')")
        assert reply.error == "UsageError" and text in reply.said and not reply.stdout


def test_an_error_after_an_assumed_value_names_it(notebook: Kernel):
    reply = notebook.run(
        "%%memtrack --predict T4\nplaces = torch.randn(9, device='cuda')\n[1, 2][int(places.argmax()) + 4]\n"
    )
    said = "(after values that only a GPU computes were assumed: cell:3 item=1)"
    assert (reply.status, reply.error, reply.lines) == ("error", "IndexError", [3])
    assert said in reply.traceback and f"The cell raised IndexError: list index out of range {said}" in reply.report
    assert "memlab/" not in reply.traceback
    reply = notebook.run("%%memtrack --predict T4\nchosen(torch.randn(9, device='cuda'))\n")
    assert reply.error == "IndexError" and "cell [2]:3 item=1)" in reply.traceback
    reply = notebook.run("%%memtrack --predict T4\nbool(torch.randn(1, device='cuda') > 0)\n{}['name']\n")
    assert reply.error == "KeyError" and "cell:2 item=True" in reply.traceback


def test_a_cell_that_waits_for_a_value_says_so_in_its_first_line(notebook: Kernel):
    reply = notebook.ok(
        "%%memtrack --predict T4\nloss = 5\nwhile loss > 2:\n    loss = torch.randn((), device='cuda').item()\n"
    )
    assert "if it runs as long as was assumed (cell:4 item=1.0)" in reply.report.splitlines()[0]
