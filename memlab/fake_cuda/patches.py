"""Temporary patches of names in PyTorch, undone in reverse order."""

from __future__ import annotations

import contextlib

_ABSENT = object()


class Patches(contextlib.ExitStack):
    """Patched names; `close` restores them in reverse order."""

    def put(self, owner, **values):
        """Patch names of a module or class."""
        for name, value in values.items():
            before = vars(owner).get(name, _ABSENT)
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


def constant(value):
    """A function that always returns the same value."""
    return lambda *args, **kwargs: value


nothing = constant(None)
