"""Run the code blocks of one page, as cells of a notebook: they share names with each other, and nothing with other pages."""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import sys
import types
from dataclasses import dataclass
from typing import Any

FILE = "train.py"


@dataclass(frozen=True, slots=True)
class Shown:
    """What a block printed, and its last value: as HTML or as text."""

    printed: str = ""
    html: str = ""
    text: str = ""


def run_page(blocks: tuple[str, ...]) -> list[Shown]:
    """Run in a process of its own, so that reports name what the reader sees: no other tensor is alive, and no other frame."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    return [_run(code) for code in blocks]


def _run(code: str) -> Shown:
    tree = ast.parse(code, FILE)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    # Reports quote the lines of the code.
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, FILE, "exec"), vars(sys.modules["__main__"]))
        shown = _shown(eval(compile(last, FILE, "eval"), vars(sys.modules["__main__"])) if last else None)
    return Shown(printed.getvalue().strip("\n"), **shown)


def _shown(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    bundle = value._repr_mimebundle_() if hasattr(value, "_repr_mimebundle_") else {"text/plain": repr(value)}
    rich = bundle.get("image/svg+xml", "") + bundle.get("text/html", "")
    return {"html": rich} if rich else {"text": bundle["text/plain"]}
