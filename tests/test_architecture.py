"""What each package of memlab may import: the table below is the authority, and files never import each other in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "memlab"
BASE = {"by_name", "units", "errors", "torch_internals", "trace", "allocator", "analysis"}
MEASURE = BASE | {"probes", "prediction", "fake_cuda", "references", "saving_techniques", "workloads", "views"}

# package -> (what it may import from memlab, which third parties). A name with a dot allows that module alone.
# IPython.display is for making output, not for the shell.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "units": ({"errors"}, set()),  # parse_bytes refuses what is no size
    "cells": (set(), set()),
    "errors": (set(), set()),
    "by_name": (set(), set()),
    "trace": ({"units", "errors"}, {"numpy"}),
    # The block tracker follows events, and events are what the columns of a trace say they are.
    "allocator": ({"trace", "units", "errors"}, {"numpy"}),
    "analysis": ({"trace", "allocator", "by_name", "units", "errors"}, {"numpy", "pandas"}),
    # Private hooks of torch and IPython in one place, so that a new version of either is met in one package.
    "torch_internals": ({"errors"}, {"torch", "IPython", "ipykernel", "traitlets"}),
    # What is alive is found by the live storages of `references`; the probes learn from it what each block is for.
    "probes": ({"allocator", "references", "trace", "units", "errors", "torch_internals"},
               {"torch", "numpy", "pynvml", "psutil"}),
    # Fake tensors log their births as the CPU tracker does, and ask the allocator what it would hand out.
    "fake_cuda": ({"allocator", "probes", "trace", "units", "errors", "torch_internals"}, {"torch", "numpy"}),
    # A prediction is a probe of fake CUDA tensors: it marks and labels as the others do.
    "prediction": ({"fake_cuda", "probes", "references", "allocator", "analysis", "trace", "units", "errors", "torch_internals"},
                   {"torch", "numpy", "pandas", "pynvml", "cloudpickle"}),
    # Runs before torch is imported, and must not import it: cards are looked up without it.
    "simulated_gpu": ({"prediction.cards", "units", "errors"}, {"jupyter_client"}),
    "references": ({"trace", "units", "errors", "torch_internals"}, {"torch"}),
    "saving_techniques": ({"workloads", "by_name", "units", "errors", "torch_internals"}, {"torch", "pandas"}),
    "workloads": ({"by_name", "units", "errors"}, {"torch", "numpy", "pandas"}),
    # The live view hands its Stop button to the kernel, which is a private matter of ipykernel: hence torch_internals.
    "views": ({"analysis", "trace", "units", "errors", "torch_internals"},
              {"plotly", "anywidget", "ipywidgets", "traitlets", "numpy", "pandas", "IPython.display"}),
    # The models of other libraries; each is imported when a model is named.
    "language_models": ({"units", "errors"}, {"torch", "transformers", "accelerate", "peft"}),
    "api": (MEASURE | {"simulated_gpu", "language_models"}, {"torch", "numpy", "pandas", "IPython.display"}),
    "lesson": (MEASURE | {"api", "lab"}, {"torch", "ipywidgets", "pandas", "IPython.display"}),
    "lab": (MEASURE | {"api", "simulated_gpu"}, {"torch", "ipywidgets", "traitlets", "pandas", "IPython.display"}),
    # What is run outside notebooks: nothing of IPython, and torch only when the script has imported it.
    "scripts": ({"analysis", "api", "views", "units", "errors"}, {"torch", "psutil"}),
    # Whether a file can be written is asked before a script runs.
    "cli": ({"api", "language_models", "lesson", "prediction", "scripts", "simulated_gpu", "trace", "units", "errors"},
            {"torch"}),
    # The callbacks of trainers record as `memlab run` does, and take figures of traces as they are logged. Their batches are
    # nested as those of workloads are.
    "integrations": ({"analysis", "api", "prediction", "scripts", "torch_internals", "workloads.nested", "units", "errors"},
                     {"pytest", "torch", "transformers"}),
    "magics": (MEASURE | {"cells", "api", "lesson", "lab"}, {"IPython"}),
    # The public face: names are imported when they are asked for.
    "__main__": ({"__version__", "cli"}, set()),
    "__init__": (MEASURE | {"api", "lesson", "lab", "magics"}, set()),
}  # fmt: skip

# Imports that may only stand inside a function: (package, what).
LATE_ONLY = {
    *(("torch_internals", one) for one in ("IPython", "ipykernel", "traitlets")),
    *(("language_models", one) for one in ("torch", "transformers", "accelerate", "peft")),
    *((one, "pandas") for one in ("trace", "prediction", "saving_techniques", "workloads", "lab", "lesson")),
}


def breaches(package: Path) -> Iterator[str]:
    """One line for each import under `package` that the table does not allow."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0] not in ALLOWED:
            yield f"{'/'.join(parts)}: the package {parts[0]} is not in the table"
            continue
        for node, late in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{'/'.join(parts)}.py:{node.lineno}: relative import"
                continue
            for name in imported_names(node):
                if not is_allowed(parts[0], name, late):
                    yield f"{'/'.join(parts)}.py:{node.lineno}: {parts[0]} must not import {name}{'' if late else ' at the top'}"


