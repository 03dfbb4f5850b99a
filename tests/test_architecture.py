"""The rooms of memlab import only what the table in the design allows; this is that table."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "memlab"
ROOMS_OF_SESSION = {
    "units", "errors", "seams", "trace", "allocator", "analysis", "probes", "predictor", "names", "savings",
    "sizes", "workloads", "views",
}  # fmt: skip

# room -> (what it may import from memlab, which third parties). A name with a dot allows that module alone.
# IPython.display is for making output, not for the shell.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "units": ({"errors"}, set()),  # parse_bytes refuses what is no size
    "cells": (set(), set()),
    "errors": (set(), set()),
    "trace": ({"units", "errors"}, {"numpy"}),
    # The books follow events, and events are what the columns of a trace say they are.
    "allocator": ({"trace.columns", "units", "errors"}, {"numpy"}),
    "analysis": ({"trace", "allocator", "units", "errors"}, {"numpy", "pandas"}),
    # Private hooks of torch and IPython in one place, so that a new version of either is met in one file.
    "seams": ({"errors"}, {"torch", "IPython", "ipykernel", "traitlets"}),
    # What is alive is found by the census of names; the probes tell from it what each block is for.
    "probes": ({"allocator", "names", "trace", "units", "errors", "seams"}, {"torch", "numpy", "pynvml", "psutil"}),
    # A prediction is a probe of pretend tensors: it marks and claims as the others do.
    "predictor": (
        {"probes", "names", "allocator", "trace", "units", "errors", "seams"},
        {"torch", "numpy", "pandas", "pynvml"},
    ),
    "names": ({"trace", "units", "errors", "seams"}, {"torch"}),
    # What a step will take, before it runs: a rehearsal of the forward on tensors without data.
    "sizes": ({"units", "errors", "seams"}, {"torch", "pandas"}),
    "savings": ({"workloads", "units", "errors", "seams"}, {"torch", "pandas"}),
    "workloads": ({"units", "errors"}, {"torch", "numpy", "pandas"}),
    # The live view hands its Stop button to the kernel, which is a private matter of ipykernel: hence seams.
    "views": (
        {"analysis", "trace", "units", "errors", "seams"},
        {"plotly", "anywidget", "ipywidgets", "traitlets", "numpy", "pandas", "IPython.display"},
    ),
    "session": (ROOMS_OF_SESSION, {"torch", "numpy", "pandas", "IPython.display"}),
    "lesson": (ROOMS_OF_SESSION | {"session", "lab"}, {"torch", "ipywidgets", "pandas", "IPython.display"}),
    "lab": (ROOMS_OF_SESSION | {"session"}, {"torch", "ipywidgets", "traitlets", "pandas", "IPython.display"}),
    "magics": (ROOMS_OF_SESSION | {"cells", "session", "lesson", "lab"}, {"IPython"}),
    # The public face: names are imported when they are asked for.
    "__main__": ({"predictor", "session"}, set()),
    "__init__": (ROOMS_OF_SESSION | {"session", "lesson", "lab", "magics"}, set()),
}

# Imports that may only stand inside a function: (room, what).
LATE_ONLY = {
    ("trace", "pandas"),
    ("seams", "IPython"),
    ("seams", "ipykernel"),
    ("seams", "traitlets"),
    ("predictor", "pandas"),
    ("savings", "pandas"),
    ("workloads", "pandas"),
    ("lab", "pandas"),
    ("lesson", "pandas"),
}


def breaches(package: Path) -> list[str]:
    """One line for each import under `package` that the table does not allow."""
    return [line for path in sorted(package.rglob("*.py")) for line in breaches_of(path, package)]


def breaches_of(path: Path, package: Path) -> Iterator[str]:
    parts = path.relative_to(package).with_suffix("").parts
    room = parts[0]
    if room not in ALLOWED:
        yield f"{'/'.join(parts)}: the room {room} is not in the table"
        return
    for node, late in imports(ast.parse(path.read_text(encoding="utf-8")), late=False):
        where = f"{'/'.join(parts)}.py:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{where}: relative import"
            continue
        for name in imported(node):
            if not may(room, name, late):
                yield f"{where}: {room} must not import {name}{' at the top' if late_only(room, name) else ''}"


def imports(tree: ast.AST, late: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement, and whether it waits for a call; those for type checkers alone do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, late
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), late)
        else:
            yield from imports(node, late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names: `from memlab import units` may be the module memlab.units, and a name in a module begins like it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def may(room: str, name: str, late: bool) -> bool:
    ours, others = ALLOWED[room]
    top, _, rest = name.partition(".")
    if top == PACKAGE.name:
        return rest.split(".")[0] == room or covers(ours, rest)
    if late_only(room, name):
        return late
    return top in sys.stdlib_module_names or covers(others, name)


def late_only(room: str, name: str) -> bool:
    return (room, name.partition(".")[0]) in LATE_ONLY


def covers(allowed: set[str], name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def test_every_room_keeps_to_the_table():
    assert breaches(PACKAGE) == []


def toy(tmp_path: Path, **files: str) -> list[str]:
    """The breaches of a package memlab with these files; `probes__nvml` is probes/nvml.py."""
    for name, text in files.items():
        path = tmp_path / "memlab" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return breaches(tmp_path / "memlab")


@pytest.mark.parametrize(
    ("room", "text", "why"),
    [
        ("units", "import numpy", "units must not import numpy"),
        ("trace__file", "import pandas", "trace must not import pandas at the top"),
        ("analysis__peak", "import torch", "analysis must not import torch"),
        ("analysis__peak", "def f():\n    import torch", "analysis must not import torch"),
        ("analysis__peak", "from memlab.views import table", "analysis must not import memlab.views"),
        ("analysis__peak", "from memlab import views", "analysis must not import memlab.views"),
        ("analysis__peak", "import memlab.probes.nvml", "analysis must not import memlab.probes.nvml"),
        ("probes__nvml", "try:\n    import pandas\nexcept ImportError: pass", "probes must not import pandas"),
        ("probes__nvml", "from memlab.session import Run", "probes must not import memlab.session"),
        ("predictor__step", "from memlab.session import run", "predictor must not import memlab.session"),
        ("views__live", "from IPython import get_ipython", "views must not import IPython"),
        ("views__live", "import IPython", "views must not import IPython"),
        ("seams", "import IPython", "seams must not import IPython at the top"),
        ("session", "from memlab.magics import track", "session must not import memlab.magics"),
        ("units", "import memlab", "units must not import memlab"),
        ("trace__file", "from . import columns", "relative import"),
        ("trace__file", "from .columns import Column", "relative import"),
        ("utils", "", "the room utils is not in the table"),
    ],
)  # fmt: skip
def test_a_breach_is_found(tmp_path, room, text, why):
    found = toy(tmp_path, **{room: text})
    assert len(found) == 1
    assert why in found[0]


@pytest.mark.parametrize(
    ("room", "text"),
    [
        ("trace__file", "def to_pandas():\n    import pandas"),
        ("trace__file", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas"),
        ("trace__file", "from memlab.trace.columns import Column\nfrom memlab.units import MiB\nimport os.path"),
        ("seams", "def mode():\n    import torch._C"),
        ("predictor__step", "from memlab.probes.marks import Marks\nfrom memlab.probes import dispatch"),
        ("views__live", "from IPython.display import display\nimport IPython.display"),
        ("magics", "import IPython\nfrom memlab.session import track\nfrom memlab.views.html import page"),
    ],
)
def test_what_the_table_allows_is_no_breach(tmp_path, room, text):
    assert toy(tmp_path, **{room: text}) == []


def python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_memlab_loads_nothing_heavy():
    python("""
        import sys, memlab
        heavy = {"torch", "IPython", "plotly", "pandas", "numpy", "ipywidgets", "anywidget"}
        loaded = heavy & set(sys.modules)
        assert not loaded, f"import memlab alone loads {loaded}"
    """)


BLOCKED = """
    import sys
    absent = {"pandas", "plotly", "IPython", "ipykernel", "ipywidgets", "anywidget", "traitlets"}
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in absent:
                raise ModuleNotFoundError(f"{name} is not there", name=name)
    sys.meta_path.insert(0, Absent())
"""


@pytest.mark.skipif(not (PACKAGE / "probes").exists(), reason="memlab.probes is not written yet")
def test_the_probes_need_torch_numpy_psutil_and_pynvml_alone():
    python(
        BLOCKED
        + """
    import importlib, pkgutil, memlab.probes, memlab.trace, memlab.allocator
    for room in (memlab.probes, memlab.trace, memlab.allocator):
        for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
            importlib.import_module(module.name)
    """
    )


def test_the_blocked_modules_are_really_absent():
    with pytest.raises(AssertionError, match="pandas is not there"):
        python(BLOCKED + "\n    import pandas\n")
