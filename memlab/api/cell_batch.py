"""The batch of a cell: where its size is written, and the cell, or the names it reads, with another one.

Candidates only: whether the memory depends on one shows when the cell is predicted with less.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab.api.cell_names import names_read, parsed
from memlab.units import listed, one_line

_SHORT = frozenset({"b", "bs", "bsz", "n"})
_NO_SIZE = re.compile(r"batches|num|count|norm|idx|index|accum|step|log|every")
_FACTORIES = frozenset({"rand", "randn", "randint", "zeros", "ones", "empty", "full"})
_LINES, _WIDTH = 2, 70
"""How many changed lines are quoted, and how much of each."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One candidate: its size now, and the cell's text, or what to set in the notebook's names, for another one.

    `set_names(n)` runs in the child, before the cell. `change` says it, with `{n}` for the number.
    """

    size: int
    change: str
    text_with: Callable[[int], str]
    set_names: Callable[[int], None] | None = None

    def said(self, n: int) -> str:
        """The change to this size."""
        return self.change.replace("{n}", str(n))


def batches(text: str, names: dict[str, Any]) -> Iterator[Batch]:
    """The candidates for a cell's text and the notebook's names, the most explicit first."""
    tree = parsed(text)
    yield from _written(text, _named_sizes(tree), "`{what}{n}`")
    read = names_read(text, names)
    for name in read:
        value = names[name]
        if type(value) is int and value > 1 and _is_batch(name):
            yield Batch(value, f"`{name} = {{n}}`", lambda _: text, _setter(names, {name: int}))
    yield from _of_loaders(text, names, read)
    yield from _written(text, _first_dimensions(tree), "a batch of {n}: {lines}")
    yield from _of_tensors(text, names, read)


def _is_batch(name: str) -> bool:
    low = name.lower()
    return low in _SHORT or ("batch" in low and not _NO_SIZE.search(low)) or low.endswith(("_bs", "_bsz"))


# --- sizes in the text ---

_Place = tuple[str, ast.Constant]
"""What stands before the number, and the number."""


def _size_of(node: ast.expr | None) -> ast.Constant | None:
    return node if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1 else None


def _named_sizes(tree: ast.Module) -> Iterator[_Place]:
    """Numbers that are assigned to, passed as, or the default of a name for a batch."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, str, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                whole = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                values = zip(target.elts, node.value.elts, strict=False) if whole else [(target, node.value)]  # type: ignore[attr-defined]
                pairs += [(one.id, " = ", value) for one, value in values if isinstance(one, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs.append((node.target.id, " = ", node.value))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            pairs.append((node.arg, "=", node.value))
        elif isinstance(node, ast.arguments):
            given = [*node.posonlyargs, *node.args]
            defaults = zip(given[len(given) - len(node.defaults) :], node.defaults, strict=True)
            pairs += [
                (one.arg, "=", value)
                for one, value in (*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True))
            ]
        for name, sign, value in pairs:
            if _is_batch(name) and (size := _size_of(value)) is not None:
                yield f"{name}{sign}", size


def _first_dimensions(tree: ast.Module) -> Iterator[_Place]:
    """The first dimension of tensors that the cell makes: `torch.randn(8, 3, 224, 224)`, `torch.randint(0, n, (8, 1024))`."""
    for node in ast.walk(tree):
        called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or called not in _FACTORIES:
            continue
        shapes = [*node.args, *(one.value for one in node.keywords if one.arg == "size")]
        shape = next((one.elts for one in shapes if isinstance(one, ast.Tuple | ast.List)), node.args)
        if called == "randint" and shape is node.args:
            continue
        if shape and (size := _size_of(shape[0])) is not None:
            yield "", size


def _written(text: str, found: Iterator[_Place], change: str) -> Iterator[Batch]:
    """The numbers that stand in the text most often, each place of it."""
    places = list(found)
    if not places:
        return
    size = Counter(number.value for _, number in places if type(number.value) is int).most_common(1)[0][0]
    chosen = [(what, number) for what, number in places if number.value == size]
    rows = sorted({number.lineno for _, number in chosen})

    def with_text(new: str) -> str:
        lines = [line.encode() for line in text.split("\n")]
        for _, number in sorted(chosen, key=lambda one: (one[1].lineno, one[1].col_offset), reverse=True):
            line = lines[number.lineno - 1]
            lines[number.lineno - 1] = line[: number.col_offset] + new.encode() + line[number.end_col_offset :]
        return b"\n".join(lines).decode()

    changed = with_text("{n}").split("\n")
    quoted = [f"`{one_line(changed[row - 1].strip(), _WIDTH)}`" for row in rows]
    said = change.replace("{what}", chosen[0][0]).replace("{lines}", listed(quoted, _LINES))
    yield Batch(size, said, lambda n: with_text(str(n)))


# --- sizes in what the cell reads ---


def _setter(names: dict[str, Any], made: Mapping[str, Callable[[int], Any]]) -> Callable[[int], None]:
    def set_names(n: int) -> None:
        names.update({name: make(n) for name, make in made.items()})

    return set_names


def _of_loaders(text: str, names: dict[str, Any], read: list[str]) -> Iterator[Batch]:
    """DataLoaders, whose sampler of batches asks for its size when it is iterated over."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    for name in read:
        sampler = getattr(names[name], "batch_sampler", None) if isinstance(names[name], kind) else None
        size = getattr(sampler, "batch_size", None)
        if type(size) is int and size > 1:

            def set_size(n: int, sampler: Any = sampler) -> None:
                sampler.batch_size = n

            yield Batch(size, f"`batch_size={{n}}` in the DataLoader `{name}`", lambda _: text, set_size)


def _of_tensors(text: str, names: dict[str, Any], read: list[str]) -> Iterator[Batch]:
    """Tensors with the same first dimension, and dicts of them: the first n of each."""
    data: dict[str, int] = {}
    for name in read:
        value = names[name]
        tensors = list(value.values()) if type(value) is dict else [value]
        if tensors and all(type(one) is torch.Tensor and one.ndim and not one.requires_grad for one in tensors):
            sizes = {len(one) for one in tensors}
            data |= {name: sizes.pop()} if len(sizes) == 1 else {}
    if not data:
        return
    size = Counter(data.values()).most_common(1)[0][0]
    chosen = sorted(name for name, rows in data.items() if rows == size)
    if size < 2:
        return

    def first(name: str) -> Callable[[int], Any]:
        def cut(n: int) -> Any:
            value = names[name]
            return {key: one[:n] for key, one in value.items()} if type(value) is dict else value[:n]

        return cut

    cut = (f"the first {{n}} rows of `{name}`" if type(names[name]) is dict else f"`{name}[:{{n}}]`" for name in chosen)
    change = f"{' and '.join(cut)} instead of all {size} rows"
    yield Batch(size, change, lambda _: text, _setter(names, {name: first(name) for name in chosen}))
