"""The peak against the batch, with the memory of the GPU as a level across."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memlab.units import ByteRange
from memlab.views import theme
from memlab.views.scene import Axis, Item, Label, Line, Mark, Panel, Rule, Scene, Shade, round_ticks

_MARKS = {
    "yes": ("dot", theme.SERIES["used"], "fits"),
    "close": ("ring", theme.WARNING, "too close to call"),
    "no": ("cross", theme.CAPACITY, "does not fit"),
}


def batch_scene(
    title: str,
    words: str,
    tried: Iterable[tuple[int, str, ByteRange]],
    batch: int,
    perhaps: int,
    gpu: str,
    usable: ByteRange,
) -> Scene:
    """The predictions (batch, whether it fits, what it needs) up to about twice the largest batch; `words` is their text."""
    most = 2 * (perhaps + 1)
    shown = sorted(one for one in tried if one[0] <= most)
    right = float(max([*(number for number, *_ in shown), perhaps + 1])) * 1.04
    top = 1.18 * max([usable.high, *(needs.high for _, _, needs in shown)])
    items: list[Item] = [Shade(0, batch, theme.SERIES["used"], 0.1, "fits")] if batch else []
    if perhaps > batch:
        items.append(Shade(batch, perhaps, theme.WARNING, 0.12, "too close to call"))
    items += _curves(shown)
    items += [Rule(level, theme.CAPACITY, "") for level in sorted(set(usable))]
    items.append(Label(0.25 * right, usable.high, f"{gpu}: {usable} usable", theme.CAPACITY))
    for number, fits, needs in shown:
        kind, colour, answer = _MARKS[fits]
        items.append(Mark(number, needs.high, kind, colour, f"batch {number:,} {answer}: needs {needs}"))
    if batch:
        items.append(Label(batch, 0, f"largest: {batch:,}", is_bold=True))
    ticks = tuple((at, f"{at:,}") for at in round_ticks(0, int(right)))
    panel = Panel(Axis.of_bytes(top), {"": (Axis(0.0, right, ticks, "batch"),)}, tuple(items))
    return Scene(title, words, (panel,), title, height=280, bottom=44)


def _curves(shown: Sequence[tuple[int, str, ByteRange]]) -> list[Line]:
    """The upper bounds of what is needed, and the lower bounds where they differ."""
    if len(shown) < 2:
        return []
    x, colour = np.array([number for number, *_ in shown], float), theme.SERIES["used"]
    low, high = (np.array([needs[end] for _, _, needs in shown], float) for end in (0, 1))
    lines = [Line("device memory needed, predicted: at most", x, high, colour, 1.8, shape="joined")]
    if (low < high).any():
        lines.append(Line("at least", x, low, colour, 0.9, shape="samples"))
    return lines
