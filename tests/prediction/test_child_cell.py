"""The body of a cell in a child of a real kernel: its outputs are those of the cell, and the kernel stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kernel import ANSI, ROOT, Kernel, kernel

from memlab.torch_internals.frames import OWN_FILES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")

SETUP = """
import asyncio, builtins, hashlib, os, random, signal, sys, threading, time
import torch
from in_child import run_cell; from memlab.prediction.child import current

net = torch.nn.Linear(300, 300)
optimizer = torch.optim.Adam(net.parameters())
torch.randn(1500, 1500) @ torch.randn(1500, 1500)
net(torch.randn(64, 300)).sum().backward(); optimizer.step()
outcome = None

def go(body, *args, **kwargs):
    global outcome
    outcome = run_cell(get_ipython(), body, *args, **kwargs)

def state():
    found = hashlib.sha256()
    for p in net.parameters():
        for t in (p, p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            found.update(t.detach().numpy().tobytes())
        found.update(f"{id(p)} {type(p)} {p.device} {p._version}".encode())
    found.update(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    shell = get_ipython()
    kept = [name for name in sorted(globals()) if not name.startswith("_") and name != "outcome"]
    threads = sorted(t.name for t in threading.enumerate() if "istory" not in t.name)  # IPython's own ends at any fork
    return (found.hexdigest(), kept, torch.get_num_threads(), type(sys.stdout).__name__, os.getcwd(), threads,
            id(type(shell.kernel.session).send), builtins.input.__qualname__, len(shell.events.callbacks["post_execute"]))
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory) -> Kernel:
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        with kernel(folder, SETUP) as found:
            yield found


def go(notebook: Kernel, body: str, options: str = "", **kwargs):
    """Run a cell's body in a child of the kernel; what the kernel's cell gave."""
    return notebook.run(f"go({body!r}{', ' if options else ''}{options})", **kwargs)


def outcome(notebook: Kernel, name: str):
    return notebook.value(f"outcome.{name}")


def test_prints_displays_and_the_last_value_are_outputs_in_order(notebook):
    body = "print('one'); display({'a': 1}); print('two', flush=True)\nprint('three', file=sys.stderr)\n5 + 1"
    reply = go(notebook, body)
    assert (reply.stdout, reply.stderr, reply.out) == ("one\ntwo\n", "three\n", "6")
    assert reply.shown == [{"text/plain": "{'a': 1}"}]
    assert reply.order == ["stream", "display_data", "stream", "stream", "execute_result"]
    assert (outcome(notebook, "ended"), outcome(notebook, "error"), outcome(notebook, "notes")) == ("", None, ())


def test_a_display_is_updated_html_stays_html_and_a_widget_leaves_its_text(notebook):
    body = "from IPython.display import HTML\nh = display(1, display_id=True); h.update(HTML('<b>2</b>'))"
    reply = go(notebook, body)
    assert reply.order == ["display_data", "update_display_data"]
    assert reply.shown[0]["text/html"] == "<b>2</b>"
    reply = go(notebook, "import ipywidgets; display(ipywidgets.IntSlider())")
    assert [set(data) for data in reply.shown] == [{"text/plain"}]


@pytest.mark.parametrize(
    ("body", "stdout", "out"),
    [
        ("import asyncio\nawait asyncio.sleep(0.01)\n7", "", "7"),
        ("8;", "", None),
        ("!echo hello", "hello\r\n", None),
        ("import os; os.system('echo deep') and None", "deep\n", "0"),
        ("   \n  x = 3\n  print(x)", "3\n", None),
        ("%%capture kept\nprint('hidden')", "", None),
        ("from __future__ import annotations\nprint('future')", "future\n", None),
        ("", "", None),
        ("net.weight.shape", "", "torch.Size([300, 300])"),
    ],
)
def test_cells_of_many_kinds(notebook, body, stdout, out):
    reply = go(notebook, body)
    assert (reply.status, reply.stdout, reply.stderr) == ("ok", stdout, "")
    assert outcome(notebook, "error") is None
    assert out is None or reply.out == out


def test_the_last_value_has_the_number_of_the_cell_and_a_magic_below_the_line_works(notebook):
    count = notebook.value("get_ipython().execution_count")
    assert go(notebook, "get_ipython().displayhook.prompt_count").out == str(count)
    reply = go(notebook, "%%time\nnet.weight.sum().item() and 3")
    assert reply.stdout.startswith("CPU times")
    assert reply.out == "3"


@pytest.mark.parametrize(
    ("body", "name", "line"),
    [
        ("x = 1\n\ny = x / 0", "ZeroDivisionError", 4),
        ("def f():\n    raise KeyError('k')\n\nf()", "KeyError", 5),
        ("x = 1\nx = (", "SyntaxError", 3),
        ("await asyncio.sleep(0)\n1 / 0", "ZeroDivisionError", 3),
        ("\n\n%time 1 / 0", "ZeroDivisionError", 4),
    ],
)
def test_an_error_has_the_lines_of_the_notebook(notebook, body, name, line):
    count = notebook.value("get_ipython().execution_count")
    assert go(notebook, body).traceback == ""
    assert outcome(notebook, "error.name") == name
    traceback = notebook.value("'\\n'.join(outcome.error.traceback)")
    assert f"In[{count}]" in traceback.replace("\x1b[0m", "").replace("\x1b[39m\x1b[32m", "") or name == "SyntaxError"
    assert f"line {line}" in traceback
    assert "memlab/" not in traceback


@pytest.mark.parametrize(
    ("body", "name", "text"),
    [
        ("raise SystemExit(3)", "SystemExit", "3"),
        ("input('?')", "StdinNotImplementedError", "does not support input requests"),
        ("%nosuch", "UsageError", "`%nosuch` not found"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
    ],
)
def test_other_errors(notebook, body, name, text):
    go(notebook, body)
    assert outcome(notebook, "error.name") == name
    assert text in outcome(notebook, "error.text")


def test_an_error_of_a_cell_inside_of_the_cell_is_an_output(notebook):
    reply = go(notebook, "get_ipython().run_cell('1 / 0'); print('on')")
    assert reply.order == ["error", "stream"]
    assert outcome(notebook, "error") is None


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        ("import ctypes\n\nctypes.string_at(0)", "the predicted cell was killed by SIGSEGV at line 4"),
        (
            "lock = threading.Lock()\nwith lock:\n    lock.acquire()",
            "the predicted cell was stopped after 1 s at line 4",
        ),
    ],
)
def test_how_a_cell_may_die(notebook, body, ended):
    reply = go(notebook, body, "limit_s=1")
    assert reply.status == "ok"
    assert outcome(notebook, "ended") == ended


