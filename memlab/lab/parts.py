"""Small pieces of the controls: rows that wrap in a narrow window, widgets that hear clicks while the kernel is busy."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from memlab.seams import let_clicks_through


def clickable(widget: Any) -> Any:
    """The widget, heard also while a cell runs, and as wide as its words."""
    let_clicks_through(widget)
    if hasattr(widget.style, "description_width"):
        widget.style.description_width = "initial"
    return widget


def flowing(*children: Any) -> Any:
    """Children in a row, which goes on below where the window is narrow."""
    return widgets.HBox(list(children), layout=widgets.Layout(flex_flow="row wrap", width="100%"))


def setting(name: str, value: Any) -> Any:
    """An entry for one setting of a workload; None for what has no entry."""
    layout = widgets.Layout(width="auto", max_width="210px")
    if isinstance(value, bool):
        return clickable(widgets.Checkbox(value=value, description=name, indent=False, layout=layout))
    if isinstance(value, int):
        return clickable(widgets.IntText(value=value, description=name, layout=layout))
    if isinstance(value, float):
        return clickable(widgets.FloatText(value=value, description=name, layout=layout))
    if isinstance(value, str):
        return clickable(widgets.Text(value=value, description=name, continuous_update=False, layout=layout))
    return None


def told(text: str, role: str = "status") -> str:
    """A line for an HTML widget, which a screen reader says when it changes."""
    return f"<div role='{role}'>{escape(text)}</div>" if text else ""


def failed(line: str, details: str) -> str:
    """What went wrong in one line, with details to open."""
    more = f"<details><summary>Details</summary><pre>{escape(details)}</pre></details>" if details else ""
    return f"<div role='alert' class='memlab-problem'><b>{escape(line)}</b>{more}</div>"


def close_all(widget: Any) -> None:
    """Close a widget with all that it holds: closing a box leaves its children, and each its layout and style."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    widget.close()
    for part in parts:
        if isinstance(part, widgets.Widget):
            part.close()
