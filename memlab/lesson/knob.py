"""One knob turned: the peak over the values of a setting, who held it, and a slider that points at one value.

The picture is static (plotly, SVG, words) and stays when the kernel is gone; the slider beside it says which bar is strong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import ipywidgets
from IPython.display import display

from memlab import seams
from memlab.errors import MemlabError
from memlab.lesson.claim import Measured
from memlab.session.run import Run
from memlab.session.show import ipython
from memlab.units import format_bytes, one_line
from memlab.views import theme
from memlab.views.bundle import PLOTLY, SVG
from memlab.views.figure import Unit, escaped
from memlab.views.svg import byte_ticks, short_bytes

WIDTH, HEIGHT = 880, 270
MOST = 24
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 770, 26, 44
_FADED = 0.35
_ROOM = 1.12  # above the highest bar, for its label
_OTHER = "other"


class Knob:
    """Peaks of runs (or numbers of bytes) over the values of a setting; in a notebook with a slider.

    `knob.turn(value)` points at one; `knob.peaks` has the bytes.
    """

    def __init__(self, name: str, runs: Mapping[Any, Measured]) -> None:
        if not 2 <= len(runs) <= MOST:
            raise MemlabError(
                f"a knob has 2 to {MOST} values, got {len(runs)}: lesson.knob('batch', {{8: run, 16: other}})."
            )
        self.name = one_line(name, 60)
        self.peaks = {value: _peak(run) for value, run in runs.items()}
        self._held = {value: _held(run, self.peaks[value]) for value, run in runs.items()}
        self.at: Any = None
        self._place: Any = None

    def turn(self, value: Any) -> Knob:
        """Point at one value; a picture that is shown follows."""
        if value not in self.peaks:
            raise MemlabError(f"{self.name} has the values {', '.join(map(_short, self.peaks))}; got {value!r:.80}.")
        self.at = value
        if self._place is not None:
            # Plotly's extension of JupyterLab never draws over a figure: the words in between take it away.
            self._place.update({"text/plain": str(self)}, raw=True)
            self._place.update(self.bundle(), raw=True)
        return self

    @property
    def sentence(self) -> str:
        """What the picture says, of the value that is pointed at, or of the two ends."""
        values = list(self.peaks)
        if self.at is None:
            first, last = (f"{_short(one)}: {format_bytes(self.peaks[one])}" for one in (values[0], values[-1]))
            ratio = self.peaks[values[-1]] / max(self.peaks[values[0]], 1)
            return f"{self.name} from {first} to {last}: {ratio:.2f} times the peak."
        count, first = self.peaks[self.at], values[0]
        times = f"; {count / max(self.peaks[first], 1):.2f} times that of {_short(first)}" if self.at != first else ""
        most = max(self._held[self.at].items(), key=lambda item: item[1], default=(_OTHER, 0))
        held = f", most of it {most[0]} ({format_bytes(most[1])})" if len(self._held[self.at]) > 1 else ""
        return f"{self.name} {_short(self.at)}: peak {format_bytes(count)}{held}{times}."

    def __str__(self) -> str:
        wide = max(map(len, map(_short, self.peaks)))
        top = max(self.peaks.values(), default=1) or 1
        rows = (
            f"  {'>' if value == self.at else ' '} {_short(value).rjust(wide)}  {format_bytes(count).rjust(11)}  "
            f"{'█' * round(30 * count / top)}"
            for value, count in self.peaks.items()
        )
        return "\n".join([self.sentence, *rows])

    __repr__ = __str__

    def to_pandas(self) -> Any:
        """One row per value, one column per category of what held the peak, in bytes."""
        import pandas

        rows = [{self.name: value, "peak_bytes": self.peaks[value], **self._held[value]} for value in self.peaks]
        return pandas.DataFrame(rows).set_index(self.name)

    # --- in a notebook ---------------------------------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        """The slider, where there is a kernel for it, and the static picture."""
        if seams.is_kernel(ipython()):
            slider = self.slider()
            # Its words are empty: a saved notebook has the picture.
            display({"text/plain": "", **_widget(slider)}, raw=True)
        self._place = display(self.bundle(), raw=True, display_id=True)

    def slider(self) -> Any:
        """The widget alone: moved, it turns the knob; by keyboard with the arrows."""
        options = [(_short(value), value) for value in self.peaks]
        first = options[0][1] if self.at is None else self.at
        made = ipywidgets.SelectionSlider(
            options=options, value=first, description=self.name, continuous_update=False,
            style={"description_width": "initial"}, layout={"width": "75%"},
        )  # fmt: skip
        made.observe(lambda change: self.turn(change["new"]), "value")
        return made

    def bundle(self) -> dict[str, Any]:
        """MIME type -> the picture."""
        return {PLOTLY: self.figure(), SVG: self.svg(), "text/plain": str(self)}

    # --- pictures --------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """What the bars are made of, from the lowest up."""
        found = {name for held in self._held.values() for name in held}
        return [name for name in theme.CATEGORIES if name in found]

    def figure(self) -> dict[str, Any]:
        """What plotly draws: one bar a value, in the order of the values."""
        unit = Unit(max(self.peaks.values()))
        data = [self._bar(name, unit) for name in self.names]
        return {"data": data, "layout": self._layout(unit), "config": {"displaylogo": False}}

    def _bar(self, name: str, unit: Unit) -> dict[str, Any]:
        strength = [1.0 if self.at in (None, value) else _FADED for value in self.peaks]
        return {
            "type": "bar",
            "x": list(range(len(self.peaks))),
            "y": unit.of([held.get(name, 0) for held in self._held.values()]).tolist(),
            "name": name,
            "marker": {"color": theme.CATEGORIES[name], "opacity": strength, "line": {"width": 0}},
            "width": 0.66,
            "hovertemplate": f"{unit.hover}<extra>{name}</extra>",
        }

    def _label(self, index: int, count: int, unit: Unit) -> dict[str, Any]:
        place = {"x": index, "y": float(unit.of(count)), "showarrow": False, "yanchor": "bottom"}
        return {**place, "text": format_bytes(count), "font": {"size": 11}}

    def _layout(self, unit: Unit) -> dict[str, Any]:
        top = max(self.peaks.values()) * _ROOM
        return {
            "title": {"text": escaped(self.sentence), "font": {"size": 13}, "x": 0.01, "y": 0.99, "yanchor": "top"},
            "height": HEIGHT,
            "margin": {"l": _LEFT, "r": 14, "t": 34, "b": _BOTTOM},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": theme.TEXT, "size": 12},
            "barmode": "stack",
            "annotations": [self._label(index, count, unit) for index, count in enumerate(self.peaks.values())],
            "hovermode": "closest",
            "showlegend": len(self.names) > 1,
            "legend": {"traceorder": "reversed", "x": 1.01, "y": 1, "yanchor": "top", "font": {"size": 11}},
            "xaxis": {
                "tickvals": list(range(len(self.peaks))),
                "ticktext": [escaped(_short(value)) for value in self.peaks],
                "title": {"text": escaped(self.name), "standoff": 6},
                "zeroline": False,
            },
            "yaxis": {
                "range": [0, top / unit.bytes],
                "tickvals": [tick / unit.bytes for tick in byte_ticks(top)],
                "ticktext": [short_bytes(tick) for tick in byte_ticks(top)],
                "gridcolor": theme.GRID,
                "zeroline": False,
            },
        }

    def svg(self) -> str:
        """The same as a small SVG, whose description is the sentence."""
        top = max(self.peaks.values()) * _ROOM or 1.0
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
            f'font-family="system-ui,sans-serif" font-size="12" fill="{theme.TEXT}">',
            f"<title>Peak over {escape(self.name)}</title><desc>{escape(self.sentence)}</desc>",
            f'<text x="{_LEFT}" y="14" font-weight="600">{escape(self.sentence)}</text>',
            *self._grid(top),
            *self._bars(top),
            *self._keys(),
        ]
        return "".join(parts) + "</svg>"

    def _grid(self, top: float) -> Iterator[str]:
        for tick in byte_ticks(top):
            y = _y(tick, top)
            yield f'<path d="M{_LEFT} {y}H{_RIGHT}" stroke="{theme.TEXT}" stroke-opacity=".25"/>'
            yield f'<text x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{short_bytes(tick)}</text>'
        middle = (_LEFT + _RIGHT) // 2
        yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(self.name)}</text>'

    def _bars(self, top: float) -> Iterator[str]:
        step = (_RIGHT - _LEFT) / len(self.peaks)
        for index, (value, count) in enumerate(self.peaks.items()):
            left, wide, below = round(_LEFT + (index + 0.17) * step), round(0.66 * step), 0
            strong = "" if self.at in (None, value) else f' fill-opacity="{_FADED}"'
            for name in self.names:
                size = self._held[value].get(name, 0)
                y, height = _y(below + size, top), _y(below, top) - _y(below + size, top)
                below += size
                if height:
                    colour = theme.CATEGORIES[name]
                    yield f'<rect x="{left}" y="{y}" width="{wide}" height="{height}" fill="{colour}"{strong}/>'
            middle, weight = left + wide // 2, ' font-weight="600"' if value == self.at else ""
            label = f'text-anchor="middle"{weight}'
            yield f'<text x="{middle}" y="{_y(count, top) - 4}" font-size="11" {label}>{format_bytes(count)}</text>'
            yield f'<text x="{middle}" y="{HEIGHT - _BOTTOM + 15}" {label}>{escape(_short(value))}</text>'

    def _keys(self) -> Iterator[str]:
        if len(self.names) < 2:
            return
        for i, name in enumerate(reversed(self.names)):
            y = _TOP + 14 + 19 * i
            yield f'<rect x="{_RIGHT + 14}" y="{y - 8}" width="10" height="8" fill="{theme.CATEGORIES[name]}"/>'
            yield f'<text x="{_RIGHT + 28}" y="{y}">{name}</text>'


def _peak(run: Measured) -> int:
    if isinstance(run, Run):
        return int(run.peak_allocated_bytes)
    if isinstance(run, int) and not isinstance(run, bool) and run >= 0:
        return run
    raise MemlabError(f"a knob compares runs, or numbers of bytes, got {type(run).__name__}.")


def _held(run: Measured, peak_bytes: int) -> dict[str, int]:
    """Category -> bytes at the peak, which come to the peak: what no category explains is `other`."""
    if not isinstance(run, Run):
        return {_OTHER: peak_bytes}
    found = {name: count for name, count in run.breakdown().items() if name in theme.CATEGORIES and count > 0}
    rest = peak_bytes - sum(found.values())
    return {**found, _OTHER: found.get(_OTHER, 0) + rest} if rest > 0 else found


def _y(count: float, top: float) -> int:
    return round(HEIGHT - _BOTTOM - count / top * (HEIGHT - _TOP - _BOTTOM))


def _short(value: Any) -> str:
    return one_line(str(value), 40)


def _widget(slider: Any) -> dict[str, Any]:
    """What shows a widget, without the words that a saved notebook would show in its place."""
    found = slider._repr_mimebundle_() or {}
    return {kind: content for kind, content in found.items() if kind != "text/plain"}


__all__ = ["Knob"]
