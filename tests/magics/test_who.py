"""`%memwho` in a real kernel: the paths of a notebook, expressions, refusals."""

from __future__ import annotations

import sys

import pytest

SETUP = ("import torch, memlab, gc", "%load_ext memlab")


@pytest.fixture(autouse=True)
def clean(notebook):
    """No test finds the variables and outputs of another."""
    yield
    notebook.ok(
        "import gc, sys\n"
        "for name in [n for n in globals() if not n.startswith('_') and n not in ('In', 'Out', 'get_ipython', 'exit', 'quit',"
        " 'open', 'torch', 'memlab', 'gc', 'sys', 'name')]: del globals()[name]\n"
        "Out.clear(); get_ipython().last_execution_result = None\n"
        "for name in [n for n in globals() if n[0] == '_' and n[1:].isdigit()]: del globals()[name]\n"
        "for name in ('_', '__', '___'):\n"
        "    get_ipython().push({name: ''}, interactive=False); setattr(get_ipython().displayhook, name, '')\n"
        "for name in ('last_value', 'last_traceback', 'last_exc', 'last_type'): vars(sys).pop(name, None)\n"
        "get_ipython().InteractiveTB.tb = None; name = None\n"
        "gc.collect()"
    )


def paths(notebook, expression: str) -> list[str]:
    """Every path that `%memwho` finds."""
    return list(eval(notebook.ok(f"found = %memwho {expression}\nprint(repr(found.paths))\ndel found").stdout))


def test_all_that_is_alive_by_name(notebook):
    notebook.run("model = torch.nn.Linear(30, 40)\nlosses = [torch.ones(50, 50)]")
    reply = notebook.run("%memwho")
    assert "model.weight" in reply.out
    assert "losses[0]" in reply.out
    shares = [line.split()[:5] for line in reply.out.splitlines()[-2:]]
    assert shares == [["other", "9.77", "KiB", "67", "%"], ["parameter", "4.84", "KiB", "33", "%"]]


def test_outputs_and_underscores(notebook):
    number = int(notebook.run("len(In)").out)
    notebook.run("torch.ones(3)")
    found = paths(notebook, "_")
    assert found[:3] == [f"Out[{number}]", "_", f"_{number}"]
    assert all(path.startswith("get_ipython().") for path in found[3:])
    notebook.run("1")
    notebook.run("2")
    assert "___" in paths(notebook, f"Out[{number}]")


def test_the_tensor_of_a_failed_cell(notebook):
    reply = notebook.run("def f():\n    big = torch.ones(77)\n    raise ValueError('no')\nf()")
    assert reply.status == "error"
    number = int(notebook.run("len(In)").out) - 2
    reply = notebook.run("print(next(s.path for s in memlab.api.who.who().storages if s.shape == (77,)))")
    assert reply.stdout.strip() == f"traceback of cell {number} -> f() -> big"


def test_every_path_of_a_failed_cells_tensor(notebook):
    notebook.run("def f():\n    big = torch.ones(78)\n    raise ValueError('no')\nf()")
    number = int(notebook.run("len(In)").out) - 2
    found = paths(notebook, "next(t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (78,))")
    assert {path.replace("f_locals['big']", "big") for path in found} == {
        f"traceback of cell {number} -> f() -> big",
        f"sys.last_value -> traceback of cell {number} -> f() -> big",
        f"get_ipython().InteractiveTB -> traceback of cell {number} -> f() -> big",
        *([f"sys.last_exc -> traceback of cell {number} -> f() -> big"] if sys.version_info >= (3, 12) else []),
    }


def test_in_a_function_the_names_are_its_own(notebook):
    body = "return get_ipython().run_line_magic('memwho', '[inner][0]').paths"
    reply = notebook.run(f"def g(inner):\n    {body}\nprint(g(torch.ones(3)))")
    assert eval(reply.stdout) == ("g() -> inner",)


def test_a_list_and_a_model(notebook):
    notebook.run("model = torch.nn.Linear(2, 3)\nboth = [model, {'x': torch.ones(5)}]")
    reply = notebook.run("%memwho both")
    assert "what both keeps alive · 3 storages · 56 B" in reply.out
    assert "both[1]['x']" in reply.out and "model.weight" in reply.out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nothing", "'nothing' failed: NameError: name 'nothing' is not defined"),
        ("1 +", "'1 +' failed: SyntaxError: invalid syntax"),
        ("[1, 2]", "[1, 2] is a list without a tensor that has memory."),
        ("None", "None is None."),
        ("-d nowhere", "not a device: 'nowhere'. Name one such as cpu, cuda or cuda:1."),
        ("-d", "-d needs a device, for example -d cuda:0."),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(notebook, line, says):
    reply = notebook.run(f"%memwho {line}")
    assert (reply.status, reply.error) == ("error", "UsageError")
    assert f"UsageError: %memwho: {says}" in reply.said


def test_an_answer_keeps_nothing_alive(notebook):
    notebook.run("import weakref\nx = torch.ones(3)\ngone = weakref.ref(x)")
    for line in ("x", "", "[x] + undefined", "x.undefined"):
        notebook.run(f"%memwho {line}")
    assert notebook.run("del x\nprint(gone())").stdout == "None\n"


def test_one_device(notebook):
    notebook.run("x = torch.ones(3)")
    assert paths(notebook, "x") == ["x"]
    assert "x" in notebook.run("%memwho -d cpu").out
    assert notebook.run("%memwho -d cuda").out.startswith("memlab who · 0 storages · 0 B")
    assert "· x ·" in notebook.run("%memwho -d cpu x").out


def test_cuda_stays_as_it_was(notebook):
    before = notebook.value("torch.cuda.is_initialized()")
    notebook.run("%memwho")
    assert notebook.value("torch.cuda.is_initialized()") == before
