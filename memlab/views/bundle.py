"""One run as what a notebook keeps: a figure for JupyterLab, an SVG for everything else, and its words."""

from __future__ import annotations

import json
from typing import Any

from memlab.analysis.curves import Curves
from memlab.views.figure import timeline_figure
from memlab.views.svg import described, timeline_svg

PLOTLY = "application/vnd.plotly.v1+json"
SVG = "image/svg+xml"


def figure_bundle(curves: Curves, title: str) -> dict[str, Any]:
    """MIME type -> content of the picture. Plotly's own JSON is drawn by the extension that plotly installs."""
    # Not `responsive`: JupyterLab's extension resizes by itself, and with it a change of theme folds the figure to nothing.
    figure = json.loads(timeline_figure(curves, title).to_json())
    return {
        PLOTLY: {**figure, "config": {"displaylogo": False}},
        SVG: timeline_svg(curves, title),
        "text/plain": described(curves),
    }


def weight(bundle: dict[str, Any]) -> int:
    """About how many bytes a bundle takes in a saved notebook."""
    return sum(len(json.dumps(content)) for content in bundle.values())
