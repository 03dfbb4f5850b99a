"""A child in a process of its own: it gets what the work names, transitively; what cannot be sent is refused by its name."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import types  # noqa: F401 (values below are made from texts)
from pathlib import Path

import pytest
import torch
from in_child import is_gone
from kernel import kernel

from memlab.prediction.child import sending
from memlab.torch_internals.frames import OWN_FILES

ROOT = Path(__file__).resolve().parents[2]


def script(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a script in which `run` makes fresh children: what it prints, and how it ends."""
    head = "from functools import partial\nfrom in_child import run\nrun = partial(run, how='spawn')\n"
    path = tmp_path / "script.py"
    path.write_text(head + textwrap.dedent(code))
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    options = {"env": {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}, "timeout": 240}
    return subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, **options)


NOTEBOOK = """
import dataclasses, enum, torch
from torch import nn

SCALE = 3
def helper(x):
    return x * SCALE

class Net(nn.Module):
    kind = "net"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1000, 1000), nn.Linear(1000, 1000)
        self.b.weight = self.a.weight
    def forward(self, x):
        return helper(self.b(self.a(x)))
    @property
    def size(self):
        return sum(p.numel() for p in self.parameters())
    @classmethod
    def made(cls):
        return cls()
    @staticmethod
    def twice(x):
        return 2 * x

@dataclasses.dataclass
class Settings:
    steps: int = 3
    names: list = dataclasses.field(default_factory=list)

def counter():
    count = 0
    def up():
        nonlocal count
        count += 1
        return count
    def now():
        return count
    return up, now

net = Net(); optimizer = torch.optim.AdamW(net.parameters()); settings = Settings(5, ["a"])
net(torch.ones(1, 1000)).sum().backward(); optimizer.step()
data = torch.arange(12.0).reshape(3, 4); row = data[1]
class Color(enum.Enum):
    RED = 1

up, now = counter(); up()
unsent = (n for n in range(3))
"""


def test_what_the_work_names_comes_along(tmp_path):
    code = NOTEBOOK + textwrap.dedent("""
        def work(channel):
            weight = net.a.weight
            assert net.b.weight is weight is optimizer.param_groups[0]["params"][0] and weight.grad is not None
            assert type(weight) is nn.Parameter and optimizer.state[weight]["exp_avg"].shape == (1000, 1000)
            net(torch.ones(2, 1000)).sum().backward()
            optimizer.step()
            assert (net.size, Net.made().kind, Net.twice(4)) == (1_002_000, "net", 8)
            assert (settings, Settings().names) == (Settings(5, ["a"]), [])
            row[0] = 100
            assert data[1, 0] == 100
            assert (up(), now(), Color(1)) == (2, 2, Color.RED)
            assert "unsent" not in globals()
            channel.send({"deep": [1, None]})
            print("printed")
            return b"all"

        outcome = run(work, on_news=print)
        print(outcome.result, outcome.error and "".join(outcome.error.traceback), outcome.ended, outcome.notes)
        assert data[1, 0] == 4 and now() == 1 and list(unsent) == [0, 1, 2]
        import os
        print([name for name in os.listdir() if name.startswith("memlab-")])
    """)
    done = script(tmp_path, code)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "{'deep': [1, None]}",
        "printed",
        "b'all' None  ('3.81 MiB of parameters were sent to a new process without their values.',)",
        "[]",
    ]


@pytest.mark.slow
def test_errors_deaths_limits_and_the_sandbox(tmp_path):
    code = """
        import contextlib, os, time
        @contextlib.contextmanager
        def slow_to_start():
            time.sleep(3.1)
            yield
        def fails(channel):
            return 1 / 0
        def hangs(channel):
            while True: pass
        def writes(channel):
            os.system("echo deep; echo x > new")
            open("new", "w").write("diverted")
            return open("new").read().encode()
        print((error := run(fails).error), "script.py" in "".join(error.traceback))
        print(run(lambda channel: os.abort()).ended.replace(os.getcwd(), ""))
        print(run(hangs, limit_s=1).ended.replace(os.getcwd(), ""))
        outcome = run(writes)
        print(outcome.result, outcome.refused, outcome.started, os.path.exists("new"))
        print(run(lambda channel: input()).error)
        print(run(lambda channel: b"in time", slow_to_start, limit_s=3).result)
    """
    done = script(tmp_path, code)
    assert done.stdout.splitlines() == [
        "ZeroDivisionError: division by zero True",
        "the predicted step was killed by SIGABRT at line 19 of /script.py, in <lambda>",
        "the predicted step was stopped after 1 s at line 13 of /script.py, in hangs",
        "deep",
        """b'diverted' ("writing 'new'",) ('echo deep; echo x > new',) False""",
        "EOFError: EOF when reading a line",
        "b'in time'",
    ]


@pytest.mark.slow
def test_it_dies_with_its_parent(tmp_path):
    code = """
        import os, time
        def work(channel):
            channel.send({"pid": os.getpid()})
            time.sleep(1000)
        def on_news(values):
            print(values["pid"], flush=True)
            os.kill(os.getpid(), 9)
        run(work, on_news=on_news)
    """
    done = script(tmp_path, code)
    assert done.returncode == -9
    assert is_gone(int(done.stdout))


