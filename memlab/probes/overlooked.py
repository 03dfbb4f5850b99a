"""What a tally could not see, counted while it runs and said in sentences afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from memlab.probes.storage_log import Books
from memlab.seams import dispatch


class Overlooked:
    """Counts of what was met too late or not at all; `gaps` puts them into words."""

    def __init__(self) -> None:
        self.unseen: Counter[str] = Counter()
        """What -> how many times it was not counted."""
        self.late = self.resized = 0
        self._borrowed = self._borrowed_bytes = 0

    def borrow(self, storage: Any) -> None:
        """Note a storage that no operator made, if it is one: such memory cannot be resized."""
        if not storage.resizable():
            self._borrowed += 1
            self._borrowed_bytes += storage.nbytes()

    def gaps(self, books: Books) -> Iterator[tuple[str, str]]:
        """Each gap as (name, sentence)."""
        yield "operator scratch", "Working memory inside operators (oneDNN, MKL) is not seen; it adds to the peak."
        yield "other threads", "Tensors made by other Python threads and processes are seen when this thread uses them."
        if dispatch.compiled_something():
            yield "compiled code", "Memory inside compiled functions is not seen; what they return is, once it is used."
        if self._borrowed:
            yield "borrowed memory", BORROWED.format(self._borrowed, self._borrowed_bytes)
        if self.late:
            yield "seen late", f"{self.late} storages were first seen some time after they were made."
        if self.resized:
            yield "resized unseen", f"{self.resized} storages were resized by no operator: noticed at the end."
        if books.lost:
            yield "thinned", THINNED.format(books.lost, books.lost_largest_bytes)
        for what, times in self.unseen.items():
            yield "unseen", f"Not counted: {what}, {times} times."


BORROWED = (
    "{} storages of {} bytes were not made by an operator (NumPy arrays, loaded or mapped files, shared memory); "
    "they count while a tensor uses them."
)
THINNED = (
    "{} early events of blocks up to {} bytes were let go to bound memory; the peak and what held it are exact, "
    "the curve in the early part can be too low."
)
