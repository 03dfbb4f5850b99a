"""Where a dataset lies before it is a batch: all in memory, mapped from a file, in one packed file or many small ones.

Limits: the pages of a mapped file are in the system's cache, which counts for nobody and gives way; a tally of tensors does
not see them, nor do they count as anonymous memory of the process.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from memlab.errors import DoesNotApply
from memlab.savings.feeding.source import Batch, Source, batch_of, each, source
from memlab.savings.technique import EXACT, Shown, Technique
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import tensors_in

BATCHES = 8
"""In the dataset of which each step takes one."""
SAMPLES = 64
"""Small files that a batch is read from."""


def wide_rows() -> Parts:
    """A small classifier of long rows: the batch, 2 MiB, is most of it."""
    model = torch.nn.Linear(4096, 8)
    batch = torch.randn(128, 4096), torch.randint(8, (128,))
    return model, torch.optim.SGD(model.parameters(), 0.01), batch, torch.nn.functional.cross_entropy


# --- mapped -----------------------------------------------------------------------------------------------------------


def _all_in_memory(job: Job) -> None:
    feed = source(job)
    feed.host = each(feed.host, lambda one: one.unsqueeze(0).repeat(BATCHES, *[1] * one.dim()))
    turn = _turns()
    feed.read = lambda: _chosen(feed.host, next(turn))


def _turns() -> Iterator[int]:
    while True:
        yield from range(BATCHES)


def _chosen(dataset: Any, index: int) -> Batch:
    return tuple(each(dataset, lambda one: one[index].clone()))


def _mapped(job: Job) -> None:
    _refuse_pretend(job)
    feed = source(job)
    layout, file = feed.host, tempfile.TemporaryFile(prefix="memlab-")  # noqa: SIM115 - it goes with the job, or a kill
    weakref.finalize(job, file.close)
    for _ in range(BATCHES):
        for one in tensors_in(layout):
            file.write(_bytes_of(one))
    file.flush()
    shapes = [(one.dtype, tuple(one.shape), one.nbytes) for one in tensors_in(layout)]
    _read_from_map(feed, file, each(layout, lambda one: torch.empty_like(one, device="meta")), shapes)


def _read_from_map(
    feed: Source, file: IO[bytes], layout: Any, shapes: list[tuple[torch.dtype, tuple[int, ...], int]]
) -> None:
    turn, size = _turns(), sum(nbytes for _, _, nbytes in shapes)

    def read() -> Batch:
        at = next(turn) * size
        found: list[Tensor] = []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            for dtype, shape, nbytes in shapes:
                found.append(_tensor_of(pages[at : at + nbytes], dtype, shape))
                at += nbytes
        parts = iter(found)
        return tuple(each(layout, lambda _: next(parts)))

    feed.host, feed.read = layout, read


def _folder(job: Job) -> Path:
    """A folder that goes when the job goes, at the latest with the process."""
    made = tempfile.mkdtemp(prefix="memlab-")
    weakref.finalize(job, shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _bytes_of(value: Tensor) -> bytes:
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.numpy())


def _tensor_of(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def _refuse_pretend(job: Job) -> None:
    if any(type(one) is not Tensor or one.is_meta for one in tensors_in(batch_of(job))):
        raise DoesNotApply("tensors without data, as those of a prediction, cannot be written to a file.")


# --- packed -----------------------------------------------------------------------------------------------------------


class Pack:
    """Many records in one file: their offsets at its end, each read by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            file.seek(-8, 2)
            file.seek(int.from_bytes(file.read(8), "little"))
            raw = file.read()[:-8]
        self.starts = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]

    @classmethod
    def write(cls, path: Path, records: Iterator[bytes]) -> Pack:
        """Write the records one after another."""
        starts = [0]
        with path.open("wb") as file:
            for one in records:
                file.write(one)
                starts.append(starts[-1] + len(one))
            file.write(b"".join(at.to_bytes(8, "little") for at in starts) + starts[-1].to_bytes(8, "little"))
        return cls(path)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, indices: Iterator[int]) -> Iterator[bytes]:
        """Those records, the file opened once."""
        with self.path.open("rb") as file:
            for index in indices:
                file.seek(self.starts[index])
                yield file.read(self.starts[index + 1] - self.starts[index])


def _records(host: Any) -> Iterator[bytes]:
    """The batch in pieces, as a dataset of small files has it."""
    for one in tensors_in(host):
        raw = _bytes_of(one)
        step = -(-len(raw) // SAMPLES) or 1
        yield from (raw[at : at + step] for at in range(0, SAMPLES * step, step))


def _joined(records: Iterator[bytes], host: Any) -> Batch:
    whole = list(records)
    parts = iter(range(0, len(whole), SAMPLES))

    def again(one: Tensor) -> Tensor:
        at = next(parts)
        return _tensor_of(b"".join(whole[at : at + SAMPLES]), one.dtype, tuple(one.shape))

    return tuple(each(host, again))


def _many_files(job: Job) -> None:
    _refuse_pretend(job)
    feed, folder = source(job), _folder(job)
    host, files = feed.host, []
    for index, one in enumerate(_records(host)):
        files.append(folder / f"{index}")
        files[-1].write_bytes(one)
    feed.read = lambda: _joined((one.read_bytes() for one in files), host)


def _packed(job: Job) -> None:
    _refuse_pretend(job)
    feed, folder = source(job), _folder(job)
    host = feed.host
    pack = Pack.write(folder / "pack", _records(host))
    feed.read = lambda: _joined(pack.read(iter(range(len(pack)))), host)


TECHNIQUES = (
    Technique(
        name="memory_mapped_data",
        idea="The dataset stays in its file and only the batch is copied out: mapped pages are the system's cache.",
        attacks=("host memory", "input"),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="A page that is read the first time comes from the disk; shuffled access over a slow disk is slow.",
        not_when="The dataset is small, or every batch is read from a network drive.",
        code="import numpy\n\n"
        "rows = numpy.memmap('data.bin', dtype='float32', mode='r', shape=(count, width))\n"
        "batch = torch.from_numpy(rows[start:start + 128].copy())      # only this is in memory",
        references=("NumPy docs, memmap, https://numpy.org/doc/stable/reference/generated/numpy.memmap.html",),
        shown=Shown(wide_rows, share=0.0),
        tips=("F4",),
        excludes={"pack_small_files": "both say what the dataset is read from", "resize_once": "both say what is read"},
        apply=_mapped,
        habit=_all_in_memory,
    ),
    Technique(
        name="pack_small_files",
        idea="Many small files in one (LMDB, HDF5, TFRecord): one file to open, and no part of a disk block left empty.",
        attacks=("host memory",),
        kind="practice",
        stage="step",
        equality=EXACT,
        price="A step before training, and the samples twice on the disk until the small files are deleted.",
        not_when="Samples are a few large files; they change often.",
        code="starts = [0]\n"
        "with open('pack.bin', 'wb') as pack:\n"
        "    for path in paths:\n"
        "        data = path.read_bytes()\n"
        "        pack.write(data)\n"
        "        starts.append(starts[-1] + len(data))      # keep these: sample i is starts[i]:starts[i + 1]",
        references=("LMDB, http://www.lmdb.tech/doc/", "WebDataset, https://github.com/webdataset/webdataset"),
        shown=Shown(wide_rows, share=0.0),
        tips=("F4",),
        excludes={
            "memory_mapped_data": "both say what the dataset is read from",
            "resize_once": "both say what is read",
        },
        apply=_packed,
        habit=_many_files,
    ),
)
