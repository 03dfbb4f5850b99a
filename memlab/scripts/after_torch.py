"""Call a function once the program has imported torch.

Scripts set environment variables before they import torch, which reads some of them while it is imported; and some never
import it. So `memlab run` does not import it for them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterTorch(MetaPathFinder):
    """A finder that finds only torch, once, and calls `then` when it has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def start(self) -> None:
        """Wait for torch; if it was imported before, call at once."""
        if "torch" in sys.modules:
            self._then()
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of torch, whose loader calls us; None for everything else."""
        if fullname != "torch":
            return None
        self.stop()
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                del loader.exec_module  # the loader stays on the module, as it was
                execute(module)
                self._then()

            loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
