"""Functions of classes and modules that others stand in for, until they are put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replacement:
    """A function in whose place is `ours` from `put` to `restore`; where somebody has wrapped ours since then, that stays.

    `theirs` is the one that was there. What a class has inherited is inherited again. Nothing has changed before `put`, so code
    that keeps this first can put everything back wherever Ctrl-C comes.
    """

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._owner, self._name, self.ours = owner, name, ours
        self.theirs: Callable[..., Any] = getattr(owner, name)
        self._is_own = name in vars(owner)

    def put(self) -> None:
        """Let ours be there."""
        setattr(self._owner, self._name, self.ours)

    def restore(self) -> None:
        """Put it back."""
        if vars(self._owner).get(self._name) is not self.ours:
            return
        if self._is_own:
            setattr(self._owner, self._name, self.theirs)
        else:
            delattr(self._owner, self._name)
