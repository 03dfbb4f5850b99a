"""Every name of PyTorch that fake CUDA exchanges, put in one place and put back as it was."""

from __future__ import annotations

import contextlib

_ABSENT = object()


class Patches(contextlib.ExitStack):
    """Names exchanged for a while; `close` puts them back in reverse order."""

    def put(self, owner, **values):
        """Exchange names of a module or class."""
        for name, value in values.items():
            before = vars(owner).get(name, _ABSENT)
            self.callback(delattr, owner, name) if before is _ABSENT else self.callback(setattr, owner, name, before)
            setattr(owner, name, value)

    def put_where_present(self, owner, **values):
        """Exchange only those names that this version of PyTorch has."""
        self.put(owner, **{name: value for name, value in values.items() if hasattr(owner, name)})


def constant(value):
    """A function that answers the same whatever it is asked."""
    return lambda *args, **kwargs: value


nothing = constant(None)
