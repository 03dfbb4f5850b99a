"""A notebook's namespace for tests: code runs in it as cells do, and it is `__main__` as long as the test runs."""

from __future__ import annotations

import gc
import itertools
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memlab.references import graphs, roots
from memlab.references.live_storages import paths
from memlab.references.walk import Root


class Notebook:
    """`run` code in it, ask for the `key` of a tensor's storage by an expression."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        self.names: dict[str, Any] = module.__dict__
        self.names["torch"] = torch

    def run(self, code: str) -> None:
        """Run a cell."""
        exec(compile(textwrap.dedent(code), "cell.py", "exec"), self.names)

    def value(self, expression: str) -> Any:
        return eval(expression, self.names)

    def key(self, expression: str) -> int:
        """The key of the storage behind a tensor."""
        return self.value(f"({expression}).untyped_storage()._cdata")

    def paths(self, expression: str) -> list[str]:
        """Every path to a tensor, which no variable of the test holds meanwhile."""
        return paths(self.value(expression))


def few_roots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches meet neither pytest nor the modules that were there before the test.

    Both grow with the number of tests, and a search for what has no name looks through all of it. In a kernel, as
    tests/magics has it, nothing is left out.
    """
    modules, namespaces, known = roots.modules, roots.namespaces, set(sys.modules) - {"__main__"}
    session, config = request.session, request.config
    machinery = (session, config, config.pluginmanager, session._fixturemanager, request.node, request)

    def later_modules() -> Iterator[Root]:
        names = {name: module for name, module in sys.modules.items() if name not in known}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(roots, "sys", types.SimpleNamespace(modules=names))
            yield from [*modules()]

    monkeypatch.setattr(roots, "modules", later_modules)
    monkeypatch.setattr(roots, "namespaces", lambda: itertools.chain(namespaces(), machinery))


@pytest.fixture
def notebook(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """An empty notebook; what was in it is gone when the test ends, and what earlier tests left is gone before it begins.

    An earlier test may have come to the end of what may be looked at of graphs (PyTorch 2.13 and later), which holds for
    the process until a search meets no graph; the graph at whose end it came is gone.
    """
    gc.collect()
    gc.freeze()  # what earlier tests imported would make every search slow
    monkeypatch.setattr(graphs.look_limit, "is_closed", False)
    few_roots(request, monkeypatch)
    found = Notebook(monkeypatch)
    yield found
    found.names.clear()
    gc.collect()
