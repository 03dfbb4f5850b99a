"""One kernel for each file of tests, whose first cells are the file's SETUP."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from kernel import Kernel, kernel

if sys.platform == "win32":  # kernels are started and interrupted as POSIX does
    collect_ignore_glob = ["test_[!o]*.py", "test_oom.py"]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("notebook"), *request.module.SETUP) as found:
        yield found


@pytest.fixture
def leaves_the_kernel_as_it_was(notebook: Kernel) -> Iterator[None]:
    """Names, threads, hooks, files: whatever a test does in its cells, memlab leaves none of its own."""
    notebook.ok("import gc, os; from leftovers import leftovers, record; _before = record(); _names = set(globals())")
    yield
    # IPython puts a new excepthook in place for every cell.
    left = "[line for line in leftovers(_before) if not line.startswith('exception hooks')]"
    reply = notebook.run(f"gc.collect(); print({left}, sorted(os.listdir()))")
    assert reply.stdout.strip() in ("[] ['ipython']", "[] []"), reply.stdout + reply.traceback
