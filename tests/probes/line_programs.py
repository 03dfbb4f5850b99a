"""Programs made at random whose every line is read from outside: `probe(key)` stands between any two lines.

A program is the text of a function `program(torch, device, probe, keep)`. All it holds lies in `keep`, or in names that
`probe` is not asked about; a line that `probe` brackets has the key of its own number.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import memlab
from memlab.api.report import LineReport

NAMES = ("a", "b", "c", "d")


class Writer:
    """Writes lines; each statement stands between two probes of its own line number."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines = ["def program(torch, device, probe, keep):"]
        self.bracketed: list[int] = []
        self.calls: list[int] = []
        self.depth = 1
        self.callable = 2

    def add(self, text: str) -> int:
        self.lines.append("    " * self.depth + text)
        return len(self.lines)

    def statement(self, text: str) -> None:
        number = len(self.lines) + 2
        self.add(f"probe({number}, 0)")
        assert self.add(text) == number
        self.add(f"probe({number}, 1)")
        (self.calls if "call" in text else self.bracketed).append(number)

    def size(self) -> str:
        return str(self.random.choice((1, 100, 127, 128, 129, 1000, 5000, 300_000)))

    def name(self) -> str:
        return f"keep[{self.random.choice(NAMES)!r}]"

    def simple(self) -> str:
        new = f"torch.ones({self.size()}, device=device)"
        return self.random.choice((
            f"{self.name()} = {new}",
            f"{self.name()} = {new} * 2 + 1",
            f"keep.pop({self.random.choice(NAMES)!r}, None)",
            f"{self.name()} = [torch.ones(n, device=device) for n in (10, {self.size()}, 300)]",
            f"{new}; {new}",
            f"{self.name()} = {new}.view(1, -1)[:, :1]",
            f"{self.name()} = {new}; {self.name()} = {new} + 1; keep.pop('a', None)",
            "keep.clear()",
            "pass",
            f"keep['d'] = keep.get({self.random.choice(NAMES)!r})",
            f"({new}.requires_grad_() * 2).sum().backward()",
            f"{self.name()} = torch.nn.functional.relu({new}, inplace=True)",
        ))  # fmt: skip

    def block(self, length: int) -> None:
        for _ in range(length):
            kind = self.random.random()
            if kind < 0.6 or self.depth > 3:
                self.statement(self.simple())
            elif kind < 0.75:
                self.nested(f"for i{self.depth} in range({self.random.randint(0, 3)}):")
            elif kind < 0.85:
                self.nested("try:", "raise KeyError", "except KeyError:")
            elif self.callable:
                self.statement(f"call{self.random.randrange(self.callable)}(keep)")

    def nested(self, head: str, last: str = "pass", handler: str = "") -> None:
        self.add(head)
        self.depth += 1
        self.block(self.random.randint(1, 3))
        self.add(last)
        self.depth -= 1
        if handler:
            self.add(handler)
            self.depth += 1
            self.statement(self.simple())
            self.depth -= 1

    def program(self) -> str:
        for number in range(2):
            self.add(f"def call{number}(keep):")
            self.depth += 1
            self.callable = number
            self.statement(f"keep['here'] = torch.ones({self.size()}, device=device)")
            self.block(2)
            self.statement("keep.pop('here', None)")
            self.depth -= 1
        self.callable = 2
        self.block(self.random.randint(3, 8))
        return "\n".join(self.lines) + "\n"


def programs(count: int, first: int = 0) -> Iterator[tuple[int, Writer, str]]:
    """(seed, writer, text) of `count` programs, always the same ones."""
    for seed in range(first, first + count):
        writer = Writer(seed)
        yield seed, writer, writer.program()


class Outside:
    """What an authority outside of memlab says of each line: by how much it changed the level, and how high it rose."""

    def __init__(self, level: Callable[[], int], peak: Callable[[], int] | None = None) -> None:
        self.level, self.peak = level, peak
        self.change: Counter[int] = Counter()
        self.rise: dict[int, int] = {}
        self.executions: Counter[int] = Counter()
        self._open: list[int] = []

    def __call__(self, line: int, ends: int) -> None:
        if not ends:
            self._open.append(self.level())
            if self.peak is not None:
                torch.cuda.reset_peak_memory_stats()
            return
        before = self._open.pop()
        self.change[line] += self.level() - before
        self.executions[line] += 1
        if self.peak is not None:
            self.rise[line] = max(self.rise.get(line, 0), self.peak() - before)


def bytes_in(keep: dict[str, Any]) -> int:
    """The storages of all tensors in `keep`, each once."""
    tensors = [t for value in keep.values() for t in (value if isinstance(value, list) else [value]) if t is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def compare(first: int, count: int, device: str, folder: Path) -> int:
    """How many lines of programs were compared: with sums over the objects on the CPU, with PyTorch's counters on CUDA."""
    compared = 0
    for seed, writer, text in programs(count, first):
        keep: dict[str, Any] = {}
        on_cuda = device == "cuda"
        level = torch.cuda.memory_allocated if on_cuda else lambda keep=keep: bytes_in(keep)
        outside = Outside(level, torch.cuda.max_memory_allocated if on_cuda else None)
        start = level()
        file, space = folder / "program.py", dict[str, Any]()
        file.write_text(text)
        exec(compile(text, str(file), "exec"), space)
        with memlab.track(functions=[space["program"]], device=device, show=False, live=False) as run:
            space["program"](torch, device, outside, keep)
        report = run.lines()
        rows = {row.line: row for row in report if row.source == "program.py"}
        assert exact(report), seed
        if on_cuda:
            assert report.table.change_bytes == level() - start, seed
        for line, change in outside.change.items():
            assert rows[line].total_bytes == change, (seed, line, text)
            if line in writer.bracketed and "backward" not in text.splitlines()[line - 1]:
                assert rows[line].held_bytes == change, (seed, line, text)
            if not on_cuda:
                assert rows[line].peak_bytes >= max(change, 0) / max(outside.executions[line], 1)
            elif line in writer.bracketed:
                assert rows[line].peak_bytes == outside.rise[line], (seed, line, text)
            compared += 1
    return compared


def exact(report: LineReport) -> bool:
    """Whether what the lines held comes to what changed."""
    table = report.table
    return sum(one.held_bytes + one.backward_bytes for one in report) + table.outside_bytes == table.change_bytes


def row(report: LineReport, text: str) -> Any:
    """The row of the line that contains this text."""
    source = next(iter(report.table.sources.values()))
    (number,) = [number for number, line in source.items() if text in line and "row(" not in line]
    return next(one for one in report if one.line == number)
