"""`memlab.who()`: who holds memory now, by the notebook's names; for one tensor, every path to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from memlab import torch_internals
from memlab.api.provenance import remark_here
from memlab.by_name import ByName
from memlab.errors import MemlabError
from memlab.references import memory
from memlab.references.edges import class_name
from memlab.references.folded import folded
from memlab.references.live_storages import (
    LiveStorages,
    StorageGroup,
    live_storages,
    paths,
    shape_text,
    storages_in,
)
from memlab.units import format_bytes, number_of
from memlab.views import theme
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.table import Column, Table

SHOWN = 40
"""The maximum number of rows shown; `to_pandas()` has them all."""
PATH = 200
"""The maximum length of a path."""
_OF_MODELS = ("parameter", "buffer", "gradient", "optimizer")
"""Categories that exist without a graph."""
_COLUMNS = (
    Column("size", "bytes"), Column("tensors", "count"), Column("shape"), Column("dtype"), Column("category"),
    Column("device"), Column("path", limit=PATH, wraps=True, is_early=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Who(Shown, LiveStorages):
    """Storages by name, the largest first; or, for one tensor, every path that keeps it alive.

    Texts and numbers only: it keeps nothing alive. `of` names the tensor, "" for all live storages. `graph_bytes` is what the
    graph of the one tensor keeps alive, without parameters, their gradients and optimizer state.
    """

    of: str = ""
    paths: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    graph_bytes: int = 0

    live = census = property(lambda self: self)
    """The storages as a value, also by its earlier name."""

    def by(self, name: str) -> Grouped:
        """The storages by "shape", "dtype", "category" or "device"."""
        return Grouped(name, self.group(name), self._remark)

    @property
    def _remark(self) -> str:
        return remark_here(one.device for one in self.storages)

    def to_pandas(self) -> Any:
        """One row for each storage; for one tensor, one for each path that keeps it alive."""
        import pandas

        if self.paths is not None:
            return pandas.DataFrame({"path": list(self.paths)})
        rows = [
            (one.nbytes, shape_text(one.shape), one.dtype, one.category, one.device, one.path, one.others, one.address)
            for one in self.storages
        ]
        names = ["storage_bytes", "shape", "dtype", "category", "device", "path", "others", "address"]
        return pandas.DataFrame(rows, columns=names)

    @property
    def page(self) -> Page:
        """What is shown."""
        page = _of_one(self) if self.paths is not None else _of_many(self)
        return page.remarked(self._remark)

    listing = page


@dataclass(frozen=True, slots=True, repr=False)
class Grouped(Shown, ByName[StorageGroup]):
    """Group -> number of storages and bytes, the largest first."""

    name: str
    groups: Mapping[str, StorageGroup]
    remark: str = ""
    _known = property(attrgetter("groups"))

    def to_pandas(self) -> Any:
        """One row for each group, its bytes and its number of storages."""
        import pandas

        rows = [(group.nbytes, group.count) for group in self.groups.values()]
        index = pandas.Index(list(self.groups), name=self.name, dtype=object)
        return pandas.DataFrame(rows, columns=["storage_bytes", "count"], index=index)

    @property
    def page(self) -> Page:
        """What is shown."""
        rows = [(group.nbytes, group.count, name) for name, group in self.groups.items()]
        rest = sum(size for size, _, _ in rows[SHOWN:])
        notes = (f"{len(rows) - SHOWN} more with {format_bytes(rest)}.",) if len(rows) > SHOWN else ()
        columns = (Column("size", "bytes"), Column("storages", "count"), Column(self.name))
        page = Page(f"memlab who · by {self.name}", (Table("", columns, tuple(rows[:SHOWN])), *notes))
        return page.remarked(self.remark)

    listing = page


def who(tensor: Any = None, device: Any = None, name: str = "") -> Who:
    """Who holds memory now, by the notebook's own names; or every path that keeps `tensor` alive.

    Given an object that holds tensors (a list, a model), it covers those. `device` is "cpu", "cuda", "cuda:1", ...;
    `name` is what `tensor` is called in the title. Nothing is kept alive, no user code is run, and CUDA is not
    initialized.
    """
    try:
        place = None if device is None else str(torch.device(device))
    except (RuntimeError, TypeError, ValueError):
        raise MemlabError(f"not a device: {str(device)[:80]!r}. Name one such as cpu, cuda or cuda:1.") from None
    if tensor is None:
        found = live_storages(place)
        return Who.showing(found, notes=(*_unnamed(found), *_unseen(found, place)))
    if memory.is_tensor(tensor) or any(base is torch.UntypedStorage for base in type(tensor).__mro__):
        return _who_holds(tensor, name)
    inside, kind = storages_in(tensor), class_name(type(tensor))
    if not inside:
        raise MemlabError(f"{name or 'this'} is a {kind} without a tensor that has memory.")
    return Who.showing(live_storages(place, only=inside), of=f"what {name or f'this {kind}'} keeps alive")


def _who_holds(tensor: Any, name: str) -> Who:
    """Every path to one tensor, its memory, and what its graph keeps alive."""
    keys = storages_in(tensor, itself=True)
    found, graph = live_storages(only=keys), storages_in(tensor) - keys
    notes = [] if keys else ["It holds no memory of its own."]
    all_kept = live_storages(only=graph).storages if graph else ()
    kept = [one for one in all_kept if one.category not in _OF_MODELS]
    size, named = sum(one.nbytes for one in kept), [one for one in kept if one.path and ".grad_fn" not in one.path]
    if kept:
        own = f", {len(named):,} of them ({format_bytes(sum(one.nbytes for one in named))}) under other names too"
        count = number_of(len(kept), "storage")
        text = f"This tensor keeps {format_bytes(size)} through its graph: {count}{own if named else ''}."
        notes.append(f"{text} `.detach()` or `.item()` releases the graph.")
    elif graph:
        notes.append("Its graph keeps nothing but parameters and buffers.")
    more = {"paths": tuple(paths(tensor)), "notes": tuple(notes), "graph_bytes": size}
    return Who.showing(found, of=name or "the tensor", **more)


# --- report ----------


def _of_one(who: Who) -> Page:
    paths = who.paths or ()
    what = ", ".join(
        f"{format_bytes(one.nbytes)}, {shape_text(one.shape)} {one.dtype} on {one.device}, {one.category}"
        for one in who.storages
    )
    held = f"kept alive by {number_of(len(paths), 'path')}" if paths else "no name leads to it"
    rows = tuple((number, cut_in_the_middle(path)) for number, path in enumerate(paths, 1))
    table = Table("", (Column("", "count"), Column("path", limit=PATH)), rows)
    title = " · ".join(filter(None, ("memlab who", who.of, what, held)))
    return Page(title, (table, *who.notes) if paths else who.notes)


def _of_many(who: Who) -> Page:
    folds, rows = folded(who.storages), []
    for fold in folds[:SHOWN]:
        first, shape = fold.storages[0], fold.common("shape")
        shape = shape if shape == "various" else shape_text(first.shape)
        count = len(fold.storages) if len(fold.storages) > 1 else None
        more = f" (+{first.others} more)" if first.others and not count else ""
        path = cut_in_the_middle(fold.path, PATH - len(more)) + more or "(no name leads here)"
        rows.append((fold.nbytes, count, shape, first.dtype, first.category, first.device, path))
    notes = []
    if rest := [one for fold in folds[SHOWN:] for one in fold.storages]:
        notes.append(f"{len(rest):,} more with {format_bytes(sum(one.nbytes for one in rest))}; .to_pandas() has all.")
    if not who.is_complete:
        notes.append("The search for names was cut short: some storages have a name that is not shown.")
    notes += [f"Not inspected: {what}." for what in who.not_inspected]
    total = max(who.total_bytes, 1)
    shares = tuple((name, group.nbytes, group.nbytes / total) for name, group in who.by("category").items())
    colours = tuple(theme.CATEGORIES.get(name, "") for name, _, _ in shares)
    columns = (Column("category"), Column("size", "bytes"), Column("share", "share"))
    tables = (Table("", _COLUMNS, tuple(rows)), Table("", columns, shares, bar=1, colours=colours))
    title = ("memlab who", who.of, number_of(len(who.storages), "storage"), format_bytes(who.total_bytes))
    return Page(" · ".join(filter(None, title)), (*(tables if who.storages else ()), *notes, *who.notes))


def cut_in_the_middle(path: str, limit: int = PATH) -> str:
    """Shorten a path to `limit` characters, keeping both ends.

    >>> cut_in_the_middle("model.blocks[11].attention.weight", 21)
    'model.bloc…ion.weight'
    """
    half = (limit - 1) // 2
    return path if len(path) <= limit else f"{path[: limit - 1 - half]}…{path[-half:]}"


def _unnamed(found: LiveStorages) -> Iterator[str]:
    """What holds the largest unnamed storages."""
    nameless = [one for one in found.storages if not one.path] if found.is_complete else []
    if nameless:
        total, holders = format_bytes(sum(one.nbytes for one in nameless)), found.holders
        held = "; ".join(f"{format_bytes(one.nbytes)} by {holders[one.key]}" for one in nameless if one.key in holders)
        why = "cycles that wait for gc.collect(), or holders that cannot be inspected"
        yield f"No name leads to {number_of(len(nameless), 'storage')} ({total}): {why}. Held: {held}."


def _unseen(found: LiveStorages, device: str | None) -> Iterator[str]:
    """The difference between PyTorch's counters and what was found; CUDA is queried only if it is initialized."""
    for index in range(torch_internals.device_count()) if torch.cuda.is_initialized() else ():
        place = f"cuda:{index}"
        if device not in (None, "cuda", place):
            continue
        counted = int(torch_internals.cuda_stats(index)["allocated_bytes"]["all"]["current"])
        seen = sum(one.nbytes for one in found.storages if one.device == place)
        if counted > seen:
            what = "rounding, workspaces, and tensors that only C++ code holds"
            more = f"{format_bytes(counted - seen)} more, which are {what}"
            yield f"PyTorch counts {format_bytes(counted)} allocated on {place}: {more}."