def imports(tree: ast.AST, late: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement, those for type checkers included, and whether it waits for a call (or only types need it)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, late
        else:
            waits = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, late or waits or is_for_types(node))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names: `from memlab import units` may be the module memlab.units, and a name in a module begins like it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def is_allowed(package: str, name: str, late: bool) -> bool:
    ours, others = ALLOWED[package]
    top, _, rest = name.partition(".")
    if top == "memlab":
        return rest.split(".")[0] == package or covers(ours, rest)
    if (package, top) in LATE_ONLY:
        return late
    return top in sys.stdlib_module_names or covers(others, name)


def covers(allowed: set[str], name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)


def circles(package: Path) -> list[str]:
    """The groups of files that import each other in a circle: late imports and those for type checkers count."""
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    graph = {
        name: {target for node, _ in imports(ast.parse(path.read_text(encoding="utf-8"))) for one in imported_names(node)
               if (target := longest_known(one, files)) and target != name}
        for name, path in files.items()
    }  # fmt: skip
    return [" <-> ".join(sorted(group)) for group in strongly_connected(graph) if len(group) > 1]


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest_known(name: str, files: dict[str, Path]) -> str:
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


def repeated_class_names(package: Path) -> dict[str, list[str]]:
    """Class names that stand for more than one class, with the files that define them."""
    places: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_name(path, package))
    return {name: files for name, files in places.items() if len(files) > 1}


def strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Tarjan's algorithm, without recursion being a problem at this size."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            groups.append(set(stack[stack.index(node) :]))
            del stack[stack.index(node) :]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return groups


def test_every_package_keeps_to_the_table():
    assert list(breaches(PACKAGE)) == []


def test_no_files_import_each_other_in_a_circle():
    assert circles(PACKAGE) == []


def test_a_class_name_stands_for_one_class(tmp_path):
    # The callback has the same name for every trainer.
    callbacks = ["memlab.integrations.lightning", "memlab.integrations.transformers"]
    assert repeated_class_names(PACKAGE) == {"MemoryCallback": callbacks}
    package = toy(tmp_path, views__peak="class Peak: ...", analysis__peak="class Peak: ...")
    assert repeated_class_names(package) == {"Peak": ["memlab.analysis.peak", "memlab.views.peak"]}


def test_a_file_name_stands_for_one_thing_or_two_sides_of_it():
    # What is computed, asked for and shown: analysis/lines.py and views/lines.py.
    sides = {"analysis", "api", "views", "cli", "magics", "lesson"}
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.stem != "__init__":
            places.setdefault(path.stem, []).append(path.relative_to(PACKAGE).parts[0])
    repeated = {name: of for name, of in places.items() if len(of) > 1}
    assert {name: of for name, of in repeated.items() if len(of) > 2 or not {*of} <= sides} == {}