def test_a_thread_that_goes_on_is_named(notebook):
    go(notebook, "threading.Thread(target=time.sleep, args=(100,), name='slow').start()")
    note = "When the cell ended, threads of it still ran: slow. They were not waited for."
    assert outcome(notebook, "notes") == (note,)


def test_commands_are_listed_and_hold_no_pen(notebook):
    go(notebook, "!touch made; ls\nimport subprocess; subprocess.run(['true'])")
    assert outcome(notebook, "started") == ("!touch made; ls", "true")
    assert notebook.value("os.path.exists('made')") is False


def test_the_interrupt_button_ends_the_child_and_shows_no_frames_of_ours(notebook):
    body = "import subprocess; p = subprocess.Popen(['sleep', '1000']); print(os.getpid(), p.pid, 'ready'); time.sleep(1000)"
    reply = go(notebook, body, interrupt_at="ready")
    assert (reply.status, reply.error) == ("error", "KeyboardInterrupt")
    assert OWN_FILES not in reply.traceback
    assert len(reply.lines) == 3  # of the cell, of `go`, and of `run_cell`
    for pid in reply.stdout.split()[:2]:
        assert notebook.value(f"os.path.exists('/proc/{pid}/cwd')") is False


AROUND = """
import contextlib
@contextlib.contextmanager
def around():
    channel, raised = current(), []
    channel.send({"entered": True})
    try:
        yield lambda: repr((raised, "new" in globals())).encode()
    except Exception as error:
        raised.append(type(error).__name__)
        raise
"""


