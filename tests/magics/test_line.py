"""`%memtrack STATEMENT`, the ordinary cell magic, refused options and (un)loading, in a real kernel."""

from __future__ import annotations

import pytest

SETUP = ("import os, torch, memlab", "%load_ext memlab")


@pytest.mark.parametrize(
    ("line", "out"),
    [
        ("1 + 1", "2"),
        ("x = max(3, 4)", None),
        ("x = 1; x + 1", "2"),
        ("f'{6 * 7} $HOME {{}}'", "'42 $HOME {}'"),
        ("'{x} $HOME'", "'{x} $HOME'"),
        ("'a'; ", None),
        ("(lambda: torch.ones(2).sum().item())()", "2.0"),
        ("--name 'two words' 5", "5"),
        ("-- -3", "-3"),
        ("None", None),
    ],
)
def test_a_statement_runs_as_it_stands_and_its_value_is_the_cells(notebook, line, out):
    reply = notebook.run(f"%memtrack {line}")
    assert (reply.status, reply.out) == ("ok", out), reply.traceback
    assert reply.report


def test_names_of_a_statement_are_the_notebooks(notebook):
    notebook.run("%memtrack made = 5")
    notebook.run("%memtrack (walrus := 7)")
    notebook.run("%memtrack reader = lambda: later")
    notebook.run("%memtrack --name first z = torch.ones(10)")
    assert notebook.value("(list(memlab.runs)[-1], z.numel())") == ("first", 10)
    assert notebook.value("(made, walrus, [later := 3, reader()][1])") == (5, 7, 3)
    assert notebook.run("got = %memtrack made * 2\ngot").out == "10"
    magic = "get_ipython().run_line_magic('memtrack', 'sum(inner for _ in range(3))')"
    assert notebook.run(f"def f(inner):\n    return {magic}\nf(4)").out == "12"


def test_an_error_goes_out_with_its_line_and_after_the_report(notebook):
    reply = notebook.run("%memtrack x = 1; undefined_name")
    assert (reply.status, reply.error) == ("error", "NameError")
    assert "The cell raised NameError" in reply.report
    assert "undefined_name" in reply.traceback
    assert "<memtrack>" not in reply.traceback


@pytest.mark.parametrize("line", ["x = = 3", "f(", "'open"])
def test_a_syntax_error_stops_before_anything_is_measured(notebook, line):
    reply = notebook.run(f"%memtrack {line}")
    assert (reply.status, reply.error, reply.shown) == ("error", "SyntaxError", [])


def test_a_budget_fails_the_statement_and_without_one_there_is_a_hint(notebook):
    reply = notebook.run("%memtrack --budget 1KiB torch.ones(5000).sum()")
    assert (reply.status, reply.error, reply.out) == ("error", "BudgetExceeded", None)
    assert "needs a statement" in notebook.run("%memtrack").stderr


@pytest.mark.parametrize(
    "options", ["--bogus", "--rate nan", "--name 'open", "--device gpu7", "--predict x", "--save no/such/x"]
)
def test_refused_options_are_one_line_and_nothing_runs(notebook, options):
    for cell in (f"%%memtrack {options}\nran = 1", f"%memtrack {options} ran = 1"):
        reply = notebook.run(cell)
        assert reply.status == "error"
        assert reply.stderr.startswith(("UsageError: %memtrack: ", "UsageError: %memtrack --predict: "))
        assert len(reply.stderr.strip().splitlines()) == 1
        assert reply.shown == []
    assert notebook.value("'ran' in globals()") is False


def test_a_file_that_cannot_be_begun_is_a_usage_error_too(notebook):
    notebook.run("os.mkdir('taken.partial')")
    reply = notebook.run("%%memtrack --save taken\nran = 1")
    assert "UsageError: %memtrack: cannot write" in reply.stderr
    assert notebook.value("(os.rmdir('taken.partial'), 'ran' in globals())") == (None, False)


def test_save_writes_what_load_reads(notebook):
    notebook.run("%%memtrack --name saved --save 'a run.memlab'\ntorch.ones(100)")
    assert notebook.value("memlab.load('a run.memlab').name") == "saved"
    assert notebook.value("[name for name in os.listdir() if 'run' in name]") == ["a run.memlab"]


def test_quiet_and_no_live(notebook):
    quiet = notebook.run("%%memtrack --quiet --name quiet\n1")
    assert (quiet.out, quiet.shown) == ("1", [])
    assert notebook.value("list(memlab.runs)[-1]") == "quiet"
    assert len(notebook.run("%%memtrack --no-live\n1").shown) == 2


def test_where_no_transformer_runs_the_ordinary_magic_serves(notebook):
    reply = notebook.run("get_ipython().run_cell_magic('memtrack', '--name plain', 'a = 3\\n\\na * 2')")
    assert (reply.out, "memlab · plain" in reply.report) == ("6", True)
    failed = notebook.run("get_ipython().run_cell_magic('memtrack', '', 'a = 3\\n\\n1 / 0')")
    assert (failed.error, 3 in failed.lines) == ("ZeroDivisionError", True)


def test_help_is_that_of_the_magic(notebook):
    notebook.ok("%%memtrack?")
    notebook.ok("%memtrack?")


def test_a_front_end_is_told_that_a_cell_goes_on(notebook):
    for magic in ("%%memtrack", "%%time"):
        texts = [magic, f"{magic}\nx = 1", f"{magic}\nx = 1\n\n"]
        asked = f"[get_ipython().check_complete(text)[0] for text in {texts}]"
        assert notebook.value(asked) == ["incomplete", "incomplete", "complete"]


