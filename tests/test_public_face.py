"""What users touch: the names of `memlab`, their docstrings, their errors."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import memlab
from memlab import errors
from memlab.errors import MemlabError

PACKAGE = Path(memlab.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("name", memlab.__all__)
def test_every_public_name_is_there_and_explained(name):
    thing = getattr(memlab, name)
    assert name in dir(memlab)
    if name not in ("__version__", "runs"):
        assert inspect.getdoc(thing)


def test_a_star_import_gives_the_public_names():
    space: dict = {}
    exec("from memlab import *", space)
    assert set(memlab.__all__) <= set(space)


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        alias.asname for node in ast.walk(tree) if isinstance(node, ast.If) for part in node.body
        if isinstance(part, ast.ImportFrom) for alias in part.names
    }  # fmt: skip
    assert typed == set(memlab._PUBLIC)


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'memlab' has no attribute 'nonsense'"):
        _ = memlab.nonsense
    assert not hasattr(memlab, "_repr_html_")


def test_importing_memlab_is_light_and_brings_up_nothing():
    code = """
import sys, threading, memlab
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "IPython", "plotly", "pandas", "anywidget"}))
print(threading.active_count())
memlab.MemlabError
print("torch" in sys.modules)
memlab.runs; print("plotly" in sys.modules, "pandas" in sys.modules, "anywidget" in sys.modules, "IPython" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "1", "False", "False False False False"]


def test_measuring_needs_no_notebook_packages():
    code = """
import sys, memlab
with memlab.track("light", show=False) as run: pass
run.report().text
print(sorted({name.partition(".")[0] for name in sys.modules} & {"IPython", "plotly", "pandas", "anywidget", "ipywidgets"}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- docstrings, style and errors, as the files tell ---


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_explain_themselves_and_functions_stay_short(path):
    tree = ast.parse(path.read_text("utf-8"))
    text = ast.get_docstring(tree)
    assert text, "no docstring"
    assert text.splitlines()[0].rstrip(), "a module begins with one sentence"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and node in tree.body:
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_every_error_of_ours_has_one_base():
    ours = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    assert all(issubclass(thing, MemlabError) for thing in ours)


# RuntimeError and the like may be raised where only our own code sees them.
ALLOWED_ELSEWHERE = {"AttributeError", "StopIteration", "AssertionError", "NotImplementedError"}
# What stands for PyTorch, the file system or pickle raises what these raise.
STANDS_FOR = {
    "__main__.py": {"SystemExit"},
    "predictor": {
        "RuntimeError",
        "TypeError",
        "ValueError",
        "IndexError",
        "OutOfMemoryError",
        "PicklingError",
        "OSError",
        "PermissionError",
        "ConnectionRefusedError",
        "FileExistsError",
        "FileNotFoundError",
        "IsADirectoryError",
        "NotADirectoryError",
    },
    "seams": {"OSError"},
    "views": {"ValueError"},  # caught inside
    "trace": {"ValueError"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_raised_is_ours(path):
    ours = {name for name, thing in vars(errors).items() if isinstance(thing, type)} | {"UsageError", "OutOfMemory"}
    room = path.relative_to(PACKAGE).parts[0]
    tree = ast.parse(path.read_text("utf-8"))
    is_private = path.parent != PACKAGE  # classes of errors that a room makes for itself, and catches
    made_here = {node.name for file in path.parent.glob("*.py") for node in ast.parse(file.read_text("utf-8")).body
                 if is_private and isinstance(node, ast.ClassDef)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if (
                name.lstrip("_")[:1].islower() or name in made_here
            ):  # a function that makes the error, a class of the module
                continue
            assert name in ours | ALLOWED_ELSEWHERE | STANDS_FOR.get(room, set()), f"line {node.lineno} raises {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_are_one_line(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    assert "\n" not in part.value, f"line {node.lineno}"