def test_what_is_around_the_cell_sees_its_error_and_gives_the_result(notebook):
    assert notebook.run(AROUND).status == "ok"
    go(notebook, "new = 1", "around, on_news=print")
    assert outcome(notebook, "result") == b"([], True)"
    reply = go(notebook, "new = 1; 1 / 0", "around, on_news=print")
    assert reply.stdout == "{'entered': True}\n"
    assert outcome(notebook, "result") == b"(['ZeroDivisionError'], True)"
    assert outcome(notebook, "error.name") == "ZeroDivisionError"
    go(notebook, "pass", "lambda: contextlib.nullcontext(lambda: 1 / 0)")
    assert outcome(notebook, "error.name") == "ZeroDivisionError"
    assert outcome(notebook, "result") is None


def test_the_kernel_stays_as_it_is(notebook):
    before, count = notebook.value("state()"), notebook.value("get_ipython().execution_count")
    body = (
        "for _ in range(3):\n    net(torch.randn(64, 300)).sum().backward(); optimizer.step()\n"
        "random.random(); fresh = 1; torch.set_num_threads(1); os.chdir('/'); net.half()\n"
        "asyncio.get_event_loop(); optimizer.zero_grad()\nfresh"
    )
    assert go(notebook, body).out == "1"
    for other in ("1 / 0", "os.abort()", "print(1)"):
        go(notebook, other)
    assert notebook.value("state()") == before
    assert notebook.value("get_ipython().execution_count") == count + 6
    assert notebook.value(f"[key for key in Out if key > {count}]") == []
    again = "net(torch.randn(64, 300)).sum().backward(); optimizer.step(); await asyncio.sleep(0.01)"
    assert notebook.run(again).status == "ok"


def test_many_cells_leave_no_descriptors_and_no_processes(notebook):
    # Of the kinds that a child needs: IPython and ZMQ open and close others as they like.
    files = "[os.readlink('/proc/self/fd/' + n) for n in os.listdir('/proc/self/fd') if os.path.lexists('/proc/self/fd/' + n)]"
    count = f"sum('pipe:' in f or 'pidfd' in f or 'memlab-' in f or 'deleted' in f for f in {files})"
    count = f"({count}, [n for n in os.listdir(os.environ['TMPDIR']) if n.startswith('memlab-')])"
    go(notebook, "1")
    before = notebook.value(count)
    assert notebook.run("for n in range(10): go(['1', '1/0', 'os.abort()', 'display(1)'][n % 4])").status == "ok"
    assert notebook.value(count) == before
    assert notebook.run("try: os.waitpid(-1, os.WNOHANG)\nexcept ChildProcessError: print('none')").stdout == "none\n"


def test_under_capture_the_outputs_are_captured(notebook):
    reply = notebook.run("%%capture kept\ngo(\"print('text'); display(2)\")")
    assert (reply.stdout, reply.shown) == ("", [])
    assert notebook.value("(kept.stdout, [output.data['text/plain'] for output in kept.outputs])") == ("text\n", ["2"])


def test_displays_of_work_that_is_no_cell_appear_too(notebook):
    reply = notebook.run("from in_child import run\nrun(lambda channel: display(3) or print('x') or b'').result")
    assert (reply.order, reply.out) == (["display_data", "stream", "execute_result"], "b''")
    reply = notebook.run("print(''.join(run(lambda channel: 1 / 0).error.traceback))")
    assert "----> 1" in ANSI.sub("", reply.stdout)
    assert "memlab/" not in reply.stdout


def test_in_a_terminal_a_cell_prints_what_it_would_print(tmp_path):
    code = r"""
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from traitlets.config import Config
from in_child import run_cell
config = Config(); config.HistoryManager.enabled = False
config.TerminalInteractiveShell.simple_prompt = True
config.TerminalInteractiveShell.colors = 'nocolor'
shell = TerminalInteractiveShell.instance(config=config)
shell.user_ns.update(run_cell=run_cell, shell=shell)
shell.run_cell(r"o = run_cell(shell, 'print(1); display(2)\n!echo 3\n6 * 7')", store_history=True)
shell.run_cell(r"o = run_cell(shell, 'x = 1\n\n1/0')", store_history=True)
o = shell.user_ns["o"]
print(o.error, "line 4" in ''.join(o.error.traceback), 'x' in shell.user_ns)
"""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "IPYTHONDIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = "ZeroDivisionError: division by zero True False"
    assert done.stdout.splitlines() == ["1", "2", "3", "Out[1]: 42", last], done.stderr
