"""The places where IPython keeps errors and outputs are where `torch_internals.traceback` looks, checked on a real shell.

A failure here names what a new version of IPython changed.
"""

from __future__ import annotations

import sys
import textwrap

import pytest
from processes import python

from memlab.references.release import all_errors, first_argument, in_words
from memlab.torch_internals import traceback as kept


def in_a_shell(code: str) -> str:
    """What code prints in a process of its own that has an IPython shell."""
    start = """
        import sys
        from IPython.core.interactiveshell import InteractiveShell
        from memlab.torch_internals import traceback as kept
        shell = InteractiveShell.instance()
        def run(cell):
            return shell.run_cell(cell, store_history=True, silent=False)
    """
    program = textwrap.dedent(start) + textwrap.dedent(code)
    return python("-c", program).splitlines()[-1]


def test_ipython_keeps_an_error_in_each_of_these_places_and_forgets_it():
    said = in_a_shell("""
        run("1/0")
        error = shell.last_execution_result.error_in_exec
        places = [sys.last_value is error, type(sys.last_traceback).__name__, type(shell.InteractiveTB.tb).__name__]
        found = places, [each is error for each in kept.kept_errors(shell)], len(kept.kept_tracebacks(shell))
        run("x = ")
        count = len(kept.kept_errors(shell)), shell.last_execution_result.execution_count
        kept.forget_errors(shell)
        left = kept.kept_errors(shell), kept.kept_tracebacks(shell), shell.InteractiveTB.pdb
        result = shell.last_execution_result
        again = result.success, result.execution_count == count[1], run("3").result, run("1/0").success
        print(*found, count[0] >= 2, left, *again)
    """)
    errors = "[True, True, True]" if sys.version_info >= (3, 12) else "[True, True]"
    assert said == f"[True, 'traceback', 'traceback'] {errors} 2 True ([], [], None) True True 3 False"


def test_what_the_debugger_keeps_is_forgotten():
    said = in_a_shell("""
        import builtins
        answers = iter(["p 'here'", "q"])
        import IPython.core.debugger as debugger
        debugger.Pdb.cmdloop = lambda self, intro=None: self.onecmd("p 1")
        run("def f():\\n    local = 1\\n    1/0")
        run("f()")
        run("%debug")
        pdb = shell.InteractiveTB.pdb
        names = [name for name in shell.user_ns if "pdb" in name]
        kept.forget_errors(shell)
        print(pdb is not None, shell.InteractiveTB.pdb, [name for name in shell.user_ns if "pdb" in name])
    """)
    assert said == "True None []"


def test_outputs_have_these_names_and_are_forgotten_under_all_of_them():
    said = in_a_shell("""
        run("'first'")
        run("object()")
        value = shell.user_ns["_"]
        before = kept.outputs(shell)
        names = [name for name, each in before.items() if each is value]
        forgotten = kept.forget_output(shell, value)
        after = [name for name, each in kept.outputs(shell).items() if each is value]
        hidden = [name for name, each in shell.user_ns_hidden.items() if each is value]
        holders = value in shell.user_ns.values(), shell.last_execution_result.result
        run("'next'")
        print(names == forgotten, names, after, hidden, holders, shell.user_ns["_"], shell.user_ns["Out"][1])
    """)
    assert said == "True ['Out[2]', '_2', '_'] [] [] (False, None) next first"


def test_a_users_own_underscore_is_no_output():
    said = in_a_shell("""
        run("[1]")
        run("_ = 'mine'; _1 = 'mine too'")
        value = shell.user_ns["Out"][1]
        print(list(kept.outputs(shell)), kept.forget_output(shell, value), shell.user_ns["_"], shell.user_ns["_1"])
    """)
    assert said == "['Out[1]'] ['Out[1]'] mine mine too"


def test_without_a_shell_there_is_nothing_of_it():
    assert kept.running_shell() is None or "IPython" in sys.modules
    assert kept.kept_errors(None) == [vars(sys)[name] for name in ("last_exc", "last_value") if name in vars(sys)]
    assert [each for each in kept.kept_tracebacks(None) if each is not vars(sys).get("last_traceback")] == []


# --- errors ---


class Lying(Exception):
    """An error whose class answers every question with one of its own."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"user code was asked for {name}")

    def __str__(self) -> str:
        raise AssertionError("user code was run")


def test_no_code_of_an_error_is_run():
    error = Lying("a text")
    assert first_argument(error) == "a text"
    assert in_words(error) == "Lying: a text"
    assert list(all_errors([error])) == [error]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(), "ValueError"),
        (ValueError(3), "ValueError"),
        (KeyError("a\nb"), "KeyError: a b"),
        (ValueError("x" * 200), "ValueError: " + "x" * 99 + "…"),
    ],
)
def test_an_error_in_one_line(error, words):
    assert in_words(error) == words


def test_all_errors_of_a_chain_each_once_the_nearest_first():
    first, second, third = ValueError(1), KeyError(2), OSError(3)
    group = ExceptionGroup("many", [second, third])
    group.__cause__, second.__context__, third.__cause__ = first, first, group
    assert list(map(type, all_errors([group, group]))) == [ExceptionGroup, ValueError, KeyError, OSError]


def test_a_chain_of_a_hundred_thousand_errors_is_no_problem():
    last = first = ValueError(0)
    for number in range(100_000):
        following = ValueError(number)
        last.__context__, last = following, following
    assert sum(1 for _ in all_errors([first])) == 100_001
    link = first
    while link is not None:  # freed one by one: Python itself would go down into them
        link.__context__, link = None, link.__context__
