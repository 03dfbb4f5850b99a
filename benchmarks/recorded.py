"""Records what programs ask of PyTorch's allocator on this device, and asks the simulated allocator for the same.

    python -m benchmarks.recorded '[{"program": "gpt2_small", "conf": "expandable_segments:True", "room_mib": 2000}]'

prints a line of JSON for each case. Every case runs in a process of its own, forked before CUDA is initialized.
"random:SEED:COUNT" is a program that asks for anything: sizes of every kind, streams, frees in any order, empty_cache.
With "again", a list of configurations, what the program asked for is asked of the real allocator under each of them as
well (up to an OOM), which is quicker than to run the program; "room_share" (or "fraction_share") is then the room
(or the memory fraction) as a share of what the program had allocated at its peak.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.programs import PROGRAMS
from benchmarks.retrace import EMPTY_CACHE, Device, Retraced, retrace
from memlab.allocator import BlockTracker, Settings, parse_conf
from memlab.trace.columns import Kind

KiB, MiB = 1 << 10, 1 << 20
MAX_ENTRIES = 2_000_000
NOT_COMPARED = {
    "num_sync_all_streams"
}  # counts the user's own empty_cache as well, which leaves no entry where nothing goes


@dataclass(frozen=True, slots=True)
class Configuration:
    """How the allocator is set up: `room_bytes` is what the device has left for it (None: all)."""

    conf: str = ""
    room_bytes: int | None = None
    memory_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded: the entries, the counters at the end, the device, and the text of the error that ended it."""

    device: Device
    entries: list[dict[str, Any]] = field(repr=False)
    stats: dict[str, int] = field(repr=False)
    error: str = ""


def record(program: Callable[[], object], configuration: Configuration) -> Recording:
    """Run a program in this process, which must not have used CUDA before, and record its history."""
    if configuration.conf:
        torch._C._accelerator_setAllocatorSettings(configuration.conf)
    torch.cuda.init()
    if configuration.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(configuration.memory_fraction)
    with room(configuration.room_bytes):
        free, total = torch.cuda.mem_get_info()
        device = Device(total, total - free, configuration.conf, configuration.memory_fraction, str(torch.__version__))
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python", context=None)
        error = ""
        with marked_empty_cache(), contextlib.redirect_stdout(io.StringIO()):
            try:
                program()
            except torch.OutOfMemoryError as full:
                error = str(full)
            gc.collect()
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
        stats = dict(torch.cuda.memory_stats())
    torch.cuda.memory._record_memory_history(enabled=None)
    return Recording(device, entries, stats, error)


@contextlib.contextmanager
def room(room_bytes: int | None) -> Iterator[None]:
    """Take all but so much of the device, past PyTorch, as another process would."""
    if room_bytes is None:
        yield
        return
    cudart, hog = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    free, _ = torch.cuda.mem_get_info()
    if cudart.cudaMalloc(ctypes.byref(hog), ctypes.c_size_t(free - room_bytes)):
        raise RuntimeError(f"cannot take {free - room_bytes} bytes of the device")
    try:
        yield
    finally:
        cudart.cudaFree(hog)


@contextlib.contextmanager
def marked_empty_cache() -> Iterator[None]:
    """Entries of the user's `empty_cache` say so."""
    original, number = torch.cuda.empty_cache, 0

    def empty_cache() -> None:
        nonlocal number
        number += 1
        torch._C._cuda_setMemoryMetadata(f"{EMPTY_CACHE}{number}")
        try:
            original()
        finally:
            torch._C._cuda_setMemoryMetadata("")

    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = empty_cache
    try:
        yield
    finally:
        torch.cuda.empty_cache = torch.cuda.memory.empty_cache = original


# --- what asks for anything -----------------------------------------------------------------------------------------------

SIZES = [
    (1, 2 * KiB),
    (KiB, MiB),
    (MiB - 600, MiB + 600),
    (MiB, 12 * MiB),
    (9 * MiB, 70 * MiB),
    (512, 512),
    (6 * MiB, 6 * MiB),
]


