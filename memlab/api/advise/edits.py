"""Techniques as edits of a cell's text: the changed cell is what the search runs, and what the advice prints as a diff.

An edit is made only where the first run has shown that it is the same computation; otherwise there is none, and the technique
is switched on from outside as for a function. Running a changed cell twice changes nothing further.
"""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CHUNKED = '''
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

def chunked_cross_entropy(hidden, targets, head, chunks=8):
    """cross_entropy(head(hidden), targets) in chunks of positions: the logits never exist all at once."""
    def loss_of(hidden, targets):
        return F.cross_entropy(F.linear(hidden, head.weight, head.bias), targets, reduction="sum")

    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    parts = zip(hidden.chunk(chunks), targets.chunk(chunks))
    return sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts) / (targets != -100).sum()
'''


class _Cell:
    """A cell's text that is being edited."""

    def __init__(self, text: str, models: Mapping[str, Mapping[str, Any]]) -> None:
        self.lines, self.models = text.splitlines(), models
        self.tree = ast.parse(text)
        self.inserted: dict[int, list[str]] = {}
        self.replaced: list[tuple[ast.expr, str]] = []

    def model(self) -> str:
        """The name of the only model of the cell, "" if there are several or none."""
        return next(iter(self.models)) if len(self.models) == 1 else ""

    def place(self, name: str) -> int | None:
        """The line behind which the model is ready: its last assignment at the top level, else the beginning of the cell."""
        targets = [one for one in ast.walk(self.tree) if isinstance(one, ast.Name) and one.id == name]
        stored = [one.lineno for one in targets if isinstance(one.ctx, ast.Store)]
        if not stored:
            return 0
        tops = [one for one in self.tree.body if isinstance(one, ast.Assign | ast.AnnAssign)]
        found = [one for one in tops if any(one.lineno <= row <= (one.end_lineno or 0) for row in stored)]
        return found[-1].end_lineno if len(found) == len(stored) else None

    def insert(self, behind: int, text: str) -> None:
        """Insert lines behind a line; 0 is the beginning of the cell."""
        self.inserted.setdefault(behind, []).extend(text.strip("\n").split("\n"))

    def text(self) -> str:
        """The changed text."""
        lines = list(self.lines)
        for node, new in sorted(self.replaced, key=lambda one: (-one[0].lineno, -one[0].col_offset)):
            first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
            # The columns of a syntax tree count bytes.
            head = lines[first].encode()[: node.col_offset].decode()
            tail = lines[last].encode()[node.end_col_offset :].decode()
            lines[first : last + 1] = [head + new + tail]
            self.inserted = {row - (last - first if row > last else 0): more for row, more in self.inserted.items()}
        for row in sorted(self.inserted, reverse=True):
            lines[row:row] = self.inserted[row]
        return "\n".join(lines) + "\n"


def _checkpoint(cell: _Cell) -> bool:
    name = cell.model()
    facts, behind = cell.models.get(name, {}), cell.place(name)
    if behind is None or not facts.get("blocks"):
        return False
    if facts["is_transformers"]:
        cell.insert(behind, f"{name}.gradient_checkpointing_enable()  # recomputes each block in backward")
        return True
    if facts["has_statistics"]:  # PyTorch's checkpoint would update them twice
        return False
    paths = facts["blocks"]
    parents = {path.rpartition(".")[0] for path in paths}
    over = f"[{name}.get_submodule(path) for path in {paths!r}]"
    counted = [path.rpartition(".")[2] for path in paths] == [str(index) for index in range(len(paths))]
    if len(parents) == 1 and (parent := parents.pop()) and counted:
        over = _attribute(name, parent)
    lines = [
        "from functools import partial",
        "from torch.utils.checkpoint import checkpoint",
        f"for block in {over}:  # keep only each block's input, and recompute the rest in backward",
        "    block.forward = partial(checkpoint, type(block).forward, block, use_reentrant=False)",
    ]
    cell.insert(behind, "\n".join(lines))
    return True


def _chunked_loss(cell: _Cell) -> bool:
    name = cell.model()
    facts, behind = cell.models.get(name, {}), cell.place(name)
    if behind is None or not facts.get("head"):
        return False
    head = _attribute(name, facts["head"])
    passes = f"{head}.forward = lambda hidden: hidden  # the loss below makes the logits, a chunk at a time"
    called = [one for one in ast.walk(cell.tree) if isinstance(one, ast.Call)]
    calls = [one for one in called if ast.unparse(one.func).rpartition(".")[2] == "cross_entropy"]
    if len(calls) != 1 or calls[0].keywords or len(calls[0].args) != 2:
        return False
    logits, targets = calls[0].args
    inner: ast.expr = logits
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _RESHAPES:
        inner = inner.func.value
    if isinstance(inner, ast.Name):  # used for anything else, it would hold something else than it did
        names = [one for one in ast.walk(cell.tree) if isinstance(one, ast.Name) and one.id == inner.id]
        inside = {id(one) for one in ast.walk(logits)}
        if any(isinstance(one.ctx, ast.Load) and id(one) not in inside for one in names):
            return False
    elif not (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == name):
        return False
    cell.insert(0, CHUNKED)
    cell.insert(behind, passes)
    hidden, wanted = ast.unparse(inner), ast.unparse(targets)
    cell.replaced.append((calls[0], f"chunked_cross_entropy({hidden}, {wanted}, {head})"))
    return True


_RESHAPES = {"view", "reshape", "flatten", "contiguous"}


def _attribute(name: str, path: str) -> str:
    """The expression of a submodule."""
    return "".join([name, *(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))])


EDITS: dict[str, Callable[[_Cell], bool]] = {"chunked_loss": _chunked_loss, "checkpoint": _checkpoint}
"""Technique -> edits the cell; False if it cannot be written into this one."""


def edited(text: str, facts: Mapping[str, Any], names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The cell's text with these techniques, as far as they can be written into it, and the names of those."""
    try:
        cell = _Cell(textwrap.dedent(text), facts.get("models", {}))
    except (SyntaxError, ValueError):  # magics: such a cell is left as it is
        return text, ()
    done = tuple(name for name in EDITS if name in names and EDITS[name](cell))
    return (cell.text(), done) if done else (text, ())


def diff(before: str, after: str) -> str:
    """The change as a unified diff of the cell."""
    both, names = (textwrap.dedent(before).splitlines(), after.splitlines()), ("cell", "cell, changed")
    return "\n".join(difflib.unified_diff(*both, *names, n=2, lineterm=""))
