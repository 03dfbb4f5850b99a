"""What a forked child inherits and uses: files, connections, shared memory, loaders and pools of the parent stay as they are."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from in_child import fine
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import signal_handling

from memlab.prediction.child import current

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")


def test_a_file_open_for_writing_gets_nothing_from_the_child(tmp_path):
    path = tmp_path / "log.txt"
    with path.open("w") as appending, (tmp_path / "other").open("wb") as untouched:
        appending.write("parent\n")
        appending.flush()

        def work():
            print("child", file=appending, flush=True)
            assert appending.tell() == len("parent\nchild\n")

        outcome = fine(work)
        appending.write("parent again\n")
        untouched.write(b"x")
    assert path.read_text() == "parent\nparent again\n"
    assert outcome.refused == (f"writing '{path}', which was open",)


def test_a_file_open_for_reading_keeps_its_position(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("".join(f"{n}\n" for n in range(100_000)))
    with path.open("rb", buffering=0) as file:
        assert file.read(2) == b"0\n"

        def work():
            assert file.read(4) == b"1\n2\n"

        fine(work)
        assert file.read(4) == b"1\n2\n"


def test_a_connection_says_nothing_to_its_peer():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)

        def work():
            with pytest.raises(OSError):
                ours.sendall(b"child")

        fine(work)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        ours.sendall(b"parent")
        assert theirs.recv(10) == b"parent"


def test_a_program_that_runs_hears_nothing_of_the_child():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:

        def work():
            program.stdin.write(b"child\n")
            program.stdin.flush()

        fine(work)
        assert program.communicate(b"parent\n")[0] == b"parent\n"


@pytest.mark.parametrize("kind", ["shared tensor", "memmap", "anonymous mmap"])
def test_shared_memory_is_not_shared_with_the_child(tmp_path, kind):
    if kind == "shared tensor":
        array = torch.zeros(100_000).share_memory_().numpy()
    elif kind == "memmap":
        array = np.memmap(tmp_path / "data", dtype="f4", mode="w+", shape=(100_000,), offset=4096)
    else:
        array = np.frombuffer(mmap.mmap(-1, 400_000), dtype="f4")
    array[:] = 3

    def work():
        assert (array == 3).all()
        array[:] = 5
        assert (array == 5).all()

    fine(work)
    assert (array == 3).all()
    array[0] = 4  # it is still writable, and still the file's
    if kind == "memmap":
        array.flush()
        assert np.fromfile(tmp_path / "data", dtype="f4", offset=4096)[0] == 4


def loader(**options) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(32.0)), batch_size=2, num_workers=2, **options)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_is_being_read_goes_on(persistent, monkeypatch):
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", True)  # or torch leaves a handler
    data = loader(persistent_workers=persistent)
    iterator = iter(data)
    first = next(iterator)[0]

    def work():
        nonlocal iterator
        assert len(list(data)) == 16  # with workers of its own
        with pytest.raises(Exception, match="belong to the notebook"):
            next(iterator)
        first.add_(1)  # a batch lies in memory that the workers share
        iterator = None  # its end must not reach the workers

    fine(work)
    assert first.tolist() == [0, 1]
    assert len(list(iterator)) == 15
    if persistent:
        assert len(list(data)) == 16
        data._iterator._shutdown_workers()


def test_a_pool_of_threads_starts_threads_anew():
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]

        def work():
            assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]

        fine(work)
        assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]


def test_an_event_loop_that_runs_is_left_alone():
    async def inside():
        task = asyncio.create_task(asyncio.sleep(0.01, "slept"))

        def work():
            async def other():
                return await asyncio.sleep(0, "other")

            assert asyncio.run(other()) == "other"

        fine(work)
        return await task

    assert asyncio.run(inside()) == "slept"


def test_no_end_and_no_warning_of_the_parent_comes_from_the_child():
    code = (
        "import atexit, threading, warnings, weakref; warnings.simplefilter('error')\n"
        "from memlab.prediction.child import Child\n"
        "class Thing: pass\n"
        "thing = Thing(); weakref.finalize(thing, print, 'finalized'); atexit.register(print, 'exit')\n"
        "stop = threading.Event(); threading.Thread(target=stop.wait).start()\n"
        "print('unflushed', end=' ')\n"
        "print(Child().run(lambda channel: b'ok').result); stop.set()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert sorted(done.stdout.split()) == ["b'ok'", "exit", "finalized", "unflushed"]
    assert done.stderr == ""


def test_the_work_may_use_a_folder_for_temporary_files():
    def work():
        scratch = current().scratch
        assert tempfile.gettempdir() == str(scratch)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sub").mkdir()
            Path(folder, "sub", "file").write_text("text")
            os.replace(Path(folder, "sub", "file"), Path(folder, "moved"))  # noqa: PTH105
        Path(scratch, "kept").write_text("text")
        print(scratch)

    outcome = fine(work)
    assert outcome.refused == ()
    assert Path(outcome.printed.strip()).name.startswith("memlab-")
    assert not Path(outcome.printed.strip()).exists()
