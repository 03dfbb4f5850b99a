"""What an operator's schema tells of the storages it returns: new, handed in, or written in place."""

from __future__ import annotations

from typing import Any

NEW_THOUGH_ALIAS = frozenset({"aten::lift_fresh", "aten::lift", "aten::set_", "aten::resize_", "aten::resize_as_"})
"""Operators that return an alias of a storage which no operator has returned before: that is where it is new."""


def origin_of(func: Any) -> str:
    """Of a storage not known before: "new", "handed in" (new, by an alias), "older" (or made unseen), "no memory"."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "new"
    if schema.name == "aten::_efficientzerotensor":
        return "no memory"
    if all(result.alias_info is None for result in schema.returns):
        return "new"
    is_out = any(argument.is_out for argument in schema.arguments)
    return "handed in" if is_out or schema.name in NEW_THOUGH_ALIAS else "older"


def gives_nothing_new(func: Any) -> bool:
    """Whether an operator returns what it was given, at the size it had (`add_`, not `resize_`, `set_` or `add.out`).

    Of views only `detach`: autograd and optimizers call it on every gradient. The others are looked at, as the first to
    show a storage that no operator made is often a view (`torch.from_numpy(a).permute(...)`).
    """
    schema = func._schema
    if schema.name == "aten::detach":
        return True
    results = [result.alias_info for result in schema.returns]
    writes = bool(results) and all(alias is not None and alias.is_write for alias in results)
    return writes and origin_of(func) == "older" and "resize" not in schema.name
