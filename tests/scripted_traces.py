"""Traces written by hand: `Script` takes what happens, row by row, and gives the Trace of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from memlab.trace import Blocks, Device, Events, Gap, Kind, MadeBy, MarkKind, Marks, Phase, Samples, Trace
from memlab.trace.columns import Array

GPU = Device(0, "Fake 8", capacity_bytes=1 << 33)
HOST = Device(-1, "a processor")


class Script:
    """Rows of one device unless another is named; times in nanoseconds, by default 10 after the row before."""

    def __init__(self, device: Device = GPU, *others: Device) -> None:
        self.devices = (device, *others)
        self.rows: list[tuple[int, ...]] = []
        self.blocks: list[dict[str, Any]] = []
        self.marks: list[tuple[int, int, int, str]] = []
        self.samples: list[tuple[int, ...]] = []
        self.first_row = 0
        self.now = 0

    def _row(self, kind: Kind, block: int, requested: int, allocated: int, at: int | None, device: int | None) -> None:
        self.now = self.now + 10 if at is None else at
        device = self.devices[0].index if device is None else device
        self.rows.append((self.now, kind, block, requested, allocated, device, 0, 0))

    def preexisting(self, allocated: int, requested: int | None = None, device: int | None = None) -> int:
        """A block that was there at the start."""
        block = self._block(allocated, requested, Kind.PREEXISTING, 0, device)
        self.first_row, self.now = len(self.rows), 0
        return block

    def alloc(
        self,
        allocated: int,
        at: int | None = None,
        requested: int | None = None,
        device: int | None = None,
        **known: Any,
    ) -> int:
        """A new block, and what is known of it: phase, category, module, line."""
        block = self._block(allocated, requested, Kind.ALLOC, at, device)
        self.blocks[block] |= known
        return block

    def _block(self, allocated: int, requested: int | None, kind: Kind, at: int | None, device: int | None) -> int:
        sizes = (allocated if requested is None else requested, allocated)
        self.blocks.append({"sizes": sizes, "device": device})
        self._row(kind, len(self.blocks) - 1, *sizes, at, device)
        return len(self.blocks) - 1

    def free(self, block: int, at: int | None = None, kind: Kind = Kind.FREE) -> None:
        """The end of a block."""
        self._row(kind, block, *self.blocks[block]["sizes"], at, self.blocks[block]["device"])

    def segment(self, size: int, at: int | None = None, device: int | None = None) -> None:
        """A segment comes, or (negative) goes."""
        self._row(Kind.SEGMENT_ALLOC if size > 0 else Kind.SEGMENT_FREE, -1, 0, abs(size), at, device)

    def oom(self, asked: int, free: int, device: int | None = None) -> None:
        """The allocator could not have so many bytes; the driver had so many left."""
        self._row(Kind.OOM, -1, asked, free, None, device)

    def here_it_starts(self) -> None:
        """All rows so far were there before."""
        self.first_row, self.now = len(self.rows), 0

    def mark(self, kind: MarkKind, name: str, at: int) -> None:
        self.marks.append((len(self.rows), at, kind, name))

    def sample(self, at: int, *counters: int, device: int | None = None) -> None:
        """allocated, reserved, used, own, available; what is left out was not read."""
        device = self.devices[0].index if device is None else device
        self.samples.append((at, device, *counters, *[-1] * (5 - len(counters))))

    def _texts(self, column: str) -> tuple[Array, tuple[str, ...]]:
        names = list(dict.fromkeys(text for block in self.blocks if (text := block.get(column))))
        return np.array([names.index(text) if (text := b.get(column)) else -1 for b in self.blocks], "i4"), tuple(names)

    def trace(self, duration: int | None = None, notes: dict[str, Any] | None = None, **made_by: Any) -> Trace:
        """The trace of it all."""
        module, modules = self._texts("module")
        line, lines = self._texts("line")
        op, ops = self._texts("op")
        name, named = self._texts("name")
        codes = {name: np.array([b.get(name, 0) for b in self.blocks], "u1") for name in ("phase", "category")}
        names = list(dict.fromkeys(name for *_, name in self.marks))
        return Trace(
            events=Events(*np.array(self.rows, "i8").reshape(-1, 8).T),
            blocks=Blocks.unknown(len(self.blocks), module=module, line=line, op=op, name=name, **codes),
            made_by=MadeBy(
                "hand", self.devices, duration_ns=self.now if duration is None else duration,
                gaps=made_by.pop("gaps", (Gap("hand", "written by hand"),)), **made_by,
            ),
            first_row=self.first_row,
            marks=Marks(*np.array([(*m[:3], names.index(m[3])) for m in self.marks], "i8").reshape(-1, 4).T),
            samples=Samples(*np.array(self.samples, "i8").reshape(-1, 7).T),
            texts={"module": modules, "line": lines, "op": ops, "name": named, "mark": tuple(names)},
            notes=notes or {},
        )  # fmt: skip


def busy(events: int = 40_000, seed: int = 0) -> Trace:
    """A trace of many events and phases on one device, random but always the same."""
    random = np.random.default_rng(seed)
    script = Script()
    script.preexisting(1 << 28)
    script.segment(1 << 31, at=0)
    script.here_it_starts()
    alive: list[int] = []  # of blocks
    names = [("forward", Phase.FORWARD), ("backward", Phase.BACKWARD), ("optimizer", Phase.OPTIMIZER)]
    step = max(events // 60, 1)
    for i in range(events):
        at = int(i * 30_000 + random.integers(0, 9000))
        name, phase = names[i // step % 3]
        if i % step == 0 and name != "forward":
            script.mark(MarkKind.PHASE_BEGIN, name, at)
        if i % step == step - 1 and name != "forward":
            script.mark(MarkKind.PHASE_END, name, at)
        if alive and random.random() < 0.45:
            script.free(alive.pop(int(random.integers(len(alive)))), at)
        elif random.random() < 0.2:
            script.segment(int(random.integers(-9, 10) or 1) << 21, at)
        else:
            size = int(random.integers(1, 5000)) * 512
            requested, module = size - int(random.integers(512)), f"layers.{i % 24}.attention"
            line = f"/a/very/long/path/train.py:{i % 90}"
            alive.append(script.alloc(size, at, requested, phase=phase, module=module, line=line))
    for i in range(600):
        at = i * events * 50
        script.sample(at, int(random.integers(1 << 30)), 1 << 30, (1 << 30) + int(random.integers(1 << 29)))
        script.sample(at, -1, -1, 1 << 34, int(random.integers(1 << 33)), 1 << 34, device=-1)
    return script.trace()