class Requests:
    """Allocate and free at random, but always the same for one seed; equal sizes come often, so that ties do."""

    def __init__(self, seed: int, count: int) -> None:
        self.random, self.count = random.Random(seed), count
        self.limit = self.random.choice((20, 100, 400))
        self.sizes = [self.random.randint(*self.random.choice(SIZES)) for _ in range(self.random.choice((5, 40, 1000)))]
        self.held: list[torch.Tensor] = []
        self.counters: list[tuple[int, int]] = []

    def __call__(self) -> None:
        """Allocate, free, record streams, empty the cache."""
        streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        for _ in range(self.count):
            what = self.random.random()
            if what < 0.005:
                torch.cuda.empty_cache()
            elif what < 0.05 and self.held:
                self.random.choice(self.held).record_stream(self.random.choice(streams))
            elif (what < 0.55 and len(self.held) < self.limit) or not self.held:
                self.ask(self.random.choice(streams if what < 0.2 else streams[:1]))
            else:
                self.let_go()
        self.held.clear()

    def ask(self, stream: torch.cuda.Stream) -> None:
        """Make a tensor; where there is no room, free half of them."""
        try:
            with torch.cuda.stream(stream):
                self.held.append(torch.empty(self.random.choice(self.sizes), dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            self.count_now()
            for _ in range(len(self.held) // 2):
                self.let_go()
        else:
            self.count_now()

    def let_go(self) -> None:
        """Drop any tensor."""
        del self.held[self.random.randrange(len(self.held))]
        self.count_now()

    def count_now(self) -> None:
        """Note what PyTorch counts after this request."""
        stats = torch._C._cuda_memoryStats(0)
        self.counters.append((stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]))


# --- what a program asked for, asked again --------------------------------------------------------------------------------


class Again:
    """Asks for what a history shows: the same sizes, streams and frees in the same order, the cache emptied as there."""

    def __init__(self, requests: list[tuple[str, int, int, int]]) -> None:
        self.requests = requests

    @classmethod
    def of(cls, entries: list[dict[str, Any]]) -> Again:
        """The requests of a history, from its first entry on."""
        requests, streams, emptied = [], {0: 0}, ""
        for entry, following in zip(entries, [*entries[1:], {}], strict=True):
            action, note = entry["action"], entry["user_metadata"]
            if note.startswith(EMPTY_CACHE) and note != emptied:
                emptied = note
                requests.append(("empty", 0, 0, 0))
            elif action == "alloc":
                requests.append(
                    ("ask", entry["addr"], entry["size"], streams.setdefault(entry["stream"], len(streams)))
                )
            elif action == "free_requested":
                at_once = following.get("action") == "free_completed" and following["addr"] == entry["addr"]
                requests.append(("free" if at_once else "free later", entry["addr"], 0, 0))
        return cls(requests)

    def __call__(self) -> None:
        """Ask."""
        streams = [torch.cuda.default_stream()]
        streams += [torch.cuda.Stream() for _ in range(max((request[3] for request in self.requests), default=0) + 1)]
        held: dict[int, torch.Tensor] = {}
        for what, key, size, stream in self.requests:
            if what == "ask":
                with torch.cuda.stream(streams[stream]):
                    held[key] = torch.empty(size, dtype=torch.uint8, device="cuda")
            elif what == "empty":
                torch.cuda.empty_cache()
            else:
                if what == "free later":
                    held[key].record_stream(streams[-1])
                del held[key]


# --- one case -------------------------------------------------------------------------------------------------------------


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Record a case and retrace it: what was done, how fast, and every difference ("" or nothing where there is none)."""
    requests, again = case.pop("requests", None), case.pop("again", None)
    name, _, rest = case["program"].partition(":")
    program: Any = Requests(*map(int, rest.split(":"))) if name == "random" else PROGRAMS.get(name)
    if requests:
        program = Again(json.loads(Path(requests).read_text()))
    room_mib = case.get("room_mib")
    configuration = Configuration(
        case.get("conf", ""), None if room_mib is None else int(room_mib * MiB), case.get("memory_fraction")
    )
    recording = record(program, configuration)
    if again:
        Path(again).write_text(json.dumps(Again.of(recording.entries).requests))
    begin = time.perf_counter()
    found = retrace(recording.entries, recording.device)
    seconds = time.perf_counter() - begin
    stats = found.allocator.memory_stats()
    differs = {key: (stats.get(key), value) for key, value in recording.stats.items() if stats.get(key) != value}
    return {
        **case,
        "entries": len(recording.entries),
        "requests": found.requests,
        "segment_events": found.segment_events,
        "retries": recording.stats["num_alloc_retries"],
        "ooms": recording.stats["num_ooms"],
        "peak_allocated_bytes": recording.stats["allocated_bytes.all.peak"],
        "total_bytes": recording.device.total_bytes,
        "peak_reserved_bytes": recording.stats["reserved_bytes.all.peak"],
        "difference": found.difference or after_every_event(recording, found) or counted(program, recording, found),
        "stats_differ": {key: both for key, both in differs.items() if key not in NOT_COMPARED},
        "text_differs": [] if found.out_of_memory == recording.error or not recording.error else
        [found.out_of_memory, recording.error],
        "entries_per_s": round(len(recording.entries) / seconds),
    }  # fmt: skip


def after_every_event(recording: Recording, found: Retraced) -> str:
    """*allocated* and *reserved* after every entry, against the tracker kept along PyTorch's own addresses."""
    kinds = {
        "alloc": Kind.ALLOC, "free_requested": Kind.FREE_PENDING, "free_completed": Kind.FREE,
        "segment_alloc": Kind.SEGMENT_ALLOC, "segment_free": Kind.SEGMENT_FREE,
        "segment_map": Kind.SEGMENT_MAP, "segment_unmap": Kind.SEGMENT_UNMAP,
    }  # fmt: skip
    conf = recording.device.conf
    tracker = BlockTracker(conf if isinstance(conf, Settings) else parse_conf(conf))
    for position, entry in enumerate(recording.entries):
        if entry["action"] in kinds:
            tracker.follow([int(kinds[entry["action"]])], [entry["addr"]], [entry["size"]], [entry["stream"]])
        if entry["action"] in ("alloc", "oom", "free_requested", "free_completed"):
            both = (tracker.allocated_bytes, tracker.reserved_bytes)
            mine = (found.allocated_bytes[position], found.reserved_bytes[position])
            if both != mine:
                return f"entry {position}: {mine} allocated and reserved, in PyTorch {both}"
    return ""


def counted(program: Any, recording: Recording, found: Retraced) -> str:
    """The same against PyTorch's counters, where the program read them after every request."""
    if not isinstance(program, Requests):
        return ""
    actions = [entry["action"] for entry in recording.entries]
    at = [position for position, action in enumerate(actions) if action in ("alloc", "oom", "free_requested")]
    for position, counters in zip(at, program.counters, strict=False):
        mine = (found.allocated_bytes[position], found.reserved_bytes[position])
        if mine != counters:
            return f"entry {position}: {mine} allocated and reserved, PyTorch counts {counters}"
    return "" if len(at) >= len(program.counters) else f"{len(at)} requests recorded of {len(program.counters)}"


def main() -> int:
    """Each case in a process of its own."""
    for case in json.loads(sys.argv[1]):
        others = case.pop("again", [])
        with tempfile.TemporaryDirectory() as folder:
            requests = str(Path(folder) / "requests.json")
            first = forked({**case, "again": requests} if others else case)
            for other in others:
                forked({**case, **limits(other, first), "requests": requests})
    return 0


def limits(case: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The case with its shares told in MiB, or as a memory fraction."""
    case, need = dict(case), first["peak_allocated_bytes"]
    if (share := case.pop("room_share", None)) is not None:
        case["room_mib"] = -(-int(need * share) // MiB)
    if (share := case.pop("fraction_share", None)) is not None:
        case["memory_fraction"] = round(need * share / first["total_bytes"], 6)
    return case


def forked(case: dict[str, Any]) -> dict[str, Any]:
    """Compare in a child and print the line."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        run_and_exit(case, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    line: dict[str, Any] = json.loads(text) if text else {**case, "difference": "the process died"}
    print(json.dumps(line), flush=True)
    return line


def run_and_exit(case: dict[str, Any], writing: int) -> None:
    try:
        line = compare(case)
    except BaseException:
        line = {**case, "difference": traceback.format_exc(limit=-4)}
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(line))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