def toy(tmp_path: Path, **files: str) -> Path:
    """A package memlab with these files; `probes__nvml` is probes/nvml.py."""
    for name, text in files.items():
        path = tmp_path / "memlab" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path / "memlab"


@pytest.mark.parametrize(
    ("package", "text", "why"),
    [
        ("units", "import numpy", "units must not import numpy"),
        ("trace__file", "import pandas", "trace must not import pandas at the top"),
        ("analysis__peak", "def f():\n    import torch", "analysis must not import torch"),
        ("analysis__peak", "from memlab import views", "analysis must not import memlab.views"),
        ("analysis__peak", "import memlab.probes.nvml", "analysis must not import memlab.probes.nvml"),
        ("probes__nvml", "try:\n    import pandas\nexcept ImportError: pass", "probes must not import pandas"),
        ("views__size", "if TYPE_CHECKING:\n    from memlab.api import Run", "views must not import memlab.api"),
        ("views__live", "from IPython import get_ipython", "views must not import IPython"),
        ("torch_internals", "import IPython", "torch_internals must not import IPython at the top"),
        ("units", "import memlab", "units must not import memlab"),
        ("trace__file", "from .columns import Column", "relative import"),
        ("utils", "", "the package utils is not in the table"),
    ],
)
def test_a_breach_is_found(tmp_path, package, text, why):
    (found,) = breaches(toy(tmp_path, **{package: text}))
    assert why in found


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("trace__file", "def to_pandas():\n    import pandas"),
        ("trace__file", "if TYPE_CHECKING:\n    import pandas"),
        ("trace__file", "from memlab.trace.columns import Column\nfrom memlab.units import MiB\nimport os.path"),
        ("torch_internals", "def mode():\n    import torch._C"),
        ("views__live", "from IPython.display import display\nimport IPython.display"),
    ],
)
def test_what_the_table_allows_is_no_breach(tmp_path, package, text):
    assert list(breaches(toy(tmp_path, **{package: text}))) == []


def test_a_circle_behind_type_checking_is_found(tmp_path):
    package = toy(
        tmp_path,
        api__run="from memlab.api.report import show",
        api__report="if TYPE_CHECKING:\n    from memlab.api.run import Run",
        units="",
    )
    assert circles(package) == ["memlab.api.report <-> memlab.api.run"]


def test_no_module_replaces_a_public_name():
    """A package memlab/predict/ would replace memlab.predict() as soon as anything imports it."""
    python("""
        import importlib, pkgutil, memlab
        first = {name: getattr(memlab, name) for name in memlab.__all__}
        for module in pkgutil.walk_packages(memlab.__path__, "memlab."):
            if not module.name.endswith(("__main__", "integrations.lightning", "integrations.transformers")):  # libraries
                importlib.import_module(module.name)
        for name, thing in first.items():
            assert getattr(memlab, name) is thing, name
    """)


def python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


BLOCKED = """
    import sys
    absent = {"pandas", "plotly", "IPython", "ipykernel", "ipywidgets", "anywidget", "traitlets"}
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in absent:
                raise ModuleNotFoundError(f"{name} is not there", name=name)
    sys.meta_path.insert(0, Absent())
"""


def test_the_probes_need_torch_numpy_psutil_and_pynvml_alone():
    python(
        BLOCKED
        + """
    import importlib, pkgutil, memlab.probes, memlab.trace, memlab.allocator
    for package in (memlab.probes, memlab.trace, memlab.allocator):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    """
    )


def test_the_blocked_modules_are_really_absent():
    with pytest.raises(AssertionError, match="pandas is not there"):
        python(BLOCKED + "\n    import pandas\n")
