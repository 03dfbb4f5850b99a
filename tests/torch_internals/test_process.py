"""Each private hook that a child process leans on: is it there, and does it behave as memlab believes?"""

from __future__ import annotations

import asyncio
import multiprocessing.process
import os
import sys
import threading

import pytest
import torch
from in_child import run
from processes import python
from torch.utils.data import dataloader

from memlab.torch_internals import process

linux = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")


def in_child(work) -> None:
    """Do something in a child, where it harms nobody."""
    outcome = run(lambda channel: work() or b"fine", limit_s=300)
    assert outcome.error is None, "".join(outcome.error.traceback)
    assert outcome.result == b"fine", outcome.ended


def in_ipython(code: str) -> str:
    """What code prints in a process with an IPython shell of its own."""
    head = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from IPython.terminal.interactiveshell import TerminalInteractiveShell\n"
        "from traitlets.config import Config\nfrom memlab.torch_internals import shell as shells\n"
        "config = Config(); config.HistoryManager.enabled = False; config.InteractiveShell.colors = 'nocolor'\n"
        "config.TerminalInteractiveShell.simple_prompt = True\n"
        "shell = TerminalInteractiveShell.instance(config=config)\n"
    )
    return python("-W", "ignore", "-c", head + code, IPYTHONDIR=os.devnull, NO_COLOR="1")


# --- process ---


@linux
@pytest.mark.parametrize("skip_handlers", [False, True])
def test_a_fork_beside_threads_that_wait_for_the_interpreter(skip_handlers):
    if skip_handlers and not process.can_skip_handlers():
        pytest.skip("this libc has no _Fork")
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=busy) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(8):
            pid = process.fork(skip_handlers)
            if pid == 0:
                try:
                    text = [str(number) for number in range(1000)]
                    new = threading.Thread(target=text.clear)
                    new.start()
                    new.join()
                    os._exit(7)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@linux
