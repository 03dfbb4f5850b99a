"""PyTorch memory snapshots, out and in: `save` writes one of any Trace, `read` reads one without executing anything.

What `read` gives is made into a Trace by `memlab.probes.snapshot.load`, which keeps the allocator's books along the entries.
"""

from memlab.trace.snapshot_read import Snapshot, looks_like_snapshot, parse, read
from memlab.trace.snapshot_write import CATEGORIES, save, snapshot

__all__ = ["CATEGORIES", "Snapshot", "looks_like_snapshot", "parse", "read", "save", "snapshot"]
