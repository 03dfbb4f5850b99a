"""Raise an exception in another thread, and withdraw it: CPython's asynchronous exceptions.

PyThreadState_SetAsyncExc is public C API (CPython 3.11 to 3.13). What is private is how the interpreter notices: a flag of
all threads makes every bytecode look for something to do, until the exception is raised (`pending.async_exc` in
Python/ceval_gil.c). It stays up where the exception is withdrawn with NULL, or its thread ends first; with a trace function
on, CPython 3.11 then runs in a circle at the next function that is called (DO_TRACING in Python/ceval.c).
"""

from __future__ import annotations

import ctypes
import threading


class _Withdrawn(BaseException):
    """Raised, and caught, in the place of what was taken back."""


def break_into(thread: int, error: type[BaseException]) -> None:
    """Have this raised in the thread of that `ident` as soon as it runs Python. It has to take it, or call `take_back`."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def take_back() -> None:
    """Withdraw what may be waiting for this thread, whether it came or not; nothing may be sent meanwhile."""
    try:
        break_into(threading.get_ident(), _Withdrawn)  # in the place of what waits
        while True:
            pass  # it is raised at the end of a round
    except _Withdrawn:
        pass