def test_a_fork_runs_what_python_runs_at_a_fork():
    code = (
        "import os; from memlab.torch_internals import process\n"
        "for when in ('before', 'after_in_parent', 'after_in_child'):\n"
        "    os.register_at_fork(**{when: lambda when=when: os.write(1, f'{when} '.encode())})\n"
        "pid = process.fork(False)\n"
        "if pid == 0: os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    first, *others = python("-c", code).split()
    assert first == "before"
    assert sorted(others) == ["after_in_child", "after_in_parent"]


def test_leave_running_loop():
    async def inside() -> None:
        loop = asyncio.get_running_loop()
        process.leave_running_loop()
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        asyncio._set_running_loop(loop)

    asyncio.run(inside())


@linux
def test_keep_one_thread_and_gpu_in_sight():
    def work() -> None:
        process.keep_one_thread()
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 1

    in_child(work)
    assert process.gpu_in_sight() is torch.cuda.is_available()


@linux
def test_what_disown_loaders_changes_is_there():
    for name in ("__init__", "_shutdown_workers", "_next_data", "__del__"):
        assert name in vars(dataloader._MultiProcessingDataLoaderIter) or name == "_next_data"
        assert callable(getattr(dataloader._MultiProcessingDataLoaderIter, name))
    data = dataloader.DataLoader([1, 2])
    assert data._iterator is None

    def work() -> None:
        old = dataloader._MultiProcessingDataLoaderIter.__new__(dataloader._MultiProcessingDataLoaderIter)
        process.disown_loaders()
        with pytest.raises(Exception, match="belong to the notebook"):
            old._next_data()
        old._shutdown_workers()
        assert list(dataloader.DataLoader([1, 2], num_workers=1, batch_size=None)) == [1, 2]

    in_child(work)


@linux
def test_disown_pools_and_disown_processes():
    def work() -> None:
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(1)
        pool._threads = {None}  # it believes that it has all that it needs
        process.disown_pools()
        assert pool.submit(abs, -3).result(10) == 3
        assert ThreadPoolExecutor(1).submit(abs, -3).result(10) == 3
        multiprocessing.process._children.add(None)
        process.disown_processes()
        assert not multiprocessing.process._children

    in_child(work)


@linux
def test_divert_torch_files(tmp_path):
    def work() -> None:
        told: list[str] = []
        place = os.path.join(os.environ["TMPDIR"], "model.pt")  # noqa: PTH118
        process.divert_torch_files(lambda path: told.append(path) or place)
        torch.save({"x": 1}, tmp_path / "model.pt")
        assert told == [str(tmp_path / "model.pt")]
        assert torch.load(place) == {"x": 1}

    in_child(work)


# --- shell ---


def test_a_funnel_gets_what_the_shell_says():
    code = """
said, started = [], []
funnel = shells.Funnel(shell, lambda *what: said.append(what), print, started.append)
from IPython.display import HTML, clear_output, display
display(HTML('<b>1</b>')); clear_output(wait=True)
shell.run_cell('1/0')
shell.run_cell("_ = get_ipython().run_cell('int([])')")
shell.run_cell('!true')
print([kind for kind, _ in said], list(said[0][1]['data']), funnel.error[:2], started)
"""
    assert in_ipython(code).strip() == (
        "['display_data', 'clear_output', 'error'] ['text/plain'] ('ZeroDivisionError', 'division by zero') ['!true']"
    )


def test_transform_number_the_cell_code_name_and_execute():
    code = """
import asyncio
body = '\\n%time x = 1\\n\\nlines = __import__("sys")._getframe().f_lineno'
code, failed = shells.transform(shell, '%%memtrack --predict T4', body)
assert failed is None and code.splitlines()[0] == '# %%memtrack --predict T4', code
funnel = shells.Funnel(shell, print, print, print)
funnel.number_the_cell(code)
name = shells.code_name(shell, code, 'raw')
before = shell.execution_count
events = []
for event in ('pre_execute', 'pre_run_cell', 'post_execute', 'post_run_cell'):
    shell.events.register(event, lambda *args, event=event: events.append(event))
error = asyncio.run(shells.execute(shell, 'raw', code, failed))
assert shell.user_ns['lines'] == 5, shell.user_ns['lines']
assert name == shell.compile.get_code_name('raw', code, before)
assert (error, before + 1) == (None, shell.execution_count)
print(events)
code, _ = shells.transform(shell, '%%memtrack', '%%python --version\\n1')
assert code.startswith('\\nget_ipython().run_cell_magic'), code
code, failed = shells.transform(shell, '%%memtrack', 'x = (')
error = asyncio.run(shells.execute(shell, 'raw', code, failed))
print(type(error).__name__)
"""
    out = in_ipython(code).splitlines()
    assert "['pre_execute', 'pre_run_cell', 'post_execute', 'post_run_cell']" in out
    assert out[-1] == "SyntaxError"


def test_publish_formatted_and_show_without():
    code = """
shells.publish(shell, 'display_data', {'data': {'text/plain': 'shown'}, 'metadata': {}, 'transient': {}})
shells.publish(shell, 'execute_result', {'data': {'text/plain': '42'}, 'metadata': {}, 'execution_count': 7})
shells.publish(shell, 'error', {'ename': 'E', 'evalue': 'v', 'traceback': ['a', 'b']})
def inner(): raise ValueError('text')
def outer(): inner()
try: outer()
except ValueError as error:
    assert shells.first_of_others(error.__traceback__, lambda file: False) is error.__traceback__
    assert shells.first_of_others(error.__traceback__, lambda file: True) is error.__traceback__
    assert 'ValueError' in shells.formatted(None, error, lambda file: False)[-1]
    assert 'ValueError' in ''.join(shells.formatted(shell, error, lambda file: False))
    shells.show_without(error, shell, lambda file: True)
    shell.showtraceback((ValueError, error, error.__traceback__))
    shells.show_as(error, lambda: ['as told'])
    shell.showtraceback((ValueError, error, error.__traceback__))
"""
    out = in_ipython(code)
    assert out.startswith("shown\nOut[7]: 42\na\nb\n")
    assert "inner()" not in out
    assert out.endswith("as told\n")


def test_a_spawned_shell_shows_results_as_outputs(tmp_path):
    code = f"""
look = shells.look(shell)
assert look['count'] == 1, look
InteractiveShell.clear_instance(); TerminalInteractiveShell.clear_instance()
from pathlib import Path
made = shells.spawned({{}}, Path({str(tmp_path)!r}), {{**look, 'count': 5}})
said = []
shells.Funnel(made, lambda *what: said.append(what), print, print)
made.run_cell('6 * 7', store_history=True)
print(said[0][0], said[0][1]['data'], said[0][1]['execution_count'])
"""
    assert in_ipython(code).strip() == "execute_result {'text/plain': '42'} 5"
