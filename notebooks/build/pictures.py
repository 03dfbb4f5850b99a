"""Outputs that are kept: figures as PNG on a transparent ground, widgets as their text, nothing that runs.

The PNG is our own SVG twin of a figure, drawn by a Chromium without a network. Only maintainers need one.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nbformat import NotebookNode

from notebooks.build.execute import outputs

MAX_BYTES = 500_000
WIDGET = "application/vnd.jupyter.widget-view+json"
RUNS = (WIDGET, "application/vnd.plotly.v1+json", "application/javascript", "image/svg+xml")
Draw = Callable[[str], bytes]


def keep_static(notebook: NotebookNode, draw: Draw) -> None:
    """Replace what needs a kernel or a script by what a page on the web shows."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _merged([output for output in cell.outputs if not _is_progress(output)])
            cell.metadata.pop("execution", None)
    for output in outputs(notebook):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            data["image/png"] = base64.b64encode(draw(data["image/svg+xml"])).decode()
        for kind in RUNS:
            data.pop(kind, None)
        output.get("metadata", {}).clear()
    notebook.metadata.pop("widgets", None)


def _merged(printed: list[NotebookNode]) -> list[NotebookNode]:
    """Consecutive prints as one, as front ends show them: the kernel sends them in pieces of any size."""
    merged: list[NotebookNode] = []
    for output in printed:
        last = merged[-1] if merged else {}
        if output.output_type == last.get("output_type") == "stream" and output.name == last["name"]:
            last["text"] += output.text
        else:
            merged.append(output)
    return merged


def _is_progress(output: NotebookNode) -> bool:
    """Whether there is nothing to read in it."""
    data = output.get("data")
    return data is not None and set(data) <= {"text/plain"} and not data.get("text/plain", "").strip()


@contextmanager
def chromium(scale: float = 1.5) -> Iterator[Draw]:
    """A function that draws SVG as PNG, at so many times its size, on nothing."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("MEMLAB_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(device_scale_factor=scale, offline=True).new_page()

        def draw(svg: str) -> bytes:
            page.set_content(f"<body style='margin:0;background:transparent'>{svg}</body>")
            return page.locator("svg").first.screenshot(omit_background=True)

        yield draw
        browser.close()
