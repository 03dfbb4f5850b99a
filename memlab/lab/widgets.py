"""Parts of the controls, and the placeholder shown without a kernel.

Controls are widgets, which a saved notebook or a page without a kernel lacks: JupyterLab then shows an error text
instead. So there is a second output, the placeholder, and styles choose between them: one in the controls hides the
placeholder, one in the placeholder hides the output that has lost its controls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets

from memlab.torch_internals import let_clicks_through
from memlab.views.table import safe

USE = "Run this cell to use the Lab: its controls need a running kernel. The last result is below."
CLOSED = "This Lab is closed: run this cell to use it again."
CONTROLS = "memlab-lab"
"""The class of the controls."""
_CHILD = ".jp-OutputArea-child"
_LOST = "jupyter-widgets-disconnected"
prose = functools.partial(safe, limit=2000)
"""Text as HTML, with `code` in backticks as code."""


def placeholder(name: str) -> dict[str, Any]:
    """MIME type -> the placeholder, which hides an output before it that has lost its controls.

    JupyterLab's class names, seen in 4.2 to 4.6; elsewhere the placeholder is shown below the controls.
    """
    lost = f"{_CHILD}:not(:has(.{CONTROLS})):has(+ {_CHILD} .{name})"
    style = f"<style>{lost} {{ display: none }}</style>"
    return {"text/plain": USE, "text/html": f"{style}<div class='{name}'><i>{USE}</i></div>"}


def hiding_style(name: str) -> str:
    """The style inside the controls that hides the placeholder, and the verdict that they show, while they are alive.

    Controls of a restarted kernel are hidden instead: ipywidgets 8 marks widgets that have lost their kernel.
    """
    live = f"body:has(.{name}-controls:not(.{_LOST}))"
    hidden = f"{live} {_CHILD}:has(.{name}), {live} .{name}, {live} .{name}-said, .{name}-controls.{_LOST}"
    return f"<style>{hidden} {{ display: none !important }}</style>"


def clickable(widget: Any, width: str = "auto") -> Any:
    """The widget, receiving events also while a cell runs, and as wide as its label."""
    let_clicks_through(widget)
    widget.layout.width, widget.layout.max_width = width, "100%"
    if hasattr(widget.style, "description_width"):
        widget.style.description_width = "initial"
    return widget


def button(text: str, pressed: Callable[..., None], tooltip: str) -> Any:
    """A button, also usable while a cell runs."""
    widget = clickable(ipywidgets.Button(description=text, tooltip=tooltip))
    widget.on_click(pressed)
    return widget


def flowing(*children: Any) -> Any:
    """Children in a row that wraps in a narrow window."""
    return ipywidgets.HBox(list(children), layout=ipywidgets.Layout(flex_flow="row wrap", width="100%"))


def setting_entry(name: str, value: Any) -> Any:
    """An input for one setting of a workload; None if its type has none."""
    if isinstance(value, bool):
        entry = ipywidgets.Checkbox(value=value, description=name, indent=False)
    elif isinstance(value, int):
        entry = ipywidgets.IntText(value=value, description=name)
    elif isinstance(value, float):
        entry = ipywidgets.FloatText(value=value, description=name)
    elif isinstance(value, str):
        entry = ipywidgets.Text(value=value, description=name, continuous_update=False)
    else:
        return None
    clickable(entry).layout.max_width = "210px"
    return entry


def set_options(widget: Any, options: list[Any], value: Any) -> None:
    """Set the options and the value; nothing is sent if they have not changed."""
    if list(widget.options) != list(options):
        widget.options = options
    widget.value = value


def line(text: str, role: str = "status") -> str:
    """A line for an HTML widget, which a screen reader reads when it changes."""
    return f"<div role='{role}'>{prose(text)}</div>" if text else ""


def problem(text: str, details: str) -> str:
    """What went wrong in one line, with details to open."""
    more = f"<details><summary>Details</summary><pre>{escape(details)}</pre></details>" if details else ""
    return f"<div role='alert' class='memlab-problem'><b>{prose(text)}</b>{more}</div>" if text else ""


def close_all(widget: Any) -> None:
    """Close a widget with its children, and the layout and style of each."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    widget.close()
    for part in parts:
        if isinstance(part, ipywidgets.Widget):
            part.close()
