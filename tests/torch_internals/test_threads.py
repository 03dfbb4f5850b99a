"""Breaking into threads: it arrives, it can be taken back, and the interpreter is as it was afterwards."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from processes import python

from memlab.torch_internals import threads

SENT = "threads.break_into(threading.get_ident(), KeyboardInterrupt)"
PROGRAM = """
import sys, threading
from memlab.torch_internals import threads

def work():
    try:
        {work}
        threads.take_back()
    except KeyboardInterrupt:
        pass

thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.settrace(lambda *event: None)
(lambda: None)()  # CPython 3.11 hangs here where the interpreter still looks for an exception
sys.settrace(None)
print("went on")
"""


def test_it_arrives_in_the_thread_and_nowhere_else():
    came = []

    def work() -> None:
        try:
            while True:
                time.sleep(0.005)
        except KeyboardInterrupt:
            came.append(threading.get_ident())

    thread = threading.Thread(target=work)
    thread.start()
    threads.break_into(thread.ident, KeyboardInterrupt)
    thread.join(120)
    assert came == [thread.ident]


def test_what_is_taken_back_does_not_come():
    threads.take_back()  # where nothing waits
    came = []

    def work() -> None:
        try:
            threads.take_back()
            time.sleep(0.05)
        except KeyboardInterrupt:
            came.append("too late")

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not came


@pytest.mark.parametrize("work", ["pass", SENT])
def test_trace_functions_work_afterwards(work):
    assert python("-c", PROGRAM.format(work=work), timeout=300) == "went on\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions trace in another way")
def test_the_plain_way_to_withdraw_still_hangs():
    """Else `take_back` is not needed any more."""
    plain = (
        "import ctypes; ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None); return"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", PROGRAM.format(work=plain)], timeout=10, check=False)
