"""Letting go of what a failed cell still holds: its frames, the copies of its error, outputs that nobody else needs.

An error keeps its traceback, the traceback the frames of every function that was running, and those all their local tensors.
Copies of the error are dropped, and the traceback is cut: so the memory is free although somebody unknown to us, or a
variable of the user's, may keep the error itself; and autograd is made to forget what a backward that failed had still to do.
Variables are never deleted. Nothing here empties PyTorch's cache: the next cell takes from it.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from memlab import seams
from memlab.names.census import Census, Storage, census, storages
from memlab.names.labels import class_name
from memlab.seams import traceback as kept

LEAST_OUTPUT_BYTES = 1 << 16
"""An output that keeps less alone is left: showing it again may be worth more than the memory."""
CENSUS_S = 3.0
"""How long the search for who still holds what may take."""
_OUTPUT = re.compile(r"(?:Out|_oh)\[(\d+)\]|(_{1,3}|_\d+)(?=$|[.\[ ])")


@dataclass(frozen=True, slots=True)
class Level:
    """What was allocated on a device before and after; on the CPU what can be seen of tensors."""

    device: str
    before_bytes: int
    after_bytes: int

    @property
    def freed_bytes(self) -> int:
        """What was given back; less than nothing where another thread took more meanwhile."""
        return self.before_bytes - self.after_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that something keeps: by which path in the notebook's words, its category, device and bytes."""

    path: str
    category: str
    device: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Released:
    """What was let go, what it gave back, and what is still held by which path; texts and numbers alone."""

    levels: tuple[Level, ...]
    errors: tuple[str, ...]
    outputs: tuple[Holding, ...]
    still_held: tuple[Holding, ...]
    is_complete: bool

    @property
    def freed_bytes(self) -> int:
        """What was given back on all devices together."""
        return sum(level.freed_bytes for level in self.levels)


def release(outputs: bool = True) -> Released:
    """Let go of the last error's frames and, unless told otherwise, of outputs that alone keep a tensor alive."""
    shell = kept.running_shell()
    before = _levels()
    errors = _let_go_of_errors(shell)
    seams.forget_unfinished_backward()
    gc.collect()
    found = census(budget_s=CENSUS_S)
    removed = _remove_outputs(shell, found) if outputs and shell is not None else ()
    if removed:
        gc.collect()
        found = census(budget_s=CENSUS_S)
    after = _levels()
    levels = tuple(Level(device, size, after.get(device, 0)) for device, size in before.items())
    held = tuple(Holding(one.path, one.category, one.device, one.nbytes) for one in found.storages)
    return Released(levels, errors, removed, held, found.is_complete)


# --- errors ---------------------------------------------------------------------------------------------------------------


def _let_go_of_errors(shell: Any) -> tuple[str, ...]:
    """Cut the tracebacks of every error that is kept or being handled, drop the copies; the errors in words."""
    errors = kept.kept_errors(shell)
    handled = sys.exception()
    roots = [*errors, handled] if handled is not None else errors
    links = kept.kept_tracebacks(shell)
    kept.forget_errors(shell)
    told = tuple(dict.fromkeys(in_words(error) for error in roots if traceback_of(error) is not None))
    for error in all_errors(roots):
        link = traceback_of(error)
        _TRACEBACK.__set__(error, None)
        _cut(link)
    for link in links:
        _cut(link)
    return told


_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_LINKS: tuple[Any, ...] = (BaseException.__dict__["__cause__"], BaseException.__dict__["__context__"])
_ARGS: Any = BaseException.__dict__["args"]
_MEMBERS: Any = BaseExceptionGroup.__dict__["exceptions"]


def all_errors(roots: list[BaseException]) -> Iterator[BaseException]:
    """These errors and all that are chained to them, each once: causes, contexts, the members of groups."""
    waiting, seen = deque(roots), set()
    while waiting:
        error = waiting.popleft()  # the nearest first
        if id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting.extend(chained for link in _LINKS if (chained := link.__get__(error)) is not None)
        if issubclass(type(error), BaseExceptionGroup):
            waiting.extend(_MEMBERS.__get__(error))


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback of an error, whatever its class makes of the attribute."""
    return _TRACEBACK.__get__(error)


def first_argument(error: BaseException) -> str:
    """The text that an error was made with, "" if it was none; its own `__str__` is not asked."""
    args = _ARGS.__get__(error)
    return args[0] if args and type(args[0]) is str else ""


def in_words(error: BaseException, limit: int = 100) -> str:
    """An error in one line, by its class and first argument."""
    text = " ".join(first_argument(error)[: 10 * limit].split())
    short = text if len(text) <= limit else f"{text[: limit - 1].rstrip('.')}…"
    name = class_name(type(error))
    return f"{name}: {short}" if short else name


def _cut(link: TracebackType | None) -> None:
    """Take a traceback apart, link by link; the frames that nobody else holds end here."""
    while link is not None:
        kept.forget_pdb_variables(link.tb_frame)
        following, link.tb_next = link.tb_next, None
        link = following


# --- outputs --------------------------------------------------------------------------------------------------------------


def _remove_outputs(shell: Any, found: Census) -> tuple[Holding, ...]:
    """Remove the outputs that alone keep storages: those to which the best path leads through an output."""
    values = kept.outputs(shell)
    by_value: dict[int, list[Storage]] = {}
    for storage in found.storages:
        name = _output_in(storage.path)
        if name in values:
            by_value.setdefault(id(values[name]), []).append(storage)
    removed = []
    for value in {id(value): value for value in values.values()}.values():
        alone = by_value.get(id(value), [])
        size = sum(storage.nbytes for storage in alone)
        if size >= LEAST_OUTPUT_BYTES:
            names = ", ".join(kept.forget_output(shell, value))
            removed.append(Holding(names, alone[0].category, alone[0].device, size))
    return tuple(removed)


def _output_in(path: str) -> str:
    """The output with which a path begins, "" if it begins with something else."""
    found = _OUTPUT.match(path)
    if found is None:
        return ""
    return f"Out[{found[1]}]" if found[1] else found[2]


# --- levels ---------------------------------------------------------------------------------------------------------------


def _levels() -> dict[str, int]:
    """Device -> bytes allocated: by PyTorch's counters on CUDA, on the CPU what is seen of storages."""
    levels = {"cpu": sum(storage.nbytes for storage in storages("cpu"))}
    if torch.cuda.is_initialized():
        for device in range(seams.device_count()):
            if seams.has_primary_context(device):
                levels[f"cuda:{device}"] = int(seams.cuda_stats(device)["allocated_bytes"]["all"]["current"])
    return levels
