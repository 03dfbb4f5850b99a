"""Release in a real kernel: after `memlab.release()` nothing keeps what a failed cell held, whatever kept it before.

Every test holds a tensor of 1 MB in a function's local, fails, and looks at a weak reference to it.
"""

from __future__ import annotations

import re
import sys

import pytest
from kernel import Kernel, Reply, kernel

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="drives a kernel as POSIX does")

SETUP = """
import gc, sys, weakref, torch
from memlab.api import oom as memlab
MB = 1_000_000
def seen():
    gc.collect()
    return ref() is not None
def backward():
    global ref
    weights = [torch.ones(MB // 8, requires_grad=True) for _ in range(2)]
    ref = weakref.ref(weights[0])
    for one in weights:
        one.register_hook(refuse)
    sum(weights).sum().backward()
def refuse(grad):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
def step(depth=3):
    global ref
    big = torch.ones(MB, dtype=torch.uint8)
    if depth:
        return step(depth - 1)
    ref = weakref.ref(big)
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    with kernel(tmp_path_factory.mktemp("release"), SETUP) as found:
        yield found


@pytest.fixture(autouse=True)
def clean(notebook: Kernel):
    """No test finds what an earlier one left."""
    yield
    notebook.run("memlab.release(); kept = None")
    assert notebook.value("seen()") is False


def fails(notebook: Kernel, cell: str = "step()") -> None:
    reply = notebook.run(cell)
    assert reply.status == "error"
    assert notebook.value("seen()") is True


def freed(notebook: Kernel, cell: str = "done = memlab.release().released") -> int:
    """Release, prove that the tensor is gone, and give back how many bytes of the CPU's it said to have freed."""
    reply = notebook.run(cell)
    assert reply.status == "ok", reply.traceback
    assert notebook.value("seen()") is False
    return notebook.value("done.levels[0].freed_bytes")


def test_the_frames_of_a_failed_cell_go_and_their_bytes_are_told(notebook):
    fails(notebook)
    assert freed(notebook) == 4_000_000
    assert notebook.value("done.errors") == ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",)


def test_what_a_failed_backward_had_still_to_do_goes_too(notebook):
    fails(notebook, "backward()")
    assert freed(notebook) >= 1_000_000


def test_nothing_else_frees_them(notebook):
    """Else the test above proves nothing."""
    fails(notebook)
    notebook.run("1 + 1")
    notebook.run("torch.cuda.empty_cache(); gc.collect()")
    assert notebook.value("seen()") is True


@pytest.mark.parametrize(
    "cell",
    [
        "try:\n    step()\nexcept RuntimeError as error:\n    raise ValueError('another') from error",
        "try:\n    step()\nexcept RuntimeError:\n    1 / 0",
        "try:\n    step()\nexcept RuntimeError as error:\n    raise ExceptionGroup('many', [error, KeyError(1)])",
        "try:\n    step()\nfinally:\n    undefined_name",
        "await __import__('asyncio').gather(__import__('asyncio').to_thread(step))",
        "import asyncio\nasync def inner():\n    step()\nawait inner()",
        "list(step() for _ in range(3))",
        "class Odd(Exception):\n    def __init__(self, held): self.held = held\n"
        "try:\n    step()\nexcept Exception as e:\n    raise Odd(e)",
        "get_ipython().run_cell('step()').raise_error()",
        "%time step()",
        "%%time\nstep()",
        "exec('step()')",
        "kept = []\ntry:\n    step()\nexcept RuntimeError as error:\n    kept.append(error)\n    raise",
        "kept = []\ntry:\n    step()\nexcept RuntimeError:\n    kept.append(sys.exc_info())\n    raise",
    ],
)  # fmt: skip
def test_whatever_the_error_is_wrapped_in(notebook, cell):
    fails(notebook, cell)
    assert freed(notebook) >= 4_000_000


def test_in_an_except_clause_it_lets_go_of_what_is_being_handled(notebook):
    cell = "try:\n    step()\nexcept RuntimeError:\n    done = memlab.release().released\n    here = seen()\nhere"
    assert freed(notebook, cell) == 4_000_000
    assert notebook.value("here") is False