HOOKS = """
def hooks():
    shell = get_ipython()
    manager = shell.input_transformer_manager
    return [list(map(str, shell.input_transformers_cleanup)), list(map(str, manager.line_transforms)),
            {k: list(map(str, v)) for k, v in shell.events.callbacks.items()},
            sorted(shell.magics_manager.magics["line"]), sorted(shell.magics_manager.magics["cell"]),
            sorted(n for n in vars(shell) if "memlab" in n)]
"""


def test_unloading_leaves_the_shell_as_it_was(notebook):
    notebook.run("%unload_ext memlab")
    notebook.run(f"{HOOKS}\nbefore = hooks()")
    for cell in ("%load_ext memlab", "%load_ext memlab", "%%memtrack\n1", "%reload_ext memlab", "%%memtrack\n1"):
        notebook.ok(cell)
    assert notebook.value("len([t for t in get_ipython().input_transformers_cleanup if 'memlab' in str(t)])") == 1
    notebook.run("%unload_ext memlab")
    assert notebook.value("hooks() == before") is True
    assert "`%%memtrack` not found" in notebook.run("%%memtrack\n1").stderr
    notebook.ok("%load_ext memlab")


def test_unloading_inside_a_tracked_cell_ends_its_run(notebook):
    reply = notebook.run("%%memtrack --name cut\n%unload_ext memlab\n8")
    assert (reply.status, reply.out, "memlab · cut" in reply.report) == ("ok", "8", True)
    assert notebook.value("[memlab.runs['cut'].is_running, torch._C._len_torch_dispatch_stack()]") == [False, 0]
    notebook.ok("%load_ext memlab")


def test_a_magic_of_the_users_own_comes_back(notebook):
    notebook.run("%unload_ext memlab")
    notebook.run(
        "from IPython.core.magic import register_line_magic\n@register_line_magic\ndef memtrack(line): return 'mine'"
    )
    notebook.run("%load_ext memlab")
    assert notebook.run("%memtrack 5").out == "5"
    notebook.run("%unload_ext memlab")
    assert notebook.run("%memtrack 5").out == "'mine'"
    notebook.run("del get_ipython().magics_manager.magics['line']['memtrack']; del memtrack")
    notebook.run("%load_ext memlab")


def test_an_engine_that_fails_at_the_end_fails_no_less_than_it_is_told(notebook):
    notebook.run("from memlab.probes.measurement import Measurement\nkept = Measurement._complete")
    notebook.run("def broken(*_): raise OSError('it broke')\nMeasurement._complete = broken")
    reply = notebook.run("%%memtrack --name lost\n1 + 1")
    assert (reply.out, reply.status, reply.error) == ("2", "error", "OSError")
    assert "could not report on 'lost': OSError: it broke" in reply.shown[0]["text/plain"]
    users = notebook.run("%%memtrack --name lost\n1 / 0")
    assert users.error == "ZeroDivisionError"
    notebook.run("Measurement._complete = kept")
    assert notebook.value("torch._C._len_torch_dispatch_stack()") == 0
    assert notebook.run("%%memtrack\n1").report


def test_a_broken_comm_does_not_fail_the_cell(notebook):
    notebook.run(
        "import comm\nkept = comm.create_comm\ndef broken(*a, **k): raise RuntimeError('no comm')\ncomm.create_comm = broken"
    )
    reply = notebook.run("%%memtrack --name dark\n4 + 4")
    assert (reply.status, reply.out) == ("ok", "8"), reply.traceback
    assert "memlab · dark" in reply.stdout + reply.report
    notebook.run("comm.create_comm = kept")


MAGICS = ["memadvise", "memcompare", "memfit", "memlab", "memledger", "memoom", "memtrack", "memwho", "%memtrack"]


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize("magic", MAGICS)
def test_a_magic_that_is_asked_for_help_prints_it_and_does_nothing_else(notebook, magic, asked):
    reply = notebook.run(f"%{magic} {asked}\n" + "ran = True\n" * magic.startswith("%"))
    assert (reply.status, reply.out, reply.shown) == ("ok", None, []), reply.traceback
    assert f"%{magic}" in reply.stdout
    assert ("--budget SIZE" in reply.stdout) is (magic.lstrip("%") == "memtrack")
    assert notebook.value("'ran' in globals()") is False


def test_the_result_of_a_magic_is_shown_once_on_whichever_line_it_stands(notebook):
    notebook.run("kept = torch.ones(1000)\ndef look():\n    %memwho kept")
    for cell in (
        "%memwho kept\nNone",
        "look()",
        "for _ in range(1):\n    %memwho kept",
        "%memwho kept",
        "%memledger\nNone",
    ):
        reply = notebook.run(cell)
        assert len(reply.shown) + (reply.out is not None) == 1, cell
    assert notebook.run("found = %memwho kept\ndel found").shown == []


WRONG = "torch.ones(3) @ torch.ones(4)"
HOOKED = f"x = torch.ones(3, requires_grad=True)\nx.register_hook(lambda grad: {WRONG})\nx.sum().backward()"
CHAINED = f"try:\n    {WRONG}\nexcept RuntimeError as error:\n    raise ValueError from error"


@pytest.mark.parametrize("cell", [WRONG, HOOKED, CHAINED], ids=["operator", "backward", "chained"])
@pytest.mark.parametrize("magic", ["%%memtrack\n", "%%memtrack --shapes --lines\n", "%memtrack "])
def test_a_traceback_has_no_frame_of_what_measures(notebook, magic, cell):
    reply = notebook.run(magic + (cell if magic.startswith("%%") else WRONG))
    assert reply.status == "error" and WRONG in reply.traceback
    assert "/memlab/" not in reply.traceback
