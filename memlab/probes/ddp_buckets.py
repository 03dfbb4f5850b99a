"""Buckets of DistributedDataParallel that were there before a run on the CPU.

C++ alone holds them: an operator shows one when gradients are written into it, which may be after the peak, or never. Their
sizes are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from memlab.trace import Kind


def begin_with_buckets(
    columns: dict[str, Any], sizes: Sequence[int], older: int, rebuilt: Sequence[int] | None
) -> bool:
    """Let buckets of these sizes begin with the run, in columns of the storage log.

    Blocks numbered below `older` were found at the start without this. `rebuilt` are the buckets by which these were replaced
    within the run; None if that is not known. False if so it is not known until when a bucket lived: then nothing has changed.
    """
    ops = (*columns["texts"]["op"], "")
    op = [ops[number] for number in columns["op"][columns["block"]]]
    is_made = columns["kind"] == Kind.ALLOC
    is_written = is_made & np.array([".out" in text or text.startswith("aten.copy_.") for text in op], bool)
    is_candidate = is_written | (columns["kind"] == Kind.PREEXISTING)
    is_candidate &= np.isin(columns["nbytes"], list(sizes)) & (columns["block_id"][columns["block"]] >= older)
    missing, seen = Counter(sizes), []
    for row in np.flatnonzero(is_candidate).tolist():
        if missing[int(columns["nbytes"][row])]:
            missing[int(columns["nbytes"][row])] -= 1
            seen.append(row)
    unseen = np.array([*missing.elements()], np.int64)
    is_new = is_made & np.isin(columns["nbytes"], list(rebuilt or ())) & [text.startswith("aten.empty") for text in op]
    if len(unseen) and (rebuilt is None or (rebuilt and not is_new.any())):
        return False
    columns["kind"][seen] = Kind.PREEXISTING
    columns["block_id"][columns["block"][seen]] = -1  # no bucket of another module
    blocks = len(columns["block_id"])
    rows = {"nbytes": unseen, "block": np.arange(blocks, blocks + len(unseen)), "key": 0, "time_ns": 0}
    if len(unseen) and rebuilt:
        at = int(is_new.argmax())
        _insert(columns, at, rows | {"time_ns": columns["time_ns"][at], "kind": int(Kind.FREE)})
    _insert(columns, 0, rows | {"kind": int(Kind.PREEXISTING)})
    for name in ("op", "dtype", "shape", "block_id"):
        columns[name] = np.append(columns[name], np.full(len(unseen), -1, columns[name].dtype))
    order = np.argsort(columns["kind"] != Kind.PREEXISTING, kind="stable")
    columns |= {name: columns[name][order] for name in ("time_ns", "kind", "block", "nbytes", "key")}
    columns["first_row"] = int((columns["kind"] == Kind.PREEXISTING).sum())
    return True


def _insert(columns: dict[str, Any], at: int, rows: dict[str, Any]) -> None:
    for name, values in rows.items():
        more = np.broadcast_to(values, len(rows["nbytes"])).astype(columns[name].dtype)
        columns[name] = np.insert(columns[name], at, more)
