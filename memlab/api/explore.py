"""`run.explore()`: the explorer of one run or two, with what keeps its blocks alive at this moment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memlab.analysis.timeline import lives
from memlab.references.live_storages import LiveStorages, live_storages
from memlab.references.live_tensors import tensors_and_storages
from memlab.torch_internals import graph
from memlab.trace.trace import CPU, Trace
from memlab.units import one_line
from memlab.views.explorer import Explorer, ExplorerRun

BUDGET_S = 5.0
"""The time limit of the search for names."""


def explore(chosen: Sequence[tuple[Any, int]]) -> Explorer:
    """The explorer of these runs, each with the number of the device that is shown."""
    is_here = [run.measured_by == os.getpid() for run, _ in chosen]
    live = live_storages(budget_s=BUDGET_S) if any(is_here) else None
    shown = []
    for (run, device), here in zip(chosen, is_here, strict=True):
        held = holders(run.trace, device, live) if here and live is not None else None
        shown.append(ExplorerRun(run.report().title, run.trace, device, run.cell_line, held))
    return Explorer(*shown)


def holders(trace: Trace, device: int, live: LiveStorages) -> dict[int, list[str]]:
    """Block -> what keeps it alive, for blocks that the run did not free.

    A block is that of a live storage if address, size and, where they are known, shape and dtype agree: a later one of the
    same kind at the same address would be taken for it.
    """
    born, died = lives(trace, device)
    blocks = np.flatnonzero((born >= 0) & (died >= len(trace.events)))
    rows, events = born[blocks], trace.events
    places = zip(events.address[rows].tolist(), events.requested_bytes[rows].tolist(), strict=True)
    known = dict(zip(places, blocks.tolist(), strict=True))
    # The CPU tracker identifies a storage by its Python object, the allocator's history by its address.
    objects = {graph.storage_key(one): id(one) for one in tensors_and_storages() if type(one) is torch.UntypedStorage}
    place, found = "cpu" if device == CPU else f"cuda:{device}", {}
    for storage in live.storages:
        where = objects.get(storage.key, 0) if device == CPU else storage.address
        block = known.get((where, storage.nbytes), -1) if storage.device == place else -1
        if block < 0:
            continue
        dtype = trace.text("dtype", int(trace.blocks.dtype[block]))
        if dtype and storage.dtype and dtype != storage.dtype.removeprefix("torch."):
            continue
        more = [f"and {storage.others} more (%memwho lists them)"] if storage.others else []
        how = live.holders.get(storage.key, "no name leads to it") if not storage.path else storage.path
        found[block] = [one_line(how, 400), *more]
    return found
