"""Events that were logged, the marks and the claims, put together: the Trace of a probe whose log knows each block's birth."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from memlab.probes.categories import categorised
from memlab.probes.claims import claims
from memlab.probes.marks import MarkColumns
from memlab.trace.columns import Array, Blocks, Events, Kind
from memlab.trace.trace import MadeBy, Trace


def assembled(
    events: Events,
    births: Mapping[str, Array],
    texts: Mapping[str, tuple[str, ...]],
    made_by: MadeBy,
    first_row: int,
    marks: MarkColumns,
    start_ns: int,
    claims_from_ns: int,
) -> Trace:
    """The trace: `births` has op, dtype and shape of each block (numbers in `texts`); times of events count from `start_ns`.

    A block gets the phase and the module in which it was made, a category and a name from what the objects claimed since
    `claims_from_ns`.
    """
    phase, module = marks.steps()
    made = np.flatnonzero(events.kind == Kind.ALLOC)
    moment, block = events.time_ns[made] + start_ns, events.block[made]
    count = len(births["op"])
    in_phase, in_module = np.zeros(count, "u1"), np.full(count, -1)
    in_phase[block], in_module[block] = phase.at(moment), module.at(moment)
    blocks = Blocks.unknown(count, **births, phase=in_phase, module=in_module)
    trace = Trace(
        events,
        blocks,
        made_by,
        first_row=first_row,
        marks=marks.table(events, first_row, start_ns),
        texts={**texts, "module": marks.texts, "mark": marks.texts},
    )
    trace = categorised(trace, claims.log.columns(claims_from_ns, time.time_ns()), marks, start_ns)
    return trace.with_gaps(*claims.gaps(), *marks.gaps())
