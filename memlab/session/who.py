"""`memlab.who()`: who holds memory now, by the notebook's own names; `memlab.who(tensor)`: every path that keeps it alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memlab import seams
from memlab.errors import MemlabError
from memlab.names import memory
from memlab.names.census import Census, Group, Storage, census, paths, shape_text, storages_in
from memlab.names.folded import Fold, folded
from memlab.names.labels import class_name
from memlab.units import format_bytes
from memlab.views.who import Listing

SHOWN = 40
"""So many rows a table shows; `to_pandas()` has them all."""
_NOWHERE = "(no name leads here)"
_HEAD = ("size", "shape", "dtype", "category", "device", "path")


@dataclass(frozen=True, slots=True)
class Who:
    """Storages by name, the largest first; or, where it was asked for one tensor, every path that keeps it alive.

    Texts and numbers only: it keeps nothing alive. `of` is what was asked for, "" for all that is alive. `graph_bytes` is what
    the graph of the one tensor keeps alive, parameters and what belongs to them apart.
    """

    census: Census
    of: str = ""
    paths: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    graph_bytes: int = 0

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The storages, the largest first."""
        return self.census.storages

    @property
    def total_bytes(self) -> int:
        """The bytes of all these storages."""
        return self.census.total_bytes

    def by(self, name: str) -> Grouped:
        """The storages by "shape", "dtype", "category" or "device"."""
        return Grouped(name, self.census.group(name))

    def to_pandas(self) -> Any:
        """One row for each storage; for one tensor, one for each path that keeps it alive."""
        import pandas

        if self.paths is not None:
            return pandas.DataFrame({"path": list(self.paths)})
        return pandas.DataFrame(list(map(_record, self.storages)), columns=list(_COLUMNS))

    @property
    def listing(self) -> Listing:
        """What is shown."""
        return _of_one(self) if self.paths is not None else _of_many(self)

    def __str__(self) -> str:
        return self.listing.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.listing.html()


@dataclass(frozen=True, slots=True)
class Grouped(Mapping[str, Group]):
    """Name of a group -> how many storages and bytes, the largest first."""

    name: str
    groups: Mapping[str, Group]

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def to_pandas(self) -> Any:
        """One row for each group, its bytes and its number of storages."""
        import pandas

        rows = [(group.nbytes, group.count) for group in self.groups.values()]
        index = pandas.Index(list(self.groups), name=self.name, dtype=object)
        return pandas.DataFrame(rows, columns=["storage_bytes", "count"], index=index)

    @property
    def listing(self) -> Listing:
        """What is shown."""
        items = list(self.groups.items())
        rows = tuple((format_bytes(group.nbytes), f"{group.count:,}", name) for name, group in items[:SHOWN])
        rest = sum(group.nbytes for _, group in items[SHOWN:])
        notes = (f"{len(items) - SHOWN} more with {format_bytes(rest)}.",) if len(items) > SHOWN else ()
        return Listing(f"memlab who · by {self.name}", ("size", "storages", self.name), rows, notes, numbers=2)

    def __str__(self) -> str:
        return self.listing.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.listing.html()


def who(tensor: Any = None, device: Any = None, name: str = "") -> Who:
    """Who holds memory now, by the notebook's own names; every path that keeps `tensor` alive.

    Given something that holds tensors (a list, a model), it tells of those. `device` is "cpu", "cuda", "cuda:1", ...;
    `name` is what `tensor` is called in the title. Nothing is kept alive, no code of the user's is run, and CUDA is not
    initialised.
    """
    place = _device(device)
    if tensor is None:
        found = census(place)
        return Who(found, notes=(*_unnamed(found), *_unseen(found, place)))
    if memory.is_tensor(tensor) or any(base is torch.UntypedStorage for base in type(tensor).__mro__):
        return _who_holds(tensor, name)
    inside = storages_in(tensor)
    if not inside:
        raise MemlabError(f"{name or 'this'} is a {class_name(type(tensor))} and no tensor with memory is in it.")
    found = census(place, only=inside)
    return Who(found, of=f"what {name or f'this {class_name(type(tensor))}'} keeps alive")


def _device(device: Any) -> str | None:
    if device is None:
        return None
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise MemlabError(f"not a device: {str(device)[:80]!r}. Name one such as cpu, cuda or cuda:1.") from None
    return str(parsed)


def _who_holds(tensor: Any, name: str) -> Who:
    """Every path to one tensor, and what its memory is."""
    keys = storages_in(tensor, itself=True)
    found = census(only=keys)
    size, graph = _graph(storages_in(tensor) - keys)
    notes = () if keys else ("It holds no memory of its own.",)
    return Who(found, of=name or "the tensor", paths=tuple(paths(tensor)), notes=(*notes, *graph), graph_bytes=size)


_OF_MODELS = ("parameter", "buffer", "gradient", "optimizer")
"""What is there without any graph."""


