"""The Trace, the interface between measuring and showing: its columns, its file."""

from memlab.trace.columns import (
    Blocks,
    Category,
    Events,
    Kind,
    MarkKind,
    Marks,
    Phase,
    Recategorised,
    Samples,
    deltas,
)
from memlab.trace.trace import CPU, Bounded, Device, Gap, MadeBy, Trace

__all__ = [
    "CPU", "Blocks", "Bounded", "Category", "Device", "Events", "Gap", "Kind", "MadeBy", "MarkKind", "Marks", "Phase",
    "Recategorised", "Samples", "Trace", "deltas",
]  # fmt: skip
