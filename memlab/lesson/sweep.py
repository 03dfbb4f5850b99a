"""A sweep: the peak over the values of a setting, what held it, and a slider that selects one value.

The figure is static and stays without a kernel; the slider above it highlights one bar.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import ipywidgets
from IPython.display import display

from memlab import torch_internals
from memlab.api.run import Run
from memlab.errors import MemlabError
from memlab.lesson.claim import Measured
from memlab.torch_internals.traceback import running_shell
from memlab.units import format_bytes, one_line
from memlab.views import theme
from memlab.views.scene import Axis, Bars, Label, Panel, Scene
from memlab.views.shown import ShownPicture
from memlab.views.table import Column, Table

MAX_VALUES = 24
_FADED = 0.35
_ROOM_FOR_LABELS = 1.12
_OTHER = "other"


class Sweep(ShownPicture):
    """Peaks of runs (or numbers of bytes) over the values of a setting; in a notebook with a slider.

    `sweep.select(value)` highlights one; `sweep.peaks` has the bytes.
    """

    def __init__(self, name: str, runs: Mapping[Any, Measured]) -> None:
        if not 2 <= len(runs) <= MAX_VALUES:
            example = "lesson.sweep('batch', {8: run, 16: other})"
            raise MemlabError(f"a sweep has 2 to {MAX_VALUES} values, got {len(runs)}: {example}.")
        self.name = one_line(name, 60)
        self.selected: Any = None
        self._display: Any = None
        self.peaks: dict[Any, int] = {}
        remarks = (run.trace.remark for run in runs.values() if isinstance(run, Run))
        self._remark = next(filter(None, remarks), "")
        self._held: dict[Any, dict[str, int]] = {}  # category -> bytes at the peak, which sum to the peak
        for value, run in runs.items():
            if not isinstance(run, Run) and (not isinstance(run, int) or isinstance(run, bool) or run < 0):
                raise MemlabError(f"a sweep compares runs, or numbers of bytes, got {type(run).__name__}.")
            peak = self.peaks[value] = run if isinstance(run, int) else int(run.peak_allocated_bytes)
            shares = {} if isinstance(run, int) else run.breakdown()
            held = {name: count for name, count in shares.items() if name in theme.CATEGORIES and count > 0}
            rest = peak - sum(held.values())
            if rest > 0 or isinstance(run, int):  # the rest that no category explains
                held[_OTHER] = held.get(_OTHER, 0) + rest
            self._held[value] = held

    def select(self, value: Any) -> Sweep:
        """Select one value; a displayed figure is updated."""
        if value not in self.peaks:
            raise MemlabError(f"{self.name} has the values {', '.join(map(_short, self.peaks))}; got {value!r:.80}.")
        self.selected = value
        if self._display is not None:
            # JupyterLab's plotly extension never redraws a figure: showing text in between removes it.
            self._display.update({"text/plain": self.text}, raw=True)
            self._display.update(self.bundle(), raw=True)
        return self

    turn, at = select, property(attrgetter("selected"))  # the earlier names

    @property
    def names(self) -> list[str]:
        """The categories of the bars, bottom first."""
        return [name for name in theme.CATEGORIES if any(name in held for held in self._held.values())]

    @property
    def sentence(self) -> str:
        """The peak of the selected value, or the lowest and the highest peak, wherever in the sweep they are."""
        first = next(iter(self.peaks))
        if self.selected is None:
            low, high = (of(self.peaks, key=self.peaks.__getitem__) for of in (min, max))
            lowest, highest = (f"{format_bytes(self.peaks[value])} at {_short(value)}" for value in (low, high))
            ratio = self.peaks[high] / max(self.peaks[low], 1)
            return f"{self.name}: the lowest peak is {lowest}, the highest {highest}: {ratio:.2f} times as much."
        count, held = self.peaks[self.selected], self._held[self.selected]
        name, size = max(held.items(), key=lambda item: item[1], default=(_OTHER, 0))
        most = f", most of it {name} ({format_bytes(size)})" if len(held) > 1 else ""
        times = f"; {count / max(self.peaks[first], 1):.2f} times that of {_short(first)}"
        times = "" if self.selected == first else times
        return f"{self.name} {_short(self.selected)}: peak {format_bytes(count)}{most}{times}."

    @property
    def text(self) -> str:
        """The sentence, and one bar per value."""
        columns = (Column(""), Column(self.name), Column("peak", "bytes"))
        marks = (">" if value == self.selected else " " for value in self.peaks)
        rows = tuple(zip(marks, map(_short, self.peaks), self.peaks.values(), strict=True))
        return "\n".join(filter(None, (Table(self.sentence, columns, rows, bar=2).text(), self._remark)))

    def to_pandas(self) -> Any:
        """One row per value, one column per category of what held the peak, in bytes."""
        import pandas

        rows = [{self.name: value, "peak_bytes": self.peaks[value], **self._held[value]} for value in self.peaks]
        return pandas.DataFrame(rows).set_index(self.name)

    def _ipython_display_(self) -> None:
        """The slider, if there is a kernel, and the static figure."""
        if torch_internals.is_kernel(running_shell()):
            content = self.slider()._repr_mimebundle_() or {}
            display({**content, "text/plain": ""}, raw=True)  # a saved notebook has the figure instead
        self._display = display(self.bundle(), raw=True, display_id=True)

    def slider(self) -> Any:
        """The slider alone, which also works with the arrow keys."""
        options = [(_short(value), value) for value in self.peaks]
        slider = ipywidgets.SelectionSlider(
            options=options, value=options[0][1] if self.selected is None else self.selected, description=self.name,
            continuous_update=False, style={"description_width": "initial"}, layout={"width": "75%"},
        )  # fmt: skip
        slider.observe(lambda change: self.select(change["new"]), "value")
        return slider

    def scene(self) -> Scene:
        """One bar per value; all but the selected one are faded."""
        layers = {name: [held.get(name, 0) for held in self._held.values()] for name in self.names}
        opacity = tuple(1.0 if self.selected in (None, value) else _FADED for value in self.peaks)
        labels = (
            Label(at, count, format_bytes(count), is_bold=value == self.selected)
            for at, (value, count) in enumerate(self.peaks.items())
        )
        ticks = tuple((at, _short(value)) for at, value in enumerate(self.peaks))
        x = Axis(-0.5, len(ticks) - 0.5, ticks, self.name)
        y = Axis.of_bytes(max(*self.peaks.values(), 1) * _ROOM_FOR_LABELS)
        panel = Panel(y, {"": (x,)}, (Bars(layers, opacity), *labels))
        heading = " · ".join(filter(None, (self.sentence, self._remark)))
        return Scene(f"Peak over {self.name}", self.text, (panel,), heading, height=260, top=12, bottom=44)


def _short(value: Any) -> str:
    return one_line(str(value), 40)
