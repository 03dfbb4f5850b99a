"""How a result shows itself: as text, as HTML, and as a figure where it has one."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from memlab import torch_internals
from memlab.torch_internals.traceback import running_shell
from memlab.views.page import Page, PageLines
from memlab.views.plotly import figure
from memlab.views.scene import Scene
from memlab.views.svg import svg

PLOTLY = "application/vnd.plotly.v1+json"
SVG = "image/svg+xml"


class Shown:
    """Mixin of what prints as text and shows itself in a notebook.

    A subclass gives `page`, or `text` and `html`. (A dataclass needs `repr=False`, or its own `__repr__` replaces this one.)
    """

    __slots__ = ()

    @property
    def page(self) -> Page:
        """What is shown: by default the words that a subclass gives as `text`."""
        if type(self).text is Shown.text:
            raise NotImplementedError
        return Page("", (PageLines(tuple(self.text.splitlines())),))

    @property
    def text(self) -> str:
        """It as plain text."""
        return self.page.text()

    @property
    def html(self) -> str:
        """It as HTML; everything from outside is escaped."""
        return self.page.html()

    def bundle(self) -> dict[str, Any]:
        """MIME type -> content; a front end shows the richest that it knows."""
        return {"text/html": self.html, "text/plain": self.text}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()


class ShownWithFigure(Shown):
    """Mixin of what has a figure above its words: two outputs, as HTML hides an SVG."""

    __slots__ = ()

    def figure_bundle(self) -> dict[str, Any]:
        """MIME type -> content of the figure and its twins."""
        raise NotImplementedError

    def table_bundle(self) -> dict[str, Any]:
        """MIME type -> content of the words below the figure."""
        return super().bundle()

    def bundle(self) -> dict[str, Any]:
        """MIME type -> content of all in one; a front end shows the richest that it knows."""
        return {**self.figure_bundle(), **self.table_bundle()}

    def _ipython_display_(self) -> None:
        if not torch_internals.is_kernel(running_shell()):
            print_text(self.text)
            return
        from IPython.display import display

        display(self.figure_bundle(), raw=True)
        display(self.table_bundle(), raw=True)


class ShownPicture(Shown):
    """Mixin of what is a picture: a subclass gives `scene`, and `text` for its words."""

    __slots__ = ()

    def scene(self) -> Scene:
        """What is drawn."""
        raise NotImplementedError

    def bundle(self) -> dict[str, Any]:
        """MIME type -> the picture and its words."""
        return bundle(self.scene())

    def figure(self) -> Any:
        """The picture as a plotly figure."""
        return figure(self.scene())

    def svg(self) -> str:
        """The picture as SVG."""
        return svg(self.scene())


def bundle(scene: Scene) -> dict[str, Any]:
    """MIME type -> content of a picture, for JupyterLab and for everything else."""
    # Not `responsive`: JupyterLab's extension resizes by itself, and with it a change of theme folds the figure to nothing.
    content = json.loads(figure(scene).to_json())
    return {PLOTLY: {**content, "config": {"displaylogo": False}}, SVG: svg(scene), "text/plain": scene.words}


def weight(bundle: dict[str, Any]) -> int:
    """About how many bytes a bundle takes in a saved notebook."""
    return sum(len(json.dumps(content)) for content in bundle.values())


def print_text(text: str) -> None:
    """Print, also to a terminal that lacks some characters; a closed one is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        try:
            print(text)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding or "ascii"
            print(text.encode(encoding, "replace").decode(encoding))
