"""A notebook's namespace for tests: code runs in it as cells do, and it is `__main__` as long as the test runs."""

from __future__ import annotations

import gc
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memlab.names.census import paths


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


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    """An empty notebook; what was in it is gone when the test ends."""
    found = Notebook(monkeypatch)
    yield found
    found.names.clear()
    gc.collect()
