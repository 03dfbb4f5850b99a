"""All workloads by name. `memlab.workloads` is the package and, like a mapping, the registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from memlab.errors import MemlabError
from memlab.workloads import bert, classic_vgg, densenet, gan, language, llama, lstm, mlp, residual, segmentation, vit
from memlab.workloads.workload import Workload, named

KNOWN = named(
    one
    for module in (mlp, classic_vgg, residual, densenet, segmentation, vit, language, llama, bert, lstm, gan)
    for one in module.WORKLOADS
)


class Workloads(ModuleType, Mapping[str, Workload]):
    """A module that is a mapping, name -> Workload: Python lets a module change its class (data model, 3.3.2.1)."""

    def __getitem__(self, name: str) -> Workload:
        try:
            return KNOWN[name]
        except (KeyError, TypeError):
            raise MemlabError(f"there is no workload {name!r:.80}. Known: {', '.join(KNOWN)}.") from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in KNOWN

    def get(self, name: str, default: Any = None) -> Any:  # Mapping's own expects a KeyError
        """The workload of that name, or `default`."""
        return KNOWN[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(KNOWN)

    def __len__(self) -> int:
        return len(KNOWN)

    # A module is itself and no other, whatever it holds: what keeps modules in sets and tables relies on it.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        width = max(map(len, KNOWN))
        return "\n".join(f"{one.name:<{width}}  {one.idea}" for one in KNOWN.values())

    def to_pandas(self) -> Any:
        """One row per workload and size, with its settings."""
        import pandas

        rows = [
            (one.name, size, one.idea, ", ".join(f"{key}={value}" for key, value in settings.items()))
            for one in KNOWN.values()
            for size, settings in one.sizes.items()
        ]
        return pandas.DataFrame(rows, columns=["name", "size", "idea", "settings"]).set_index(["name", "size"])
