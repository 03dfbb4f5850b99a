"""Which module is running, by path: a stack that hooks keep while the modules hold copies of their attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_KEY = "memlab.size"
_MAX_PATHS = 1000
"""How many paths to one module are known by name."""

After = Callable[[str, nn.Module, Any], None]


class Layers:
    """The modules of a model, each once (`modules`) and with every path it has (`every`), and those that run now.

    A module with several paths is named by the one below the module that calls it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths: dict[int, list[str]] = {}
        self.modules: list[nn.Module] = []
        self.every: list[tuple[str, nn.Module]] = []
        self._failed = (0, "")
        self._stack: list[tuple[int, str]] = []
        todo: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
        while todo:
            path, module, above = todo.pop()
            known = self.paths.setdefault(id(module), [])
            if not known:
                self.modules.append(module)
            if len(known) < _MAX_PATHS:
                known.append(path)
                self.every.append((path, module))
                below = above | {id(module)}
                children = [(name, child, below) for name, child in _children(module, path) if id(child) not in below]
                todo += reversed(children)

    @property
    def current(self) -> str:
        """The path of the innermost module that runs."""
        return self._stack[-1][1] if self._stack else ""

    def reset(self) -> None:
        """Forget what was running when a forward ended early."""
        self._stack.clear()

    def where(self, error: BaseException) -> str:
        """The path of the innermost module that this error came out of."""
        return self._failed[1] if self._failed[0] == id(error) else self.current

    def first_path(self, module: nn.Module) -> str:
        """The path by which a module is met first."""
        return self.paths[id(module)][0]

    def watch(self, after: After) -> None:
        """Follow the modules' calls by hooks in their (exchanged) attributes; `after` is told of every result."""
        end = self._end(after)
        for module in self.modules:
            attributes = module.__dict__
            if "_forward_hooks" not in attributes:
                continue  # nn.Module.__init__ was not called: its own error says so
            attributes["_forward_pre_hooks"][_KEY] = self._begin
            attributes["_forward_pre_hooks"].move_to_end(_KEY, last=False)
            attributes["_forward_hooks"][_KEY] = end
            attributes["_forward_hooks_always_called"][_KEY] = True

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append((id(module), self._path(module)))

    def _end(self, after: After) -> Callable[[nn.Module, Any, Any], None]:
        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            while self._stack:
                number, path = self._stack.pop()
                if number == id(module):
                    break
            else:
                return
            error = sys.exc_info()[1]
            if output is not None:
                after(path, module, output)
            elif error is not None and self._failed[0] != id(error):
                self._failed = id(error), path

        return end

    def _path(self, module: nn.Module) -> str:
        paths = self.paths[id(module)]
        below = f"{self.current}." if self._stack and self.current else ""
        return next((path for path in paths if path.startswith(below)), paths[0])


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.__dict__.get("_modules", {}).items():
        if child is not None:
            yield (f"{path}.{name}" if path else name), child