def _graph(keys: set[int]) -> tuple[int, list[str]]:
    """The bytes that the graph of a tensor keeps alive, and a sentence on them."""
    if not keys:
        return 0, []
    kept = [one for one in census(only=keys).storages if one.category not in _OF_MODELS]
    size, named = sum(one.nbytes for one in kept), [one for one in kept if one.path and ".grad_fn" not in one.path]
    if not kept:
        return 0, ["Its graph keeps nothing but parameters and buffers."]
    own = f", {len(named):,} of them ({format_bytes(sum(one.nbytes for one in named))}) under other names too"
    text = f"This tensor keeps {format_bytes(size)} through its graph: {counted(len(kept))}{own if named else ''}."
    return size, [f"{text} `.detach()` or `.item()` lets go of the graph."]


# --- what it says ---------------------------------------------------------------------------------------------------------


def _of_one(who: Who) -> Listing:
    count = len(who.paths or ())
    what = ", ".join(f"{format_bytes(one.nbytes)}, {_kind(one)}" for one in who.storages)
    held = f"kept alive by {count} path{'s' if count != 1 else ''}" if count else "no name leads to it"
    rows = tuple((f"{number}", path) for number, path in enumerate(who.paths or (), 1))
    return Listing(" · ".join(filter(None, ("memlab who", who.of, what, held))), ("", "path"), rows, who.notes)


def _kind(one: Storage) -> str:
    return f"{shape_text(one.shape)} {one.dtype} on {one.device}, {one.category}"


def _of_many(who: Who) -> Listing:
    rows = folded(who.storages)
    shown, rest = rows[:SHOWN], [one for row in rows[SHOWN:] for one in row.storages]
    title = " · ".join(filter(None, ("memlab who", who.of, counted(len(who.storages)), format_bytes(who.total_bytes))))
    notes = []
    if rest:
        notes.append(f"{len(rest):,} more with {format_bytes(sum(one.nbytes for one in rest))}; .to_pandas() has all.")
    if who.storages:
        notes.append(f"By category: {_shares(who)}.")
    if not who.census.is_complete:
        notes.append("The search for names was cut short: some storages have a name that is not shown.")
    notes += [f"Not inspected: {what}." for what in who.census.not_inspected]
    return Listing(title, _HEAD, tuple(map(_row, shown)), (*notes, *who.notes))


def counted(number: int) -> str:
    """So many storages, in words."""
    return f"{number:,} storage{'' if number == 1 else 's'}"


def _shares(who: Who) -> str:
    whole = max(who.total_bytes, 1)
    return ", ".join(
        f"{name} {format_bytes(group.nbytes)} ({100 * group.nbytes / whole:.0f} %)"
        for name, group in who.census.group("category").items()
    )


def _row(row: Fold) -> tuple[str, ...]:
    first = row.storages[0]
    shape = row.common("shape")
    shape = shape if shape == "various" else shape_text(first.shape)
    return format_bytes(row.nbytes), str(shape), first.dtype, first.category, first.device, _path(row, first)


def _path(row: Fold, first: Storage) -> str:
    if len(row.storages) > 1:
        return f"{row.path}  {len(row.storages):,} tensors"
    return (row.path + (f" (+{first.others} more)" if first.others else "")) or _NOWHERE


_COLUMNS = ("storage_bytes", "shape", "dtype", "category", "device", "path", "others", "address")


def _record(one: Storage) -> tuple[Any, ...]:
    return (one.nbytes, shape_text(one.shape), one.dtype, one.category, one.device, one.path, one.others, one.address)


def _unnamed(found: Census) -> Iterable[str]:
    """What holds the largest storages that no name leads to."""
    nameless = [one for one in found.storages if not one.path] if found.is_complete else []
    if not nameless:
        return
    total = format_bytes(sum(one.nbytes for one in nameless))
    told = found.holders
    held = "; ".join(f"{format_bytes(one.nbytes)} by {told[one.key]}" for one in nameless if one.key in told)
    yield (
        f"No name leads to {counted(len(nameless))} ({total}): cycles that wait for gc.collect(), or holders that cannot be "
        f"looked into. Held: {held}."
    )


def _unseen(found: Census, device: str | None) -> Iterable[str]:
    """How far PyTorch's own counters are from what was found; CUDA is asked only where it is up."""
    if not torch.cuda.is_initialized():
        return
    for index in range(seams.device_count()):
        place = f"cuda:{index}"
        if device not in (None, "cuda", place):
            continue
        counted = int(seams.cuda_stats(index)["allocated_bytes"]["all"]["current"])
        seen = sum(one.nbytes for one in found.storages if one.device == place)
        if counted > seen:
            yield (
                f"PyTorch counts {format_bytes(counted)} allocated on {place}: {format_bytes(counted - seen)} more, which are "
                f"rounding, workspaces, and tensors that only C++ code holds."
            )
