"""Mixins for displaying results: as text, as HTML, and as a figure."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import fields
from html import escape
from typing import Any, Self

from memlab import torch_internals
from memlab.torch_internals.traceback import running_shell
from memlab.views.page import Page, PageLines
from memlab.views.plotly import figure
from memlab.views.scene import Scene
from memlab.views.svg import svg

_TOOLBAR = {
    "displaylogo": False, "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
}  # fmt: skip
PLOTLY = "application/vnd.plotly.v1+json"
SVG = "image/svg+xml"


class Shown:
    """Mixin for results that print as text and display in a notebook.

    A subclass defines `page`, or `text` and `html`. (A dataclass needs `repr=False`, or its own `__repr__` replaces this one.)
    """

    __slots__ = ()

    @classmethod
    def showing(cls, value: Any, **more: Any) -> Self:
        """A dataclass that the subclass extends, as one that shows itself."""
        return cls(**{field.name: getattr(value, field.name) for field in fields(value) if field.init}, **more)

    @property
    def page(self) -> Page:
        """The page to show: by default the subclass's `text`."""
        if type(self).text is Shown.text:
            raise NotImplementedError
        return Page("", (PageLines(tuple(self.text.splitlines())),))

    @property
    def text(self) -> str:
        """The result as plain text."""
        return self.page.text()

    @property
    def html(self) -> str:
        """The result as HTML; external text is escaped."""
        return self.page.html()

    def bundle(self) -> dict[str, Any]:
        """MIME type -> content; a front end shows the richest that it supports."""
        return {"text/html": self.html, "text/plain": self.text}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()

    def _mime_(self) -> tuple[str, str]:
        """What marimo asks for: one MIME type, and its content."""
        html, marimo = html_of(self.bundle()), marimo_notebook()
        if "<script" in html and marimo is not None:
            html = marimo.iframe(html, height="760px").text  # it runs scripts nowhere else
        return "text/html", html


class ShownWithFigure(Shown):
    """Mixin for results with a figure above their text: two outputs, as HTML would hide an SVG. A subclass defines `scene`."""

    __slots__ = ()

    def scene(self) -> Scene:
        """The picture as a value."""
        raise NotImplementedError

    @property
    def figure(self) -> Any:
        """The picture as a plotly figure."""
        return figure(self.scene())

    def svg(self) -> str:
        """The picture as SVG."""
        return svg(self.scene())

    def figure_bundle(self) -> dict[str, Any]:
        """MIME type -> the figure as plotly, SVG or text."""
        return bundle(self.scene())

    def table_bundle(self) -> dict[str, Any]:
        """MIME type -> content of the text below the figure."""
        return super().bundle()

    def bundle(self) -> dict[str, Any]:
        """MIME type -> everything in one; a front end shows the richest that it supports."""
        return {**self.figure_bundle(), **self.table_bundle()}

    def _ipython_display_(self) -> None:
        if not torch_internals.is_kernel(running_shell()):
            print_text(self.text)
            return
        from IPython.display import display

        display(self.figure_bundle(), raw=True)
        display(self.table_bundle(), raw=True)


class ShownPicture(Shown):
    """Mixin for figures: a subclass defines `scene`, and `text` as its alternative."""

    __slots__ = ()

    def scene(self) -> Scene:
        """The scene to draw."""
        raise NotImplementedError

    def bundle(self) -> dict[str, Any]:
        """MIME type -> the figure and its text."""
        return bundle(self.scene())

    def figure(self) -> Any:
        """The scene as a plotly figure."""
        return figure(self.scene())

    def svg(self) -> str:
        """The scene as SVG."""
        return svg(self.scene())


def bundle(scene: Scene) -> dict[str, Any]:
    """MIME type -> content of a figure, for JupyterLab and for other front ends."""
    # Not `responsive`: JupyterLab's extension resizes by itself; with it a change of theme collapses the figure.
    content = json.loads(figure(scene).to_json())
    return {PLOTLY: {**content, "config": _TOOLBAR}, SVG: svg(scene), "text/plain": scene.words}


def html_of(bundle: dict[str, Any]) -> str:
    """A bundle as one piece of HTML without scripts: its figure as SVG, and its HTML below; else its text."""
    # In a column that is narrower than the figure, the figure shrinks.
    figure = bundle.get(SVG, "").replace("<svg ", "<svg style='max-width:100%;height:auto' ", 1)
    return f"{figure}{bundle.get('text/html', '')}" or f"<pre>{escape(bundle['text/plain'])}</pre>"


def marimo_notebook() -> Any:
    """The module `marimo` in a cell of one of its notebooks, else None; it is not imported for it."""
    marimo = sys.modules.get("marimo")
    return marimo if marimo is not None and marimo.running_in_notebook() else None


def print_text(text: str) -> None:
    """Print, replacing characters that the terminal lacks; errors of a closed one are ignored."""
    with contextlib.suppress(OSError, ValueError):
        try:
            print(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding or "ascii"
            print(text.encode(encoding, "replace").decode(encoding))
