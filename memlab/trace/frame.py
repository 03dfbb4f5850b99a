"""A trace as a pandas DataFrame; pandas is imported only when one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from memlab.trace.columns import Blocks, Category, Kind, Phase

if TYPE_CHECKING:
    from memlab.trace.trace import Trace


def events_frame(trace: Trace) -> Any:
    """One row per event: time_s, kind, block, sizes in bytes, device, and what is known of the block.

    Texts are pandas categoricals, so that ten million rows stay affordable; rows before `trace.first_row` (what was
    there at the start) have `before_start` True.
    """
    import pandas

    events = trace.events
    frame = pandas.DataFrame({"time_s": events.time_ns / 1e9, "kind": _enum_column(events.kind, Kind)})
    for name in ("block", "requested_bytes", "allocated_bytes", "device", "stream", "address"):
        frame[name] = getattr(events, name)
    frame["before_start"] = np.arange(len(events)) < trace.first_row
    of_block = np.where(events.block >= 0, events.block, 0)
    for name, codes in (("category", Category), ("phase", Phase)):
        column = getattr(trace.blocks, name)
        values = column[of_block] if len(column) else np.zeros(len(events), "u1")
        frame[name] = _enum_column(values, codes)
    for name in Blocks.TEXTS:
        column = getattr(trace.blocks, name)
        values = np.where(events.block >= 0, column[of_block], -1) if len(column) else np.full(len(events), -1)
        frame[name] = pandas.Categorical.from_codes(values, categories=pandas.Index(trace.texts[name]))
    return frame


def _enum_column(codes: np.ndarray, names: Any) -> Any:
    import pandas

    return pandas.Categorical.from_codes(codes, categories=[name.name.lower() for name in names])
