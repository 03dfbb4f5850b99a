"""Work in a forked child: its result comes back, its end is told in one line, and the parent stays as it is."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from in_child import busy_threads, fine, is_gone, run

from memlab.errors import PredictionError
from memlab.prediction.child import current, runner
from memlab.prediction.child import forked as forks
from memlab.prediction.child.runner import TAIL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")


def script(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options)


def test_what_the_work_returns_and_sends_comes_back():
    frames: list[dict] = []

    def work(channel):
        assert current() is channel
        for step in range(3):
            channel.send({"step": step, "share": 0.5, "what": ["a", None]})
        return bytes(range(256)) * 10_000

    outcome = run(work, on_news=frames.append)
    assert outcome.result == bytes(range(256)) * 10_000
    assert frames == [{"step": step, "share": 0.5, "what": ["a", None]} for step in range(3)]
    assert (outcome.ended, outcome.error, outcome.refused, outcome.started, outcome.notes) == ("", None, (), (), ())
    assert current() is None


def test_text_appears_here_as_it_was_printed(capsys):
    def work(channel):
        print("one")
        print("two", file=sys.stderr)
        sys.stdout.write("drei: \N{SNOWMAN}\ud800\n")
        sys.stdout.buffer.write(b"four\n")
        return b""

    outcome = run(work)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(["one", "drei: \N{SNOWMAN}\\ud800", "four"])
    assert err == "two\n"
    assert "drei" in outcome.printed


def test_text_of_c_code_and_of_streams_that_were_kept_is_not_lost():
    code = (
        "import sys, ctypes; from memlab.prediction.child import Child\n"
        "libc, out = ctypes.CDLL(None), sys.stdout\n"
        "libc.printf(b'c before;'); out.write('python before;')\n"
        "Child().run(lambda channel: libc.printf(b'c;') and out.write('python;') and b'')\n"
    )
    words = script(code, check=True).stdout.split(";")
    assert sorted(words) == ["", "c", "c before", "python", "python before"]


def test_text_of_programs_keeps_its_place(capfd):
    def work(channel):
        for number in range(20):
            print("python", number)
            os.system(f"echo shell {number}")
        return b""

    run(work)
    expected = [f"{who} {number}" for number in range(20) for who in ("python", "shell")]
    assert capfd.readouterr().out.splitlines() == expected


def test_large_texts_and_lines_from_threads_arrive_whole(capsys):
    outcome = run(lambda channel: print("x" * 3_000_000 + "end") or b"")
    assert capsys.readouterr().out == "x" * 3_000_000 + "end\n"
    assert len(outcome.printed) == TAIL
    assert outcome.printed.endswith("xend\n")

    def work(channel):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: [print(f"{n} " * 300) for _ in range(200)], range(4)))
        return b"done"

    assert run(work).result == b"done"
    written = [line for line in capsys.readouterr().out.split("\n") if line]
    assert sorted("".join(written).split()) == sorted(str(n) for n in range(4) for _ in range(300 * 200))


@pytest.mark.parametrize(
    ("work", "name", "text"),
    [
        (lambda channel: sys.exit(4), "SystemExit", "4"),
        (lambda channel: input("?"), "EOFError", "EOF when reading a line"),
        (lambda channel: signal.default_int_handler(2, None), "KeyboardInterrupt", ""),
        (lambda channel: {}["no such thing"], "KeyError", "'no such thing'"),
    ],
)
def test_how_work_may_fail(work, name, text):
    outcome = run(work)
    error = outcome.error
    assert (error.name, error.text, outcome.ended) == (name, text, "")
    assert str(error) == (f"{name}: {text}" if text else name)
    traceback = "".join(error.traceback)
    assert f"line {work.__code__.co_firstlineno}, in <lambda>" in traceback
    assert "memlab/prediction" not in traceback


def test_work_has_to_return_bytes():
    error = run(lambda channel: "text").error
    assert str(error) == "PredictionError: work in a child has to return bytes, got str."


@pytest.mark.parametrize(
    ("work", "ended"),
    [
        (lambda channel: os._exit(3), "exited with status 3"),
        (lambda channel: os._exit(70), "exited with status 70"),
        (lambda channel: os.kill(os.getpid(), 9), "was killed by SIGKILL (possibly because memory ran out)"),
        (lambda channel: (print("before"), os.abort()), "was killed by SIGABRT at line {line} of {file}"),
        (lambda channel: ctypes.string_at(0), "was killed by SIGSEGV at line {line} of {file}"),
        (lambda channel: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    ],
)
def test_how_a_child_may_die(work, ended, capsys):
    outcome = run(work)
    line = work.__code__.co_firstlineno
    assert f"the predicted step {ended.format(line=line, file=__file__)}" in outcome.ended
    assert (outcome.result, outcome.error) == (None, None)
    assert capsys.readouterr().out == ("before\n" if "ABRT" in ended else "")


@pytest.mark.parametrize("wait", [threading.Event().wait, lambda: [None for _ in iter(int, 1)]], ids=["lock", "loop"])
def test_a_child_that_hangs_is_stopped(wait):
    def work(channel):
        wait()

    outcome = run(work, limit_s=0.5)
    assert outcome.ended.startswith("the predicted step was stopped after 0.5 s at line ")
    assert __file__ in outcome.ended


@pytest.mark.parametrize(
    ("work", "options", "words"),
    [
        *((lambda channel: b"", {"limit_s": limit_s}, "seconds above 0") for limit_s in (0, -1, float("nan"))),
        (b"work", {}, "needs a function"),
        (lambda channel: b"", {"how": "spoon"}, "'fork' or 'spawn', got 'spoon'"),
    ],
)
def test_what_cannot_be_asked(work, options, words):
    with pytest.raises(PredictionError, match=words):
        run(work, **options)


# --- the parent stays as it is ---


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of parameters, gradients, Adam's state and the random states; the objects and the thread count, too."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            found.update(tensor.detach().numpy().tobytes())
        found.update(f"{id(parameter)} {type(parameter)} {parameter.device} {parameter._version}".encode())
    found.update(torch.get_rng_state().numpy().tobytes() + repr(random.getstate()).encode())
    found.update(repr(np.random.get_state()).encode() + str(torch.get_num_threads()).encode())
    return found.hexdigest()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(64, 300)).sum().backward()
    optimizer.step()


def test_training_in_the_child_leaves_model_optimizer_and_random_states():
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)  # on as many threads as there are: their pool does not survive a fork
    before = state_of(model, optimizer)

    def work(channel):
        for _ in range(3):
            train(model, optimizer)
        model.to(torch.float16)
        random.random(), np.random.rand(), torch.set_num_threads(2)
        sys.modules[__name__].__dict__["left_behind"] = 1
        return state_of(model.float(), optimizer).encode()

    outcome = run(work, limit_s=300)
    assert outcome.result not in (None, before.encode())
    assert state_of(model, optimizer) == before
    assert "left_behind" not in globals()
    train(model, optimizer)


def test_parallel_operations_work_on_both_sides():
    a, b = torch.randn(1500, 1500), np.ones((700, 700))
    pointwise = torch.randn(4_000_000)
    a @ a, b @ b, pointwise.exp()

    def work():
        assert torch.isfinite(a @ a).all()
        assert (b @ b)[0, 0] == 700
        assert pointwise.exp().min() > 0
        x = torch.randn(4, 3, 32, 32, requires_grad=True)
        torch.nn.functional.conv2d(x, torch.randn(8, 3, 3, 3, requires_grad=True)).sum().backward()

    fine(work)
    a @ a, b @ b, pointwise.exp()


def test_work_of_another_thread_of_the_parent_does_not_matter():
    with busy_threads(lambda: sum(range(1000))):
        assert [run(lambda channel: b"ok", limit_s=300).result for _ in range(5)] == [b"ok"] * 5


def test_a_child_may_be_made_in_another_thread():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, lambda channel: b"there").result().result == b"there"


def test_a_child_that_never_says_hello_is_replaced(monkeypatch):
    real, made = forks.ForkedProcess.says_hello, []

    def says_hello(child, patience_s):
        made.append(child.pid)
        return len(made) > 2 and real(child, patience_s)

    monkeypatch.setattr(forks.ForkedProcess, "says_hello", says_hello)
    assert run(lambda channel: b"third").result == b"third"
    assert len(set(made)) == 3
    monkeypatch.setattr(forks.ForkedProcess, "says_hello", lambda child, patience_s: False)
    with pytest.raises(PredictionError, match="none of 3 forked children started"):
        run(lambda channel: b"never")


def test_a_fork_that_fails_leaves_no_pipe(monkeypatch):
    def no_fork(**_):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(forks.process, "fork", no_fork)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(BlockingIOError, match="no more processes"):
        run(lambda channel: b"")
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_failure_of_ours_in_the_child_is_an_error_here(monkeypatch):
    monkeypatch.setattr(forks.isolation, "make_own", lambda *args: 1 / 0)
    with pytest.raises(PredictionError, match="could not be prepared: ZeroDivisionError"):
        run(lambda channel: b"")


@pytest.mark.parametrize(("before", "ends"), [(signal.SIG_DFL, -signal.SIGINT), (signal.SIG_IGN, 0)])
def test_an_interrupt_during_the_cleanup_does_afterwards_what_it_did_before(before, ends):
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGINT, before)
        with runner.open_gate():
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ends


def test_a_child_of_the_child_gives_nothing_of_its_own(capsys):
    def work(channel):
        pid = os.fork()
        sys.stdout.write("child\n" if pid else "grandchild\n")
        channel.send({"from": bool(pid)})
        if pid:
            os.waitpid(pid, 0)
        return b"child" if pid else b"grandchild"

    frames: list[dict] = []
    outcome = run(work, on_news=frames.append)
    assert (outcome.result, frames) == (b"child", [{"from": True}])
    assert sorted(capsys.readouterr().out.split()) == ["child", "grandchild"]


def test_what_the_child_started_goes_with_it():
    def work(channel):
        channel.send({"pid": subprocess.Popen(["sleep", "1000"]).pid})
        return b""

    pids: list[dict] = []
    assert run(work, on_news=pids.append, limit_s=300).ended == ""
    assert is_gone(pids[0]["pid"])


def test_a_process_of_another_session_does_not_keep_the_parent():
    def work(channel):
        loop = "while true; do echo again; sleep 0.01; done & echo $! 1>&2"
        subprocess.Popen(loop, shell=True, start_new_session=True)
        time.sleep(0.3)
        return b"over"

    outcome = run(work, limit_s=300)
    assert outcome.result == b"over"
    words = [word for word in outcome.printed.split() if word.isdigit()]
    os.kill(int(words[0]), signal.SIGKILL)


def test_ctrl_c_ends_child_and_group():
    seen: list[dict] = []

    def on_news(values):
        seen.append(values)
        os.kill(os.getpid(), signal.SIGINT)

    def work(channel):
        process = subprocess.Popen(["sleep", "1000"])
        channel.send({"pid": os.getpid(), "started": process.pid})
        time.sleep(1000)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(work, on_news=on_news)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0]["pid"], 0)
    assert not any(Path(f"/proc/{pid}/cwd").exists() for pid in seen[0].values())


def test_an_error_in_on_news_ends_the_child():
    def on_news(values):
        raise LookupError(values["pid"])

    with pytest.raises(LookupError) as raised:
        run(lambda channel: (channel.send({"pid": os.getpid()}), time.sleep(1000)), on_news=on_news)
    with pytest.raises(ProcessLookupError):
        os.kill(raised.value.args[0], 0)


def test_the_child_dies_with_the_parent(tmp_path):
    code = (
        "import os, time; from memlab.prediction.child import Child\n"
        "Child(on_news=lambda values: (print(values['pid'], flush=True), os.kill(os.getpid(), 9))).run("
        "lambda channel: (channel.send({'pid': os.getpid()}), time.sleep(1000)))"
    )
    done = script(code, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == -signal.SIGKILL
    assert is_gone(int(done.stdout))


def test_thirty_runs_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def left() -> tuple[list[list[str]], int, list[Path], str]:
        temporary = sorted(Path(tempfile.gettempdir()).glob("memlab-*"))
        children = [sorted(one.read_text().split()) for one in Path("/proc/self/task").glob("*/children")]
        files = len(list(Path("/proc/self/fd").iterdir()))
        return sorted(children), files, temporary, repr(signal.getsignal(signal.SIGINT))

    works = [lambda channel: b"ok", lambda channel: 1 / 0, lambda channel: os.abort(), lambda channel: os._exit(1)]
    run(works[0])
    before = left()
    for number in range(30):
        run(works[number % len(works)])
    assert left() == before


def test_a_parent_that_ignores_its_children_is_not_confused():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run(lambda channel: b"ok").result == b"ok"
        assert "took its exit status" in run(lambda channel: os._exit(3)).ended
    finally:
        signal.signal(signal.SIGCHLD, before)
