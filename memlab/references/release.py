"""Release what a failed cell still holds: its frames, copies of its error, outputs that alone hold storages.

An error keeps its traceback, the traceback the frames of every running function, and those all their local tensors. Copies of
the error are dropped and the traceback is cut, so the memory is freed even where something else, such as a variable, keeps
the error itself. Autograd's queue of a failed backward is cleared. Variables are never deleted. PyTorch's cache is emptied: the
blocks of the failed cell are of other sizes than those of a smaller one, which could fail for the holes between them.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from memlab import torch_internals
from memlab.references.edges import class_name
from memlab.references.live_storages import LiveStorages, Storage, live_storages, storages
from memlab.torch_internals import traceback as kept

LEAST_OUTPUT_BYTES = 1 << 16
"""Smaller outputs are kept: they may still be useful."""
SEARCH_S = 3.0
"""The time limit of the search for holders."""
_WIDTH = 100
_OUTPUT = re.compile(r"(?:Out|_oh)\[(\d+)\]|(_{1,3}|_\d+)(?=$|[.\[ ])")


@dataclass(frozen=True, slots=True)
class HeldLevel:
    """What was allocated on a device before and after; on the CPU the bytes of all storages found."""

    device: str
    before_bytes: int
    after_bytes: int

    @property
    def freed_bytes(self) -> int:
        """The freed bytes; negative if another thread allocated more meanwhile."""
        return self.before_bytes - self.after_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that is still held: the notebook path to it, its category, device and bytes."""

    path: str
    category: str
    device: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Released:
    """What was released, the freed bytes, and what is still held and by which path; strings and numbers only."""

    levels: tuple[HeldLevel, ...]
    errors: tuple[str, ...]
    outputs: tuple[Holding, ...]
    still_held: tuple[Holding, ...]
    is_complete: bool

    @property
    def freed_bytes(self) -> int:
        """What was freed on all devices together."""
        return sum(level.freed_bytes for level in self.levels)


def release(outputs: bool = True) -> Released:
    """Release the frames of the last error and, with `outputs`, outputs that alone keep a tensor alive."""
    shell = kept.running_shell()
    before = _levels()
    errors = release_errors(shell)
    torch_internals.forget_unfinished_backward()
    gc.collect()
    found = live_storages(budget_s=SEARCH_S)
    removed = _remove_outputs(shell, found) if outputs and shell is not None else ()
    if removed:
        gc.collect()
        found = live_storages(budget_s=SEARCH_S)
    after = _levels()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # while a graph is captured
            torch_internals.clear_cublas_workspaces()  # one of 8 MiB can keep a segment of hundreds
            torch.cuda.empty_cache()
    levels = tuple(HeldLevel(device, size, after.get(device, 0)) for device, size in before.items())
    held = tuple(Holding(one.path, one.category, one.device, one.nbytes) for one in found.storages)
    return Released(levels, errors, removed, held, found.is_complete)


def _levels() -> dict[str, int]:
    """Device -> bytes allocated: PyTorch's counters on CUDA, the bytes of all storages found on the CPU."""
    levels = {"cpu": sum(storage.nbytes for storage in storages("cpu"))}
    if torch.cuda.is_initialized():
        for device in range(torch_internals.device_count()):
            if torch_internals.has_primary_context(device):
                levels[f"cuda:{device}"] = int(torch_internals.cuda_stats(device)["allocated_bytes"]["all"]["current"])
    return levels


# --- errors ---


def release_errors(shell: Any) -> tuple[str, ...]:
    """Cut the tracebacks of every error that is stored or being handled, drop the copies; return the errors as text."""
    handled = sys.exception()
    roots = kept.kept_errors(shell) + ([handled] if handled is not None else [])
    links: list[TracebackType | None] = [*kept.kept_tracebacks(shell)]
    kept.forget_errors(shell)
    told = tuple(dict.fromkeys(in_words(error) for error in roots if traceback_of(error) is not None))
    for error in all_errors(roots):
        links.append(traceback_of(error))
        _TRACEBACK.__set__(error, None)
    while links:
        link = links.pop()
        while link is not None:  # frames without another holder are freed here
            kept.forget_pdb_variables(link.tb_frame)
            following, link.tb_next = link.tb_next, None
            link = following
    return told


_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_LINKS: tuple[Any, ...] = (BaseException.__dict__["__cause__"], BaseException.__dict__["__context__"])
_ARGS: Any = BaseException.__dict__["args"]
_MEMBERS: Any = BaseExceptionGroup.__dict__["exceptions"]


def all_errors(roots: list[BaseException]) -> Iterator[BaseException]:
    """These errors and all chained to them, each once: causes, contexts, members of groups."""
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
    """The traceback of an error, bypassing overrides of the attribute."""
    found: TracebackType | None = _TRACEBACK.__get__(error)
    return found


def first_argument(error: BaseException) -> str:
    """The message of an error from its arguments, "" if there is none; its `__str__` is not called."""
    args = _ARGS.__get__(error)
    return args[0] if args and type(args[0]) is str else ""


def in_words(error: BaseException) -> str:
    """An error in one line, by its class and first argument."""
    text = " ".join(first_argument(error)[: 10 * _WIDTH].split())
    short = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1].rstrip('.')}…"
    name = class_name(type(error))
    return f"{name}: {short}" if short else name


# --- outputs ---


def _remove_outputs(shell: Any, found: LiveStorages) -> tuple[Holding, ...]:
    """Remove outputs that alone keep storages alive: those whose shortest path leads through an output."""
    values = kept.outputs(shell)
    alone: dict[int, list[Storage]] = {}
    for storage in found.storages:
        begin = _OUTPUT.match(storage.path)
        name = "" if begin is None else f"Out[{begin[1]}]" if begin[1] else begin[2]
        if name in values:
            alone.setdefault(id(values[name]), []).append(storage)
    removed = []
    for number, value in {id(value): value for value in values.values()}.items():
        size = sum(storage.nbytes for storage in alone.get(number, ()))
        if size >= LEAST_OUTPUT_BYTES:
            names, first = ", ".join(kept.forget_output(shell, value)), alone[number][0]
            removed.append(Holding(names, first.category, first.device, size))
    return tuple(removed)
