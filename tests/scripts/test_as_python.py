"""Scripts that are hard to run: output and exit status under `memlab run` are those under python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import processes
import pytest
from processes import REPOSITORY, memlab_ran, read_until

ABOUT = "import sys; print(sys.argv, __name__, repr(__package__), __spec__ and __spec__.name, __file__, sys.path[0])\n"
POOL = """
import multiprocessing
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(double, [1, 2]))
"""
FORK = """
import os, sys
if not (pid := os.fork()):
    {child}
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
LOADER = """
from torch.utils.data import DataLoader
if __name__ == "__main__":
    print(sum(one.sum().item() for one in DataLoader(list(map(float, range(8))), batch_size=2, num_workers=2)))
"""
# Scripts for which torch is imported first, as the measurement begins there.
MEASURED = {
    "removes its folder": "import os, shutil; shutil.rmtree(os.getcwd()); print('gone'); torch.ones(3)",
    "exits in a thread": "import sys, threading; t = threading.Thread(target=lambda: sys.exit(3)); t.start(); t.join()",
    "fails in a thread": "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); print('on')",
    "_exit": "import os; print('x', flush=True); os._exit(5)",
    "fork": FORK.format(child="print('child', torch.ones(2), flush=True); sys.exit(4)"),
    "fork, and a signal": FORK.format(child="os.kill(os.getpid(), 15)"),
    "fork, and an error": FORK.format(child="raise ValueError"),
    "spawn": POOL,
    "loader": LOADER,
    "asyncio": "import asyncio\nasync def main(): await asyncio.sleep(0.01); print('a')\nasyncio.run(main())",
    "signals in asyncio": """import asyncio, os, signal
async def main():
    got = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, got.set)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(got.wait(), 5); print("got it")
asyncio.run(main())""",
    "late thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), print(torch.ones(3).sum()))).start()",
    "atexit": "import atexit, __main__; x = 5; atexit.register(lambda: print(__main__.x)); atexit.register(print, 2)",
    "exit text": "import sys; sys.exit('bye')",
    "hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__); 1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "no stderr": "import sys; sys.stderr = None; print('x')",
    "closed stderr": "import sys; sys.stderr.close(); print('x')",
    "closed descriptor": "import os; os.close(2); print('x')",
    "SIGTERM": "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM); 1 / 0",
    "own SIGTERM": "import os, signal, sys; signal.signal(15, lambda *a: sys.exit(9)); os.kill(os.getpid(), 15)",
    "SIGALRM": "import signal; signal.alarm(1); signal.pause()",
}
PLAIN = {
    "syntax": "x = (\n",
    "stdin": "import sys; print(sys.stdin.read().upper())",
    "input": "print(input('?'))",
    "itself": "print(open(__file__).read(10))",
    "source": "import inspect\ndef f(): pass\nprint(inspect.getsource(f))",
    "warnings": "import warnings; warnings.warn('w'); warnings.warn('d', DeprecationWarning)",
    "handlers": "import signal; print(signal.getsignal(15), signal.getsignal(10), signal.getsignal(2))",
    "hints": "from __future__ import annotations\nimport typing\nclass A:\n    x: int\nprint(typing.get_type_hints(A))",
    "without future": "def f(x: 1 + 1): pass\nprint(f.__annotations__)",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    "no main": "import sys; del sys.modules['__main__']; print('x')",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "cause": "try: 1 / 0\nexcept Exception as e: raise ValueError('v') from e",
    "usage": "import argparse; p = argparse.ArgumentParser(); p.add_argument('--x'); p.parse_args(['--bad'])",
}


def both(folder: Path, *words: str, before: tuple[str, ...] = (), stdin: str = "") -> list[tuple[int, str, str]]:
    """Status, output and errors under python and under memlab run, each in a copy of the folder of one name."""
    found = []
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    for command in ((), ("-m", "memlab", "run")):
        place = folder.with_name("copy")
        subprocess.run(["cp", "-r", folder, place], check=True)
        done = subprocess.run(
            [sys.executable, *before, *command, *words], cwd=place, env=environment, input=stdin, text=True,
            capture_output=True, timeout=600, check=False,
        )  # fmt: skip
        subprocess.run(["rm", "-rf", place], check=True)
        found.append((done.returncode, done.stdout, re.sub("0x[0-9a-f]+|-[0-9]+:", "", done.stderr)))
    return found


def assert_same(found: list[tuple[int, str, str]]) -> None:
    (status, out, err), (our_status, our_out, our_err) = found
    assert (our_status, our_out) == (status, out)
    assert our_err.endswith(err) or our_err.startswith(err)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


