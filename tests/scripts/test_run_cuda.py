"""`memlab run` with CUDA: the page after an out-of-memory error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memlab

pytestmark = pytest.mark.simulated
REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
import torch

model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
password = "planted-in-a-variable"
settings = {"planted-in-a-key": password, "token": os.environ.get("API_KEY")}
for step in range(1000):
    output = model(torch.randn(16 * 1024, 1024, device="cuda"))
    kept.append(output)
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("oom")
    (folder / "leaks.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "memlab", "run", "--out", "runs", "leaks.py", "--token", "s3cret"]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "API_KEY": "hidden-value"}
    return folder, subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)


def test_the_page_names_what_held_the_memory_and_the_line(failed):
    folder, done = failed
    assert done.returncode == 1
    page = (folder / "runs/leaks.html").read_text()
    for text in (page, done.stderr):
        assert "ran out of memory" in text
        assert "kept" in text
        assert "leaks.py:11" in text
        assert "steps before it rose by" in text  # the need of the whole step
        assert "What to do" in text
        assert "simulated GPU: bytes are real" in text
        assert "%mem" not in text  # there is no next cell
    kept = (folder / "runs/leaks.memlab").read_bytes()
    for secret in ("s3cret", "hidden-value", "planted-in-a", "API_KEY"):
        assert secret not in page
        assert secret.encode() not in kept
        assert secret not in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory.")


def test_what_a_functions_variables_held_is_named_though_the_error_ended_it(tmp_path):
    imports, body = SCRIPT.split("\n\n")
    (tmp_path / "leaks.py").write_text(f"{imports}\ndef main():\n{textwrap.indent(body, '    ')}\nmain()\n")
    words = [sys.executable, "-m", "memlab", "run", "--out", "runs", "leaks.py"]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)
    assert "OutOfMemoryError" in done.stderr
    assert "main() -> kept" in (tmp_path / "runs/leaks.html").read_text().replace("&gt;", ">")


def test_the_run_is_kept_and_shown(failed):
    folder, _ = failed
    run = memlab.load(folder / "runs/leaks.memlab")
    assert run.trace.made_by.devices[0].num_ooms == 1
    words = [sys.executable, "-m", "memlab", "show", "--json", "runs/leaks.memlab"]
    shown = subprocess.run(
        words, cwd=folder, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )
    facts = json.loads(shown.stdout)
    assert facts["provenance"] == "simulated"
    assert facts["devices"][0]["allocated"]["peak_low_bytes"] == run.peak_bytes


def test_without_a_folder_the_page_is_kept_where_the_script_was_started(tmp_path):
    (tmp_path / "leaks.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "memlab", "run", "leaks.py"]
    subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, timeout=600
    )
    assert [path.name.startswith("memlab-leaks-") for path in tmp_path.glob("*.html")] == [True]
    assert not list(tmp_path.glob("*.memlab*"))
