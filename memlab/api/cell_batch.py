"""The batch of a cell: where its size is written, and the cell, or the names it reads, with another one.

Candidates only: whether the memory depends on one shows when the cell is predicted with less.
"""

from __future__ import annotations

import ast
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from memlab.api.cell_names import names_read, parsed
from memlab.units import listed, one_line

_SHORT = frozenset({"bs", "bsz"})
_UNSURE = frozenset({"b", "n"})
"""Names of many things, as of a number of layers: a batch only where one is the first dimension of a tensor of the cell."""
_NO_SIZE = re.compile(r"batches|num|count|norm|idx|index|accum|step|log|every")
_FACTORIES = frozenset({"rand", "randn", "randint", "zeros", "ones", "empty", "full"})
_LINES, _WIDTH = 2, 70
"""How many changed lines are quoted, and how much of each."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One candidate: its size now, and the cell's text for another one, or what to set in the notebook's names.

    `set_names(n)` runs in the child, before the cell, where nothing is written into the text. `change` says it, with `{n}` for
    the number.
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
    shown = {one.id for one in _first_dimensions(tree) if isinstance(one, ast.Name)}
    yield from _written(text, _named_sizes(tree, shown), "`{what}{n}`")
    read = names_read(text, names)
    for target, size in _settings(names, read, shown):
        yield Batch(size, f"`{target} = {{n}}`, set by an earlier cell", _set_first(text, tree, f"{target} = {{n}}"))
    yield from _of_loaders(text, tree, names, read)
    yield from _written(text, _given(text, tree, names, read), "a batch of {n}: {lines}")
    written = (_Place.of("", size) for size in map(_size_of, _first_dimensions(tree)) if size is not None)
    yield from _written(text, written, "a batch of {n}: {lines}")
    yield from _of_tensors(text, names, read)


def _is_batch(name: str, shown: Collection[str]) -> bool:
    low = name.lower()
    is_short = low in _SHORT or (low in _UNSURE and name in shown)
    return is_short or ("batch" in low and not _NO_SIZE.search(low)) or low.endswith(("_bs", "_bsz"))


# --- sizes in the text ---


@dataclass(frozen=True, slots=True)
class _Place:
    """A number in the text: what stands before it, and where; `added` is written before it where the text has neither."""

    what: str
    size: int
    row: int
    start: int
    end: int
    added: str = ""

    @staticmethod
    def of(what: str, number: ast.Constant) -> _Place:
        """That of a number that is there."""
        assert type(number.value) is int and number.end_col_offset is not None
        return _Place(what, number.value, number.lineno, number.col_offset, number.end_col_offset)


def _size_of(node: ast.expr | None) -> ast.Constant | None:
    return node if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1 else None


def _named_sizes(tree: ast.Module, shown: Collection[str]) -> Iterator[_Place]:
    """Numbers that are assigned to, passed as, the entry of a dict for, or the default of a name for a batch."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, str, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                whole = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                values = zip(target.elts, node.value.elts, strict=False) if whole else [(target, node.value)]  # type: ignore[attr-defined]
                pairs += [(_last(one), f"{ast.unparse(one)} = ", value) for one, value in values]
        elif isinstance(node, ast.AnnAssign):
            pairs.append((_last(node.target), f"{ast.unparse(node.target)} = ", node.value))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            pairs.append((node.arg, f"{node.arg}=", node.value))
        elif isinstance(node, ast.Dict):
            keys = [str(getattr(key, "value", "")) for key in node.keys]
            pairs += [(key, f'"{key}": ', value) for key, value in zip(keys, node.values, strict=True)]
        elif isinstance(node, ast.arguments):
            given = [*node.posonlyargs, *node.args]
            defaults = zip(given[len(given) - len(node.defaults) :], node.defaults, strict=True)
            pairs += [
                (one.arg, f"{one.arg}=", value)
                for one, value in (*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True))
            ]
        for name, what, value in pairs:
            if _is_batch(name, shown) and (size := _size_of(value)) is not None:
                yield _Place.of(what, size)


def _last(target: ast.expr) -> str:
    """The last part of a name, `cfg.batch_size`, or the entry of a dict that is set."""
    of_dict = target.slice if isinstance(target, ast.Subscript) else None
    return str(getattr(target, "id", getattr(target, "attr", getattr(of_dict, "value", ""))))


def _first_dimensions(tree: ast.Module) -> Iterator[ast.expr]:
    """The first dimension of tensors that the cell makes: `torch.randn(8, 3, 224, 224)`, `torch.randint(0, n, (8, 1024))`."""
    for node in ast.walk(tree):
        called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or called not in _FACTORIES:
            continue
        shapes = [*node.args, *(one.value for one in node.keywords if one.arg == "size")]
        shape = next((one.elts for one in shapes if isinstance(one, ast.Tuple | ast.List)), node.args)
        if called == "randint" and shape is node.args:
            continue
        if shape:
            yield shape[0]


