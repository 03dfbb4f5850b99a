"""`run.modules()`: the module tree of a run, with its notebook form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memlab.analysis.modules import Module, ModuleTree
from memlab.analysis.modules import modules as modules_of
from memlab.errors import MemlabError
from memlab.views import modules as views

if TYPE_CHECKING:
    from memlab.session.run import Run


class RunModules(Mapping[str, Module]):
    """Path -> module, with all that it held and needed: `print` it, let a notebook show it, or take `figure`."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree

    def __getitem__(self, path: str) -> Module:
        return self.tree[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __contains__(self, path: object) -> bool:
        return path in self.tree

    def get(self, path: str, default: Any = None) -> Any:
        """The module of that path, or `default`."""
        return self.tree.get(path, default)

    @property
    def text(self) -> str:
        """The tree in words."""
        return views.text(self.tree)

    @property
    def html(self) -> str:
        """The tree to unfold."""
        return views.html(self.tree)

    @property
    def figure(self) -> Any:
        """A plotly figure: each module a tile as large as what it held at the peak."""
        return views.figure(self.tree)

    def to_pandas(self) -> Any:
        """One row per module, sizes in bytes."""
        return self.tree.to_pandas()

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}


def modules(run: Run, device: int | None = None) -> RunModules:
    """The modules of a run, on the device with the largest peak unless another is named (-1: the CPU)."""
    if device is None and not run.devices:
        raise MemlabError(f"run {run.name!r} used no device of those it measured: there are no modules to show.")
    index = run.devices[0].device.index if device is None else device
    return RunModules(modules_of(run.trace, index))
