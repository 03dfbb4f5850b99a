"""`memlab.load`: a run from a file."""

from __future__ import annotations

import os
from pathlib import Path

from memlab.api.run import Run
from memlab.trace.file import load as load_trace
from memlab.trace.snapshot_read import looks_like_snapshot


def load(path: str | os.PathLike[str]) -> Run:
    """Read a run that was saved, or a PyTorch memory snapshot; files are read without executing anything in them."""
    if looks_like_snapshot(path):
        from memlab.probes.snapshot import load as load_snapshot

        return Run(Path(path).name, load_snapshot(path))
    trace = load_trace(path)
    name = str(trace.notes.get("name", ""))
    if "prediction" in trace.notes:
        from memlab.api.prediction import Prediction

        return Prediction(name, trace)
    return Run(name, trace)
