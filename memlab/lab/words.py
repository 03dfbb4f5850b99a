"""What stands where the controls of a Lab were: in a saved notebook, on a page that knows no widgets, after closing."""

from __future__ import annotations

from typing import Any

USE = "Run this cell to use the Lab: its controls need a running kernel. The last result is below."
CLOSED = "This Lab is closed: run this cell to use it again."
CONTROLS = "memlab-lab"
"""The class of the controls."""
_CHILD = ".jp-OutputArea-child"
_LOST = "jupyter-widgets-disconnected"


def bundle(name: str) -> dict[str, Any]:
    """MIME type -> the words, with the style that hides an output before them which has lost its controls.

    JupyterLab's class names, seen in 4.2 to 4.6; elsewhere the words just stand below the controls.
    """
    lost = f"{_CHILD}:not(:has(.{CONTROLS})):has(+ {_CHILD} .{name})"
    style = f"<style>{lost} {{ display: none }}</style>"
    return {"text/plain": USE, "text/html": f"{style}<div class='{name}'><i>{USE}</i></div>"}


def hidden(name: str) -> str:
    """The style that hides the words while the controls live: it stands in the controls, and goes with them.

    Those of a kernel that was restarted are hidden instead: ipywidgets 8 marks what has lost its kernel.
    """
    live = f"body:has(.{name}-controls:not(.{_LOST}))"
    return (
        f"<style>{live} {_CHILD}:has(.{name}), {live} .{name}, .{name}-controls.{_LOST} "
        "{ display: none !important }</style>"
    )


def closed() -> dict[str, Any]:
    """MIME type -> what replaces controls that were closed."""
    return {"text/plain": CLOSED, "text/html": f"<div><i>{CLOSED}</i></div>"}