def test_what_cannot_be_sent_is_refused_with_every_name(tmp_path):
    code = """
        import threading, torch
        numbers = (n for n in range(3))
        lock = threading.Lock()
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * 2).sum()
        fine = 1
        def inner():
            return numbers
        try:
            run(lambda channel: print(lock, loss, fine, inner()))
        except Exception as error:
            print(type(error).__name__, error)
        local = threading.Lock()
        try:
            run((lambda held: lambda channel: held)(local))
        except Exception as error:
            print(error)
    """
    done = script(tmp_path, code)
    first, second = done.stdout.splitlines()
    assert first.startswith("PredictionError not everything that the code names can be sent")
    refused = (
        "lock: lock (cannot pickle",
        "loss: Tensor (it has a graph of autograd",
        "numbers: generator (cannot pickle",
    )
    assert all(why in first for why in refused)
    assert "fine:" not in first and "inner:" not in first
    assert "lock" in second


@pytest.mark.slow
def test_a_cell_in_a_fresh_process_looks_like_a_cell(tmp_path):
    setup = (
        "import torch; from in_child import run_cell\nnet = torch.nn.Linear(300, 300)\n"
        "it = iter(torch.utils.data.DataLoader([1])); gen = (n for n in 'abc')\n"
        "def go(body, **kwargs):\n    global outcome\n    outcome = run_cell(get_ipython(), body, how='spawn', **kwargs)"
    )
    with kernel(tmp_path, setup) as notebook:
        reply = notebook.run("go('gen = 3; print(1); display(2)\\n%time net.weight.shape')")
        assert reply.order == ["stream", "display_data", "stream", "execute_result"]
        assert (reply.stdout[:2], reply.shown, reply.out) == ("1\n", [{"text/plain": "2"}], "torch.Size([300, 300])")
        assert notebook.value("[type(gen).__name__, outcome.ended]") == ["generator", ""]
        notebook.run("go('x = 1\\n\\n1/0')")
        assert notebook.value("outcome.error.name") == "ZeroDivisionError"
        assert "line 4" in notebook.value("outcome.error.traceback[2]")
        reply = notebook.run("go('list(gen)')")
        assert (reply.status, reply.error) == ("error", "PredictionError")
        assert "gen: generator" in reply.traceback
        body = "import time; print('ready'); time.sleep(1000)"
        reply = notebook.run(f"go({body!r})", interrupt_at="ready")
        assert (reply.error, OWN_FILES in reply.traceback) == ("KeyboardInterrupt", False)
        assert notebook.value("[t.name for t in __import__('threading').enumerate() if 'memlab' in t.name]") == []


# --- what is needed ---


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("y = x + 1", ["x"]),
        ("x = 1\ny = x", []),
        ("x += 1", ["x"]),
        ("if y: x = 1\nx", ["y", "x"]),
        ("def f():\n    return x\nf()", ["x"]),
        ("import x\nx.y", []),
        ("for x in y: pass", ["y"]),
        ("x.y = 3", ["x"]),
        ("get_ipython().run_line_magic('time', 'f(x)')", ["f", "x"]),
        ("print('x')", []),
        ("x: int = 1\nx", []),
        ("del x", ["x"]),
        ("await f(x)", ["f", "x"]),
    ],
)
def test_the_names_that_a_cell_needs(code, names):
    assert sorted(sending.names_of_cell(code, {"x", "y", "f"})) == sorted(names)


def test_the_names_that_a_function_needs():
    def outer():
        def inner():
            return torch, [unknown + 1 for unknown in range(other)]  # noqa: F821

        return inner

    assert set(sending.names_of_code(outer.__code__)) == {"torch", "range", "other"}


# --- what is sent ---


def sent(*values):
    """Send values to this very process, as the first of a payload."""
    return pickle.loads(sending.send(values, None, (), {}))


def test_tensors_keep_what_they_share():
    base = torch.arange(20.0)
    views = sent([base, base[3:], base.view(4, 5).t(), torch.nn.Parameter(base)])[0]
    assert [view.tolist() for view in views[:2]] == [base.tolist(), base[3:].tolist()]
    assert views[2].stride() == (1, 5)
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert base.data_ptr() != views[0].data_ptr()


def test_large_parameters_are_sent_by_shape_alone_and_data_with_values():
    linear = torch.nn.Linear(1000, 1000)
    linear.register_buffer("table", torch.arange(100_000))
    payload = sending.send(linear, None, (), {})
    assert len(payload) < 1_000_000 < linear.weight.nbytes
    made = pickle.loads(payload)
    assert made.weight.shape == (1000, 1000)
    assert made.bias.tolist() == linear.bias.tolist()
    assert made.table.tolist() == list(range(100_000))


@pytest.mark.parametrize(
    "value",
    [
        "torch.tensor(3)", "torch.empty(0)", "torch.ones(2, 2).to_sparse()", "torch.ones(3, dtype=torch.complex64)",
        "torch.tensor([True])", "torch.ones(3, requires_grad=True)", "torch.Generator()", "torch.device('cpu')", "torch.float16",
        "types.SimpleNamespace(a=1)",
    ],
)  # fmt: skip
def test_values_of_many_kinds_are_sent(value):
    value = eval(value)  # a text until here: tensors that pytest keeps are seen by tests of what is alive
    (made,) = sent(value)
    assert type(made) is type(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(made.to_dense(), value.to_dense())
        assert made.requires_grad is value.requires_grad
    torch._utils._validate_loaded_sparse_tensors()  # until then torch keeps the sparse ones that were unpickled
