"""A small trace with one of everything, for tests of files."""

from __future__ import annotations

import numpy as np

from memlab.trace import CPU, Blocks, Bounded, Device, Events, Gap, MadeBy, Marks, Samples, Trace


def small_trace() -> Trace:
    """Three blocks, one mark, one sample, texts with every kind of awkward character."""
    events = Events(
        [0, 5, 9, 12], [0, 1, 1, 2], [0, 1, 2, 1], [100, 200, 300, 200], [512] * 4, [-1] * 4, [0] * 4, [0] * 4
    )
    blocks = Blocks.unknown(3, line=np.array([-1, 0, 1]), op=np.array([0, 0, 0]))
    made_by = MadeBy("test", (Device(CPU, "cpu"),), {"torch": "x"}, 1.5, 20, (Gap("a", "b"),), (Bounded(0, 1, 2, 3),))
    texts = {"line": ("cell:1", "naïve \ud800 <script>\n"), "op": ("aten::add",), "mark": ("forward",)}
    marks, samples = Marks([1], [4], [0], [0]), Samples([3], [-1], [-1], [-1], [7], [8], [9])
    return Trace(events, blocks, made_by, 1, marks, samples, texts=texts, notes={"name": "n"})