def _written(text: str, found: Iterator[_Place], change: str) -> Iterator[Batch]:
    """The numbers that stand in the text, the most frequent first, each with every place of it."""
    places = list(found)
    for size, _ in Counter(one.size for one in places).most_common():
        yield _of_number(text, size, [one for one in places if one.size == size], change)


def _of_number(text: str, size: int, chosen: list[_Place], change: str) -> Batch:
    rows = sorted({one.row for one in chosen})

    def with_text(new: str) -> str:
        lines = [line.encode() for line in text.split("\n")]
        for one in sorted(chosen, key=lambda one: (one.row, one.start), reverse=True):
            line = lines[one.row - 1]
            lines[one.row - 1] = line[: one.start] + f"{one.added}{new}".encode() + line[one.end :]
        return b"\n".join(lines).decode()

    changed = with_text("{n}").split("\n")
    quoted = [f"`{one_line(changed[row - 1].strip(), _WIDTH)}`" for row in rows]
    said = change.replace("{what}", chosen[0].what).replace("{lines}", listed(quoted, _LINES))
    return Batch(size, said, lambda n: with_text(str(n)))


# --- sizes in what the cell reads ---


def _set_first(text: str, tree: ast.Module, line: str) -> Callable[[int], str]:
    """The text that begins with this line, `{n}` in it replaced: behind a cell magic and what must stand first."""
    lines = text.split("\n")
    behind = [
        one.end_lineno or 0 for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"
    ]
    first = next((row for row, one in enumerate(lines, 1) if one.strip()), 0)
    row = max([first * text.lstrip().startswith("%%"), *behind])
    return lambda n: "\n".join([*lines[:row], line.replace("{n}", str(n)), *lines[row:]])


def _settings(names: dict[str, Any], read: list[str], shown: Collection[str]) -> Iterator[tuple[str, int]]:
    """What an earlier cell set: a name, an entry of a dict, an attribute of a class or of a namespace."""
    for name in read:
        value = names[name]
        found: dict[str, Any] = {}
        if type(value) is int:
            found = {name: value} if _is_batch(name, shown) else {}
        elif type(value) is dict:
            found = {f"{name}[{key!r}]": one for key, one in value.items() if type(key) is str and _is_batch(key, ())}
        elif type(value) in (type, SimpleNamespace, Namespace):
            found = {f"{name}.{key}": one for key, one in vars(value).items() if _is_batch(key, ())}
        yield from ((target, size) for target, size in found.items() if type(size) is int and size > 1)


def _of_loaders(text: str, tree: ast.Module, names: dict[str, Any], read: list[str]) -> Iterator[Batch]:
    """DataLoaders, whose sampler of batches asks for its size when it is iterated over."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    for name in read:
        sampler = getattr(names[name], "batch_sampler", None) if isinstance(names[name], kind) else None
        size = getattr(sampler, "batch_size", None)
        if type(size) is int and size > 1:
            line = f"{name}.batch_sampler.batch_size = {{n}}  # or make {name} anew, with batch_size={{n}}"
            yield Batch(size, f"`batch_size={{n}}` in the DataLoader `{name}`", _set_first(text, tree, line))


def _given(text: str, tree: ast.Module, names: dict[str, Any], read: list[str]) -> Iterator[_Place]:
    """What calls of the notebook's functions pass by position, or leave to a default: `fit(2, 96)`, `fit()`."""
    lines = [line.encode() for line in text.split("\n")]
    for node in ast.walk(tree):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        function = names[called] if called in read else None
        if not isinstance(node, ast.Call) or type(function) is not FunctionType:
            continue
        if any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords):
            continue
        code, defaults = function.__code__, function.__defaults__ or ()
        parameters = code.co_varnames[: code.co_argcount]
        for name, value in zip(parameters, node.args, strict=False):
            if _is_batch(name, ()) and (size := _size_of(value)) is not None:
                yield _Place.of("", size)
        left = dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
        left |= function.__kwdefaults__ or {}
        passed = {*parameters[: len(node.args)], *(one.arg for one in node.keywords)}
        row, end = node.end_lineno or 0, (node.end_col_offset or 0) - 1
        last = lines[row - 1][:end].rstrip()[-1:]
        for name, default in left.items():
            if name not in passed and type(default) is int and default > 1 and _is_batch(name, ()):
                added = f"{name}=" if last in (b"(", b",") else f", {name}="
                if last:  # else the closing parenthesis stands on a line of its own
                    yield _Place("", default, row, end, end, added)
                break


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

    def first(value: Any, n: int) -> Any:
        return {key: one[:n] for key, one in value.items()} if type(value) is dict else value[:n]

    cut = (f"the first {{n}} rows of `{name}`" if type(names[name]) is dict else f"`{name}[:{{n}}]`" for name in chosen)
    change = f"{' and '.join(cut)} instead of all {size} rows"

    def set_names(n: int) -> None:
        names.update({name: first(names[name], n) for name in chosen})

    yield Batch(size, change, lambda _: text, set_names)
