"""Temporary patches of names in PyTorch, undone in reverse order."""

from __future__ import annotations

import contextlib

_ABSENT = object()


class Patches(contextlib.ExitStack):
    """Patched names; `close` restores them in reverse order. `changes` has the value before and that put there, for each."""

    def __init__(self):
        super().__init__()
        self.changes = []

    def put(self, owner, **values):
        """Patch names of a module or class."""
        for name, value in values.items():
            before = vars(owner).get(name, _ABSENT)
            self.changes.append((owner, name, before, value))
            self.callback(delattr, owner, name) if before is _ABSENT else self.callback(setattr, owner, name, before)
            setattr(owner, name, value)

    def put_item(self, table, key, value):
        """Set an item of a mapping."""
        before = table.get(key, _ABSENT)
        self.callback(table.pop, key, None) if before is _ABSENT else self.callback(table.__setitem__, key, before)
        table[key] = value

    def put_where_present(self, owner, **values):
        """Patch only those names that this version of PyTorch has."""
        self.put(owner, **{name: value for name, value in values.items() if hasattr(owner, name)})


@contextlib.contextmanager
def suspended(changes):
    """Within it the names of `Patches.changes` have the values from before."""
    for owner, name, before, _ in reversed(changes):
        delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
    try:
        yield
    finally:
        for owner, name, _, value in changes:
            setattr(owner, name, value)


def constant(value):
    """A function that always returns the same value."""
    return lambda *args, **kwargs: value


nothing = constant(None)
