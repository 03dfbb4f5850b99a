"""A mapping over the items that an object keeps by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item")


class ByName(Mapping[str, Item]):
    """Name -> item, by the mapping `_known` of the object; a subclass may say more of a name that is not there."""

    __slots__ = ()
    _known: Any

    def __getitem__(self, name: str) -> Item:
        try:
            found: Item = self._known[name]
        except (KeyError, TypeError):  # what cannot be hashed is no name
            raise self._unknown(name) from None
        return found

    def _unknown(self, name: str) -> Exception:
        return KeyError(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._known

    def get(self, name: str, default: Any = None) -> Item | Any:  # Mapping's own expects a KeyError, as its `in` does
        """The item of that name, or `default`."""
        return self._known.get(name, default) if isinstance(name, str) else default

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._known))  # another thread may add one meanwhile

    def __len__(self) -> int:
        return len(self._known)
