"""A notebook that is executed as a whole: Run All stops at the error, and the file shows the reports without a kernel."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as tree
from pathlib import Path

import nbformat
import pytest
from kernel import ROOT
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

BUSY = """%%memtrack --name "<script>alert(1)</script>"
import torch
net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
optimizer = torch.optim.Adam(net.parameters(), foreach=False)
for _ in range(60):
    net(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CELLS = ("%load_ext memlab", BUSY, "%%memtrack --name failing\nx = torch.ones(1000)\n1 / 0", "never = 'ran'\nnever")
OURS_PER_CELL = 35_000


def written(*cells: str) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_code_cell(cell) for cell in cells])


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    return {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder)}


@pytest.fixture(scope="module")
def book(environment) -> nbformat.NotebookNode:
    """The notebook after nbclient stopped at the failing cell."""
    ran = written(*CELLS)
    client = NotebookClient(ran, timeout=600)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        client.execute(env=environment)
    return ran


def displays(book: nbformat.NotebookNode, cell: int) -> list[dict]:
    return [output["data"] for output in book.cells[cell].outputs if output.output_type == "display_data"]


def test_promise_3_run_all_stops_at_the_error_below_which_stands_the_report(book):
    kinds = [output.output_type for output in book.cells[2].outputs]
    assert kinds == ["display_data", "display_data", "error"]
    assert "The cell raised ZeroDivisionError: division by zero." in displays(book, 2)[1]["text/plain"]
    assert book.cells[3].outputs == []


@pytest.mark.parametrize("cell", [1, 2])
def test_promise_7_the_saved_cell_holds_figure_svg_and_text_and_no_widget(book, cell):
    figure, table = displays(book, cell)
    assert set(figure) == {"application/vnd.plotly.v1+json", "image/svg+xml", "text/plain"}
    assert set(table) == {"text/html", "text/plain"}
    tree.fromstring(figure["image/svg+xml"])
    assert "exact" in table["text/plain"]


def test_a_busy_cell_leaves_little_in_the_file(book):
    for cell in (1, 2):
        assert len(json.dumps(book.cells[cell].outputs)) <= OURS_PER_CELL
    # nbclient keeps the state of every widget there ever was; the code of the live view must not be in it.
    assert len(json.dumps(book.metadata.get("widgets", {}))) < 2 * 3000


def test_a_name_stays_text_in_the_file_and_who_held_the_peak_is_told(book):
    for data in displays(book, 1):
        for kind, content in data.items():
            if kind != "text/plain":
                assert "<script>" not in json.dumps(content)
    text = displays(book, 1)[1]["text/plain"]
    for word in ("<script>alert(1)</script>", "peak by module", "parameter", "gradient", "optimizer"):
        assert word in text


def test_nbconvert_fails_where_the_cell_fails_and_shows_the_reports_as_html(tmp_path, environment):
    (tmp_path / "book.ipynb").write_text(nbformat.writes(written(*CELLS)))
    convert = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", "book.ipynb"]
    failed = subprocess.run(convert, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "ZeroDivisionError" in failed.stderr
    assert not (tmp_path / "book.html").exists()
    passed = subprocess.run(
        [*convert, "--allow-errors"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert passed.returncode == 0, passed.stderr
    page = (tmp_path / "book.html").read_text()
    pictures = [
        base64.b64decode(found).decode() for found in re.findall(r'<img[^>]*"data:image/svg\+xml;base64,([^"]*)"', page)
    ]
    assert sum("allocated began at" in picture for picture in pictures) == 2
    assert "memlab · failing" in page
    assert "<script>alert(1)" not in page
    assert {path.name for path in Path(tmp_path).iterdir()} == {"book.ipynb", "book.html"}


def test_a_budget_stops_run_all(environment):
    book = written("%load_ext memlab", "%%memtrack --budget 1KiB\nimport torch\ntorch.ones(9999).sum()", "1")
    with pytest.raises(CellExecutionError, match=r"above its budget of 1\.00 KiB"):
        NotebookClient(book, timeout=600).execute(env=environment)
    assert book.cells[2].outputs == []
