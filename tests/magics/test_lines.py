"""`%%memtrack --lines` in a real kernel: which lines are followed, what they are called, and that all is as it was."""

from __future__ import annotations

import pytest
from kernel import Kernel

pytestmark = pytest.mark.usefixtures("leaves_the_kernel_as_it_was")
SETUP = (
    """
import sys, gc, torch, memlab
def listed():
    report = memlab.last_run().lines()
    return {row.text: (row.executions, row.held_bytes, row.total_bytes) for row in report}
""",
    "%load_ext memlab",
    "%%memtrack\n1",
)


def listed(notebook: Kernel, cell: str, status: str = "ok") -> dict[str, tuple[int, int, int]]:
    reply = notebook.run(cell)
    assert reply.status == status, reply.traceback
    return notebook.value("listed()")


def test_the_lines_of_the_cell_by_number(notebook):
    body = "x = torch.ones(1000)\n\nfor i in range(3):\n    y = torch.ones(500)\ndel x\n"
    executed = {"cell:2": (1, 4000, 4000), "cell:4": (4, 0, 0), "cell:5": (3, 2000, 2000), "cell:6": (1, -4000, -4000)}
    assert listed(notebook, f"%%memtrack --lines\n{body}") == executed
    first = notebook.run("print(memlab.last_run().lines())").stdout.splitlines()[3]
    assert first.split()[-2:] == ["%%memtrack", "--lines"]
    notebook.run("del y")


def test_functions_of_other_cells_are_followed_and_named_by_their_cell(notebook):
    notebook.run("def make():\n    return torch.ones(1000)\n")
    number = notebook.value("min(n for n, text in enumerate(In) if 'def make' in text)")
    found = listed(notebook, "%%memtrack --lines\nz = [make() for _ in range(2)]")
    assert found == {"cell:2": (1, 0, 8000), f"In[{number}]:2": (2, 8000, 8000)}
    notebook.run("del z")


def test_functions_of_libraries_are_followed_when_they_are_named(notebook, tmp_path):
    (tmp_path / "mine.py").write_text("import torch\n\n\ndef made():\n    return torch.ones(1000)\n")
    notebook.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mine")
    assert listed(notebook, "%%memtrack --lines\nz = mine.made()") == {"cell:2": (1, 4000, 4000)}
    found = listed(notebook, "%%memtrack -f mine.made\nz = None; z = mine.made()")
    assert (found["mine.py:5"], found["cell:2"][2]) == ((1, 4000, 4000), 0)
    notebook.run("del z")


@pytest.mark.parametrize(
    ("options", "before", "why"),
    [
        ("-f nowhere", "1", "cannot watch 'nowhere': there is no such name here"),
        ("-f torch.nn", "1", "cannot watch 'torch.nn': it is a module"),
        ("--lines -f torch.relu", "1", "it is not written in Python"),
        *(
            ("-f made", line, "cannot watch 'made': it gets its value only in this cell. Make it in a cell before")
            for line in ("from textwrap import dedent as made", "made = print", "for made in (1, 2): pass")
        ),
    ],
)
def test_wrong_functions_are_refused_before_anything_runs(notebook, options, before, why):
    reply = notebook.run(f"%%memtrack {options}\n{before}\nprint('ran')")
    assert (reply.error, reply.stdout, reply.shown) == ("UsageError", "", [])
    assert why in reply.said


