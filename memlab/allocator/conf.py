"""The text of PYTORCH_CUDA_ALLOC_CONF, read as PyTorch reads it.

Checks and their order are those of c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp (2.12). Settings
that change what is simulated but are not simulated are refused by name; those of pinned host memory, locks and graph
capture change nothing here and are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from memlab.allocator.rules import INTERVALS, LARGE_SEGMENT, MIN_LARGE_ALLOC, Settings, release
from memlab.errors import MemlabError
from memlab.units import MiB

_LIMIT_MB = 1 << 40  # larger values are mistakes; PyTorch's size_t would wrap around
_WITHOUT_EFFECT = {
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_use_background_threads",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_free_catch_all",
}
_SINCE = {"large_segment_size_mb": (2, 11), "throw_on_cudamalloc_oom": (2, 12), "pinned_free_catch_all": (2, 12)}
"""Settings that PyTorch did not know before this release: 2.10.0 and 2.11.0 refuse them on the simulated GPU."""


class ConfError(MemlabError):
    """A text that PyTorch would refuse as PYTORCH_CUDA_ALLOC_CONF, or a setting that is not simulated."""


def parse_conf(text: str, torch_version: str = "") -> Settings:
    """Read settings such as "expandable_segments:True,max_split_size_mb:128"; an empty text means the defaults.

    ConfError for what this version of PyTorch (2.12 if it is empty) would refuse, and for settings that are not simulated.

    >>> parse_conf("large_segment_size_mb:12").large_segment_size // MiB
    12
    """
    found: dict[str, Any] = {}
    pairs = _pairs("".join(text.split()))
    # Other sizes are compared with that of large segments, wherever in the text it is set (2.12.1 on the simulated GPU).
    for key, value in sorted(pairs, key=lambda pair: pair[0] != "large_segment_size_mb"):
        if release(torch_version) < _SINCE.get(key, (0, 0)):
            raise ConfError(f"PyTorch {torch_version} does not know the allocator setting {key}: leave it out")
        if key in _READERS:
            field, read = _READERS[key]
            found[field] = read(key, value, found.get("large_segment_size", LARGE_SEGMENT))
        elif key not in _WITHOUT_EFFECT:
            known = ", ".join(sorted({*_READERS, *_WITHOUT_EFFECT} - {"backend", "throw_on_cudamalloc_oom"}))
            raise ConfError(f"unknown allocator setting {key[:60]!r}: PyTorch knows {known}")
    found.pop("backend", None)
    # Where it is not set this limit is the size of large segments, not 20 MiB (2.12.1 on the simulated GPU).
    found.setdefault("max_non_split_rounding_size", found.get("large_segment_size", LARGE_SEGMENT))
    return Settings(**found)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The settings as (key, value); a comma at the end is allowed, as in PyTorch."""
    for part in re.split(r",(?![^\[]*\])", text.removesuffix(",")) if text else ():
        key, colon, value = part.partition(":")
        if not colon or not key or not value:
            how = "Write key:value, for example max_split_size_mb:128"
            raise ConfError(f"not an allocator setting: {part[:60]!r}. {how}")
        yield key, value


def _megabytes(key: str, value: str, large_segment: int) -> int:
    """A size that must not be below the large segments, as set so far; those must be above 10 MiB."""
    if not value.isdecimal() or int(value) >= _LIMIT_MB:
        raise ConfError(f"{key} must be a whole number of MiB, got {value[:60]!r}")
    size = int(value) * MiB
    if key == "large_segment_size_mb":
        if size <= MIN_LARGE_ALLOC:
            raise ConfError(f"{key} must be above {MIN_LARGE_ALLOC // MiB}, got {value}")
    elif size < large_segment:
        raise ConfError(f"{key} must be at least {large_segment // MiB}, the size of large segments; got {value}")
    return size


def _flag(key: str, value: str, _: int) -> bool:
    if value not in ("True", "False"):
        raise ConfError(f"{key} must be True or False, got {value[:60]!r}")
    if value == "True" and key == "throw_on_cudamalloc_oom":
        raise ConfError(f"{key}:True is not simulated: leave it out")
    return value == "True"


def _share(key: str, value: str, _: int) -> float:
    try:
        share = float(value)
    except ValueError:
        raise ConfError(f"{key} must be a number between 0 and 1, got {value[:60]!r}") from None
    if key == "garbage_collection_threshold" and not 0 < share < 1:
        raise ConfError(f"{key} must lie above 0 and below 1, got {value}")
    if not 0 <= share <= 1:
        raise ConfError(f"{key} must lie between 0 and 1, got {value}")
    return share


def _divisions(key: str, value: str, _: int) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_steps(key, value, least=1),) * INTERVALS
    if not value.endswith("]"):
        raise ConfError(f"{key}: the list is not closed: {value[:60]!r}")
    table = [0] * INTERVALS
    last, is_first = 0, True  # the first size also covers all below it, ">" all above the one before
    for entry in filter(None, value[1:-1].split(",")):
        size, _colon, steps = entry.partition(":")
        count = _steps(key, steps, least=0)
        if size == ">":
            table[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        if not size.isdecimal() or int(size) < 1 or int(size).bit_count() != 1:
            raise ConfError(f"{key}: a list has sizes in MiB that are powers of two, got {size[:60]!r}")
        last = min(int(size).bit_length() - 1, INTERVALS - 1)
        begin = 0 if is_first else last
        table[begin : last + 1] = [count] * (last + 1 - begin)
        is_first = False
    return tuple(table)


def _steps(key: str, value: str, least: int) -> int:
    """A power of two; also 0 (no divisions), where a list allows it."""
    if not value.isdecimal() or int(value).bit_count() > 1 or int(value) < least:
        raise ConfError(f"{key}: the number of divisions must be a power of two, got {value[:60]!r}")
    return int(value)


def _backend(key: str, value: str, _: int) -> str:
    if value != "native":
        raise ConfError(f"{key}:{value[:60]} is not simulated: only PyTorch's own allocator, backend:native, is")
    return value


_READERS: dict[str, tuple[str, Callable[[str, str, int], Any]]] = {
    "backend": ("backend", _backend),
    "large_segment_size_mb": ("large_segment_size", _megabytes),
    "max_split_size_mb": ("max_split_size", _megabytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_size", _megabytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _flag),
    "per_process_memory_fraction": ("memory_fraction", _share),
    "throw_on_cudamalloc_oom": ("backend", _flag),
}
