"""What users touch: the names of `memlab`, their docstrings, their errors."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from processes import python

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
heavy = {"torch", "numpy", "IPython", "plotly", "pandas", "ipywidgets", "anywidget"}
print(sorted({name.partition(".")[0] for name in sys.modules} & heavy))
print(threading.active_count())
memlab.MemlabError
print("torch" in sys.modules)
memlab.runs; print("plotly" in sys.modules, "pandas" in sys.modules, "anywidget" in sys.modules, "IPython" in sys.modules)
"""
    assert python("-c", code).splitlines() == ["[]", "1", "False", "False False False False"]


def test_measuring_needs_no_notebook_packages():
    code = """
import sys, memlab
with memlab.track("light", show=False) as run: pass
run.report().text
print(sorted({name.partition(".")[0] for name in sys.modules} & {"IPython", "plotly", "pandas", "anywidget", "ipywidgets"}))
"""
    assert python("-c", code).strip() == "[]"


# What stands for PyTorch, the file system or pickle raises what these raise; views catch theirs inside, argparse its own.
OTHER_ERRORS = {
    "AttributeError",
    "StopIteration",
    "AssertionError",
    "NotImplementedError",
    "SystemExit",
    "ArgumentTypeError",
}
STANDS_FOR_OTHERS = {"prediction", "fake_cuda", "torch_internals", "trace", "views"}


def test_errors_are_ours_and_one_line():
    """A user sees a MemlabError of one line: what is wrong, the value, what to do."""
    ours = {name for name, thing in vars(errors).items() if isinstance(thing, type)} | OTHER_ERRORS | {"UsageError"}
    assert all(issubclass(thing, MemlabError) for thing in vars(errors).values() if isinstance(thing, type))
    trees = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
    private = {node.name for path, tree in trees.items() if path.parent != PACKAGE  # made and caught inside a package
               for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}  # fmt: skip
    wrong = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            package = path.relative_to(PACKAGE).parts[0]
            is_made_elsewhere = name.lstrip("_")[:1].islower() or name in private or package in STANDS_FOR_OTHERS
            if name not in ours and not is_made_elsewhere:
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} raises {name}")
            texts = (
                part.value
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            if any("\n" in text for text in texts):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: a message of several lines")
    assert wrong == []