def test_a_tensor_that_a_variable_keeps_stays_and_is_named(notebook):
    fails(notebook, "kept = torch.ones(5 * MB, dtype=torch.uint8)\nref = weakref.ref(kept)\n1 / 0")
    notebook.run("done = memlab.release().released")
    assert notebook.value("seen()") is True
    assert notebook.value("[(one.path, one.nbytes) for one in done.still_held][0]") == ("kept", 5_000_000)
    notebook.run("del kept")
    notebook.run("kept = None")


# --- %debug ---


def test_debug_works_until_release_and_says_so_afterwards(notebook):
    fails(notebook)
    shown = notebook.run("%debug")  # this client gives no answers, so the debugger ends when it asks
    assert "big = torch.ones" in shown.stdout or "raise RuntimeError" in shown.stdout
    assert freed(notebook) == 4_000_000
    for magic in ("%debug", "%tb"):
        after: Reply = notebook.run(magic)
        assert after.status == "ok"
        assert "No traceback" in after.stdout + after.stderr
    notebook.run("1 / 0")
    assert "ZeroDivisionError" in notebook.run("%tb").traceback
    assert "1/0" in re.sub(r"\x1b\[[0-9;]*m| ", "", notebook.run("%debug").stdout)


# --- outputs ---

MADE = """
def made():
    global ref
    big = torch.ones(MB, dtype=torch.uint8)
    ref = weakref.ref(big)
    return big
"""


def test_an_output_that_nothing_else_keeps_is_removed_and_named(notebook):
    notebook.run(MADE)
    for value in ("made()", "[made(), 'text']", "{'a': made()}", "made()[:3]"):
        reply = notebook.run(f"before = set(Out)\n{value}")
        assert reply.out is not None
        number = notebook.value("max(Out)")
        assert freed(notebook) == 1_000_000 or value == "made()[:3]"
        assert f"Out[{number}]" in notebook.value("done.outputs[0].path")
        assert (
            notebook.value(f"({number} in Out, '_{number}' in globals(), isinstance(_, torch.Tensor))") == (False,) * 3
        )


def test_an_output_that_a_variable_keeps_too_stays_and_so_does_a_users_underscore(notebook):
    notebook.run("kept = torch.ones(MB, dtype=torch.uint8); ref = weakref.ref(kept)")
    notebook.run("kept")
    number = notebook.value("max(Out)")
    notebook.run("done = memlab.release().released")
    assert notebook.value(f"Out[{number}] is kept") is True
    assert notebook.value("done.outputs") == ()
    notebook.run("kept = None\nmemlab.release()")
    notebook.run("_ = torch.ones(MB, dtype=torch.uint8); ref = weakref.ref(_)")
    notebook.run("memlab.release()")
    assert notebook.value("seen()") is True
    notebook.run("_ = None; del _")


def test_outputs_stay_when_asked_and_other_outputs_always(notebook):
    notebook.run("'a text'")
    number = notebook.value("max(Out)")
    notebook.run("ref = weakref.ref(_made := torch.ones(MB, dtype=torch.uint8))\n_made")
    notebook.run("del _made")
    notebook.run("done = memlab.release(outputs=False).released")
    assert notebook.value("seen()") is True
    assert freed(notebook) == 1_000_000
    assert notebook.value(f"Out[{number}]") == "a text"


def test_a_small_output_stays(notebook):
    notebook.run("torch.ones(1000)")
    number = notebook.value("max(Out)")
    notebook.run("done = memlab.release().released")
    assert notebook.value(f"(done.outputs, Out[{number}].nbytes)") == ((), 4000)


def test_from_within_the_debugger_it_lets_go_as_soon_as_that_is_left(notebook):
    notebook.run("from IPython.core.debugger import Pdb\n_cmdloop = Pdb.cmdloop")
    notebook.run("Pdb.cmdloop = lambda self, intro=None: self.onecmd('!memlab.release()')")
    fails(notebook)
    assert notebook.run("%debug").status == "ok"
    notebook.run("Pdb.cmdloop = _cmdloop")
    assert notebook.value("seen()") is False
    assert notebook.run("%debug").status == "ok"
