"""`memlab run` with CUDA: the page after an out-of-memory error."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from processes import memlab_ran

import memlab

pytestmark = pytest.mark.simulated
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
def failed(tmp_path_factory) -> tuple[Path, int, str]:
    """The folder of a script that ran out of memory, its exit status, and what it wrote to stderr."""
    folder = tmp_path_factory.mktemp("oom")
    (folder / "leaks.py").write_text(SCRIPT)
    words = ["run", "--out", "runs", "leaks.py", "--token", "s3cret"]
    status, _, err = memlab_ran(folder, *words, API_KEY="hidden-value")
    return folder, status, err


def test_the_page_names_what_held_the_memory_and_the_line(failed):
    folder, status, err = failed
    assert status == 1
    page = (folder / "runs/leaks.html").read_text()
    for text in (page, err):
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
        assert secret not in err
    assert err.rstrip().splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory.")


def test_what_a_functions_variables_held_is_named_though_the_error_ended_it(tmp_path):
    imports, body = SCRIPT.split("\n\n")
    (tmp_path / "leaks.py").write_text(f"{imports}\ndef main():\n{textwrap.indent(body, '    ')}\nmain()\n")
    assert "OutOfMemoryError" in memlab_ran(tmp_path, "run", "--out", "runs", "leaks.py")[2]
    assert "main() -> kept" in (tmp_path / "runs/leaks.html").read_text().replace("&gt;", ">")


def test_the_run_is_kept_and_shown(failed):
    folder, *_ = failed
    run = memlab.load(folder / "runs/leaks.memlab")
    assert run.trace.made_by.devices[0].num_ooms == 1
    facts = json.loads(memlab_ran(folder, "show", "--json", "runs/leaks.memlab")[1])
    assert facts["provenance"] == "simulated"
    assert facts["devices"][0]["allocated"]["peak_low_bytes"] == run.peak_bytes


def test_without_a_folder_the_page_is_kept_where_the_script_was_started(tmp_path):
    (tmp_path / "leaks.py").write_text(SCRIPT)
    memlab_ran(tmp_path, "run", "leaks.py")
    assert [path.name.startswith("memlab-leaks-") for path in tmp_path.glob("*.html")] == [True]
    assert not list(tmp_path.glob("*.memlab*"))
