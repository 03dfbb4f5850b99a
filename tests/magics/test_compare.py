"""`%memcompare`, and what a tracked cell leaves as its result, in a real kernel."""

from __future__ import annotations

import pytest
from kernel import Kernel

from memlab.errors import MemlabError
from memlab.magics import line_magics

FIGURE = {"application/vnd.plotly.v1+json", "image/svg+xml", "text/plain"}
TABLE = {"text/html", "text/plain"}
SETUP = (
    "import torch, memlab, gc, weakref\ndef noted(name): return memlab.runs[name].trace.notes.get('result')",
    "%load_ext memlab",
    "%%memtrack --name one --quiet\nx = torch.ones(1000)\nx.sum()",
    "%%memtrack --name 'two words' --quiet\ny = torch.ones(3000)\nx.sum()",
)


def error(notebook: Kernel, code: str) -> str:
    reply = notebook.run(code)
    assert (reply.status, reply.error) == ("error", "UsageError")
    return reply.said


@pytest.mark.parametrize("line", ["one 'two words'", "one two words", "one last", "one", ""])
def test_two_runs_are_compared_figure_and_table(notebook, line):
    notebook.run("%%memtrack --name 'two words' --quiet\ny = torch.ones(3000)\nx.sum()")
    reply = notebook.ok(f"%memcompare {line}")
    assert reply.kinds == [FIGURE, TABLE]
    assert reply.report.startswith("two words: peak ")
    assert "results equal bit for bit" in reply.report


def test_a_file_is_compared_as_well(notebook, tmp_path):
    path = tmp_path / "a run.memlab"
    notebook.run(f"memlab.runs['one'].save({str(path)!r})")
    reply = notebook.run(f"%memcompare 'two words' '{path}'")
    assert reply.report.startswith("one: peak "), reply.traceback


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("one nobody", "there is no run 'nobody'"), ("one two three four", "does not name two runs"),
        ("'one", "No closing quotation"), ("nobody", "there is no run 'nobody'"),
    ],
)  # fmt: skip
def test_what_names_no_two_runs_is_refused_in_one_line(notebook, line, words):
    said = error(notebook, f"%memcompare {line}")
    assert "UsageError: %memcompare: " in said
    assert words in said
    assert len([text for text in said.splitlines() if text.strip()]) == 1


@pytest.mark.parametrize(("there", "words"), [({}, "there is none"), ({"one": None}, "there is one")])
def test_two_runs_are_needed(monkeypatch, there, words):
    monkeypatch.setattr(line_magics, "runs", there)
    with pytest.raises(MemlabError, match=f"two runs are needed and {words}: %memcompare A B"):
        line_magics.two_runs("")


def test_its_value_is_a_comparison(notebook):
    reply = notebook.run("found = %memcompare one 'two words'\nfound.saved_bytes")
    assert reply.out.startswith("-")
    assert reply.shown == []


# --- the last value of a tracked cell ---


def value(notebook: Kernel, body: str, options: str = "") -> str:
    """What is noted of a cell with this body."""
    reply = notebook.run(f"%%memtrack --name cell --quiet {options}\n{body}")
    assert reply.status == "ok" or "1 / 0" in body, reply.traceback
    return notebook.value("None if noted('cell') is None else noted('cell')['value']['kind']")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("x.sum()", "numbers"), ("{'loss': 0.5}", "dict"), ("'text'", "text"), ("x.sum();", None), ("y = 5", None),
        ("None", None), ("object()", None), ("torch.nn.Linear(1, 1)", None), ("torch.ones(2, device='meta')", None),
        ("x.sum()\n1 / 0", None), ("import asyncio\nawait asyncio.sleep(0)\n7", "numbers"),
        ("[1, {2}]", None),
    ],
)  # fmt: skip
def test_the_last_value_of_a_cell_is_its_result_where_it_can_be(notebook, body, kind):
    assert value(notebook, body) == kind


def test_a_result_that_the_cell_notes_itself_counts(notebook):
    notebook.run("%%memtrack --name own --quiet\nwith memlab.track('inner') as run:\n    run.result('inner')\n'cell'")
    assert notebook.value("[noted(name)['value']['text'] for name in ('own', 'inner')]") == ["cell", "inner"]


def test_a_run_never_refers_to_the_value(notebook):
    """IPython itself does, with Out and the underscores: so tracked and not, the same objects hold it."""
    holders = []
    for head in ("", "%%memtrack --name held --quiet\n"):
        notebook.run(f"{head}z = torch.ones(77)\nz")
        notebook.run("'something else'")
        holders.append(notebook.value("sorted(type(one).__name__ for one in gc.get_referrers(z))"))
    assert holders[0] == holders[1]
    assert notebook.value("noted('held') is not None") is True


def test_the_result_is_in_the_file_that_the_cell_saves(notebook, tmp_path):
    path = tmp_path / "saved.memlab"
    value(notebook, "x.sum() + 1", f"--save {path}")
    assert notebook.value(f"'result' in memlab.load({str(path)!r}).trace.notes") is True


def test_a_value_that_is_shown_in_no_order_of_bytes_does_not_fail_the_cell(notebook):
    assert (
        value(notebook, "class Odd(dict):\n    def items(self):\n        raise RuntimeError('asked')\nOdd(a=1)")
        == "dict"
    )
    body = "class Broken(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, *args, **kwargs):\n"
    body += "        raise RuntimeError('no')\n    def __repr__(self):\n        return 'broken'\ntorch.ones(2).as_subclass(Broken)"
    assert value(notebook, body) == "numbers"


def test_a_cell_within_a_cell_has_its_own_result(notebook):
    """IPython forgets the value of a cell in which another one ran: the outer run has none, and never that of the inner."""
    inner = "%%memtrack --name inner --quiet\n'of the inner one'"
    notebook.run(f"%%memtrack --name outer --quiet\nget_ipython().run_cell({inner!r})\n'of the outer one'")
    assert notebook.value("noted('inner')['value']['text']") == "of the inner one"
    assert notebook.value("noted('outer')") is None


def test_unloading_takes_the_magic_out(notebook):
    notebook.run("%unload_ext memlab")
    assert "not found" in error(notebook, "%memcompare one last")
    notebook.run("%load_ext memlab")
    assert notebook.run("%memcompare one 'two words'").kinds == [FIGURE, TABLE]