def test_what_cells_can_do_is_followed(notebook):
    for body, line in (
        ("from __future__ import annotations\nk = torch.ones(1000)", 3),
        ("import asyncio\nawait asyncio.sleep(0)\nk = torch.ones(1000)", 4),
        ("async def f():\n    await asyncio.sleep(0)\n    return torch.ones(1000)\nk = await f()", 4),
        ("%time k = torch.ones(1000)", 2),
        ("class Net(torch.nn.Module):\n    def forward(self, x): return x + 1\nk = Net()(torch.ones(1000))", 3),
        ("exec('k = torch.ones(1000)')", 2),
        ("k = torch.ones(1000); k", 2),
    ):
        notebook.run("k = None; Out.clear(); _ = __ = ___ = None")
        found = listed(notebook, f"%%memtrack --lines\n{body}")
        total = sum(held for _, held, _ in found.values())
        assert total == 4000, (body, found)
        assert found[f"cell:{line}"][0] >= 1, (body, found)
    notebook.run("k = None; Out.clear(); _ = __ = ___ = None; get_ipython().compile.reset_compiler_flags()")


def test_cells_that_fail_or_are_interrupted_have_their_lines(notebook):
    found = listed(notebook, "%%memtrack --lines\nk = torch.ones(1000)\n1 / 0\nk = 3", status="error")
    assert found == {"cell:2": (1, 4000, 4000), "cell:3": (1, 0, 0)}
    loop = "%%memtrack --lines\nk = torch.ones(2000)\nprint('go', flush=True)\nwhile True:\n    pass"
    reply = notebook.run(loop, interrupt_at="go")
    assert (reply.status, reply.error) == ("error", "KeyboardInterrupt")
    assert notebook.value("listed()")["cell:2"] == (1, 4000, 4000)
    notebook.run("import sys; sys.last_traceback = sys.last_value = sys.last_exc = k = None")


def test_a_breakpoint_in_the_cell_works(notebook):
    notebook.run(
        "import pdb, io\n"
        "def stop_here():\n"
        "    said = io.StringIO()\n"
        "    pdb.Pdb(stdin=io.StringIO('p 6 * 7\\nc\\n'), stdout=said, readrc=False).set_trace(sys._getframe(1))\n"
        "    return said\n"
    )
    assert notebook.ok("%%memtrack --lines\nsaid = stop_here()\nq = 1\nprint('done')").stdout == "done\n"
    assert "42" in notebook.value("said.getvalue()")
    notebook.run("del said")


def test_the_line_magic_and_the_ordinary_cell_magic(notebook):
    found = listed(notebook, "%memtrack --lines k = torch.ones(1000)")
    assert found == {"statement:1": (1, 4000, 4000)}
    run = "get_ipython().run_cell_magic('memtrack', '--lines', 'k = None\\nk = torch.ones(500)\\n')"
    found = listed(notebook, run)
    assert found == {"statement:1": (1, -4000, -4000), "statement:2": (1, 2000, 2000)}
    notebook.run("k = None")


def test_a_function_that_the_same_cell_defines_can_be_named(notebook):
    cell = "%%memtrack -f grow -f Shop.sell\ndef grow():\n    return torch.ones(1000)\n"
    cell += "class Shop:\n    def sell(self):\n        return torch.ones(500)\nx = grow()\ny = Shop().sell()\n"
    for _ in range(2):  # the second time they are there, from the cell before, and defined again
        found = listed(notebook, cell)
        assert (found["cell:3"][1], found["cell:6"][1]) == (4000, 2000)
    notebook.run("del x, y, grow, Shop")
    cell = "get_ipython().run_cell_magic('memtrack', '-f grow', 'def grow():\\n    return torch.ones(1000)\\nx = grow()\\n')"
    found = listed(notebook, cell)
    assert {row: size for row, (_, size, _) in found.items() if size} == {"statement:2": 4000}
    reply = notebook.run("get_ipython().run_cell_magic('memtrack', '-f made', 'made = print')")
    assert "it gets its value only in this cell" in reply.said
    notebook.run("del x, grow")


def test_statements_that_share_a_line_are_one_execution(notebook):
    body = "x = torch.ones(1000); y = torch.ones(500); del x\nfor i in (1, 2):\n    i; i\n"
    found = listed(notebook, f"%%memtrack --lines\n{body}")
    assert found["cell:2"] == (1, 2000, 2000)
    assert found["cell:4"][0] == 2
    notebook.run("del y")