@pytest.mark.parametrize("name", PLAIN)
def test_without_torch(folder, name):
    (folder / "script.py").write_text(PLAIN[name])
    assert_same(both(folder, "script.py", "--", "-m", "--json", stdin="hello\n"))


@pytest.mark.sample(4)
@pytest.mark.skipif(os.name != "posix", reason="signals and forks")
@pytest.mark.parametrize("name", MEASURED)
def test_with_torch(folder, name):
    (folder / "script.py").write_text(f"import torch\n{MEASURED[name]}\n")
    assert_same(both(folder, "script.py"))


@pytest.mark.parametrize("before", [("-u",), ("-O",), ("-X", "dev"), ("-W", "error::UserWarning"), ("-s",)])
def test_switches_of_python(folder, before):
    (folder / "script.py").write_text(
        "import sys, warnings; print(sys.flags, sys.stdout.line_buffering); warnings.warn('w')"
    )
    assert_same(both(folder, "script.py", before=before))


def test_packages_folders_archives_and_compiled_files(folder):
    for name in ("package/__init__.py", "package/__main__.py", "package/module.py", "package/other.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(ABOUT if "init" not in name else "import sys; print(sys.argv, __name__)")
    (folder / "package/module.py").write_text(f"from . import other\n{ABOUT}")
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", ABOUT)
    (folder / "extensionless").write_text(ABOUT)
    (folder / "link.py").symlink_to("package/other.py")
    subprocess.run(
        [sys.executable, "-c", "import py_compile; py_compile.compile('package/other.py', 'c.pyc')"], cwd=folder
    )
    for words in (["-m", "package"], ["-m", "package.module"], ["package"], ["archive.zip"], ["extensionless"], ["link.py"],
                  ["c.pyc"]):  # fmt: skip
        assert_same(both(folder, *words, "x"))


def test_a_folder_above_stays_where_modules_are_found(folder):
    """What is named like a module of memlab is the script's."""
    for name in ("page", "errors", "units", "job", "script"):
        (folder / f"{name}.py").write_text(f"x = {name!r}")
    (folder / "main.py").write_text(
        "import page, errors, units, job, script; print(page.x, errors.x, units.x, job.x, script.x)"
    )
    assert_same(both(folder, "main.py"))


TRAIN = """
import time
import torch
model = torch.nn.Linear(100, 300)
optimizer = torch.optim.Adam(model.parameters())
for step in range(20):
    model(torch.randn(50, 100)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def started(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(text)
    process = processes.started(folder, "-m", "memlab", "run", *options, "train.py")
    read_until(process.stdout, "now")
    return process


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sigterm_leaves_the_report_and_the_page(folder):
    process = started(folder, TRAIN + "print('now', flush=True); time.sleep(60)", "--out", "runs")
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGTERM
    assert "ended by SIGTERM" in err
    assert "Peak" in err
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["train.html", "train.memlab"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sigterm_during_the_import_of_the_compiler_leaves_the_report(folder):
    # The first optimizer imports it, for a second or more.
    script = """
import os, signal, sys, torch
class Finder:
    def find_spec(self, name, path, target=None):
        half = sys.modules.get("torch._dynamo.utils")
        if half is not None and not hasattr(half, "counters"):
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
model = torch.nn.Linear(10, 10)
torch.optim.SGD(model.parameters()).step()
"""
    (folder / "train.py").write_text(script)
    code, _, err = memlab_ran(folder, "run", "--out", "runs", "train.py")
    assert code == -signal.SIGTERM
    assert "Peak" in err
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["train.html", "train.memlab"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_sigterm_ends_a_script_that_hangs_in_c(folder):
    # Locking a mutex twice waits forever, and no signal interrupts it: so does a collective whose partner is gone.
    hangs = """
import ctypes, threading
mutex, lib = ctypes.create_string_buffer(64), ctypes.CDLL(None)
threading.Timer(1.0, print, ("now",), {"flush": True}).start()  # when it hangs: between two calls the handler would be run
while True: lib.pthread_mutex_lock(mutex)
"""
    process = started(folder, TRAIN + hangs)
    begin_s = time.monotonic()
    process.terminate()
    _, err = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - begin_s < 30
    assert "did not return" in err


def test_what_measuring_added_to_a_step_is_reported(folder):
    (folder / "train.py").write_text(TRAIN)
    status, _, err = memlab_ran(folder, "run", "--skip", "6", "--steps", "8", "train.py")
    found = re.search(r"while measured \(median of (\d+)\), [\d.]+ m?s otherwise \(of (\d+)\): measuring added", err)
    assert status == 0 and found is not None, err
    assert (int(found[1]), int(found[2])) == (7, 9)
