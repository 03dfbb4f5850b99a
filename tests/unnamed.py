"""How much of a peak has neither a name nor a module."""

from __future__ import annotations

from typing import Any

import numpy as np

from memlab.analysis.breakdown import names_of
from memlab.analysis.peak import alive_at, peak
from memlab.trace.columns import Category

LIMIT = 0.2
"""The share of the bytes at the peak that may have neither; more only where the whole model has more."""


def unnamed(run: Any) -> float:
    """The share of the bytes at the peak whose tensor has neither a name nor a module, or no category."""
    trace, device = run.trace, run.devices[0].device.index
    row = peak(trace, device, "allocated").row
    rows = alive_at(trace, device, row)
    block, nbytes = trace.events.block[rows], trace.events.requested_bytes[rows]
    is_known = (trace.blocks.name[block] >= 0) | (trace.blocks.module[block] >= 0)
    is_known &= (names_of(trace, rows, "category", row) != Category.OTHER.name.lower()) | (
        trace.blocks.name[block] >= 0
    )
    return float(np.where(is_known, 0, nbytes).sum() / nbytes.sum())
