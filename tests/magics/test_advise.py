"""The report of a cell points to `memlab.advise`, and the cell is run again from its text, in a real kernel."""

from __future__ import annotations

import re
import sys

import pytest
from kernel import Kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child is forked on Linux alone")

SETUP = (
    """%load_ext memlab
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.ReLU()) for _ in range(8)])
""",
)
CELL = """%%memtrack --name mine
x = torch.randn(4096, 128)
print("seen once")
loss = model(x).square().mean()
loss.backward()
loss.item()
"""
HINT = "%memadvise mine"
ADVISE = "import memlab; advice = memlab.advise(memlab.runs['mine'], techniques=['checkpoint', 'in_place']); advice"
STATE = "(model[0][3].inplace, len(memlab.runs), memlab.last_run().name, torch.get_rng_state().sum().item(), x.sum().item())"


def test_the_report_points_and_the_cell_runs_again_in_a_child(notebook: Kernel):
    reply = notebook.ok(CELL)
    assert reply.report.splitlines()[-1].startswith("Activations hold ")
    assert f"{HINT} finds out which of" in reply.report.splitlines()[-1]
    assert notebook.run("memlab.runs").error == "NameError"  # %load_ext binds no name: the hint has to bring its own
    before = notebook.value(STATE.replace("memlab.", "__import__('memlab')."))
    reply = notebook.ok(ADVISE)
    assert "checkpoint" in str(reply.out)
    assert "seen once" not in reply.stdout
    saves = "min(advice.saved_bytes) > 0.3 * advice.findings.before_bytes[0]"
    assert notebook.value(f"(advice.recommended[0], {saves})") == ("checkpoint", True)
    assert notebook.value(STATE) == before
    shown = notebook.run("from IPython.display import display; display(advice)").shown
    assert {"text/html", "text/plain"} == set(shown[0])


def test_a_prediction_of_a_cell_is_predicted_again(notebook: Kernel):
    cell = CELL.replace("x = ", 'torch.set_default_device("cuda"); model.cuda(); x = ')
    notebook.ok(cell.replace("mine", "predicted --predict T4"))
    notebook.ok("import memlab; advice = memlab.advise(memlab.runs['predicted'], techniques=['checkpoint'])")
    found = notebook.value("(advice.findings.on, advice.recommended, advice.findings.is_predicted)")
    assert found == ("T4", ("checkpoint",), True)


def test_a_small_cell_points_nowhere(notebook: Kernel):
    assert "%memadvise" not in notebook.run("%%memtrack\ny = torch.randn(100)\n").report


def test_a_cell_that_cannot_run_twice_says_why(notebook: Kernel):
    notebook.run("z = torch.ones(1 << 20)")
    assert notebook.run("%%memtrack --name once\nw = z * 2\ndel z\n").status == "ok"
    reply = notebook.run("import memlab; memlab.advise(memlab.runs['once'])")
    assert reply.error == "MemlabError"
    assert "the cell failed when it was run again: NameError" in reply.traceback


def test_a_statement_and_a_loaded_run(notebook: Kernel):
    notebook.ok(CELL)
    notebook.ok("%memtrack --name line model(x).sum().backward()")
    reply = notebook.ok("import memlab; advice = memlab.advise(memlab.runs['line'], techniques=['checkpoint'])")
    reply = notebook.run("memlab.runs['mine'].save('mine.memlab'); memlab.advise(memlab.load('mine.memlab'))")
    assert "cannot be run again" in reply.traceback


def test_an_interrupt_keeps_what_was_tried(notebook: Kernel):
    notebook.ok(CELL)
    notebook.run("import time\ndef slow():\n    model(x).sum().backward()\n    time.sleep(0.2)\n")
    notebook.run(
        "import os, signal\nfrom memlab.api.advise import search\nreal, calls = search.agreement, []\n"
        "def agreement(*args):\n    calls.append(1)\n    os.kill(os.getpid(), signal.SIGINT) if len(calls) == 2 else None\n"
        "    return real(*args)\nsearch.agreement = agreement"
    )
    try:
        reply = notebook.run(
            "import memlab; advice = memlab.advise(slow, techniques=['checkpoint', 'in_place', 'retain_graph'])"
        )
        assert reply.status == "ok", reply.traceback
        assert notebook.value("(len(advice.tried), advice.recommended)") == (1, ("checkpoint",))
        assert "it was interrupted after 1 of 2" in notebook.run("print(advice)").stdout
    finally:
        notebook.run("search.agreement = real")


def test_what_an_advice_says_to_do_next_is_done(notebook: Kernel):
    notebook.ok("import importlib\nof = importlib.import_module('memlab.api.advise')\nreal = of.candidates")
    notebook.ok("of.candidates = lambda *args: (real(*args)[0][:1], real(*args)[1])")  # one is enough here
    (hint,) = re.findall("To try more: `(.*)`", str(notebook.ok("%memadvise mlp").out))
    assert "changes training" not in str(notebook.ok(hint).out)
    notebook.ok("of.candidates = real")
    shown = str(notebook.ok("memlab.advise('mlp', card='T4', size='tiny', techniques=['momentum'])").out)
    (hint,) = re.findall("`(.*)` in the next cell runs it here", shown)
    assert "measured" in str(notebook.ok(hint).out)


LANGUAGE = """
import torch
from torch import nn
import torch.nn.functional as F
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8000, 64), nn.Linear(64, 8000)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
TRAINS = """%%memtrack --name words --predict "RTX 4060"
model = Language().cuda()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.randint(8000, (8, 512), device="cuda")
for step in range(2):
    logits = model(ids)
    loss = F.cross_entropy(logits.view(-1, 8000), ids.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_magic_ends_with_the_cell_as_it_was_run(notebook: Kernel):
    notebook.ok(LANGUAGE)
    notebook.ok(TRAINS)
    reply = notebook.ok("%memadvise words --target 500MiB")
    shown = str(reply.out)
    assert "The target of 500.0 MiB is reached" in shown
    assert "-    loss = F.cross_entropy(logits.view(-1, 8000), ids.view(-1))" in shown
    assert "+    loss = chunked_cross_entropy(logits, ids.view(-1), model.head)" in shown
    assert "there is no BatchNorm" in shown
    notebook.ok("advice = _")
    tried = notebook.value("[one.names for one in advice.tried]")
    assert set(map(tuple, tried)) <= {("chunked_loss",), ("checkpoint",), ("chunked_loss", "checkpoint")}
    # The cell that is printed is the one that was predicted: predicted again it has the same peak.
    line = '--name again --predict "RTX 4060" --quiet'
    notebook.ok(f"get_ipython().run_cell_magic('memtrack', {line!r}, advice.cell)")
    same = "tuple(memlab.runs['again'].peak_device_bytes) == tuple(advice.findings.recommended.peak_bytes)"
    notebook.ok("import memlab")
    assert notebook.value(same) is True


def test_the_changed_cell_computes_the_same_loss_and_gradients(notebook: Kernel):
    """On the CPU, where values are real."""
    notebook.ok(LANGUAGE)
    cell = (
        TRAINS.split("\n", 1)[1].replace(".cuda()", "").replace(', device="cuda"', "").replace("range(2)", "range(1)")
    )
    cell = cell.replace(
        "    optimizer.zero_grad()\n", "    total = loss.item(), model.head.weight.grad.norm().item()\n"
    )
    found = notebook.value(
        "(lambda text, facts: __import__('memlab.api.advise.edits', fromlist=['x']).edited(text, facts, "
        f"['chunked_loss', 'checkpoint']))({cell!r}, {FACTS!r})"
    )
    assert list(found[1]) == ["chunked_loss", "checkpoint"]
    notebook.ok("torch.manual_seed(1)\n" + cell)
    before = notebook.value("total")
    notebook.ok("torch.manual_seed(1)\n" + found[0])
    assert notebook.value("total") == pytest.approx(before, rel=1e-4)


FACTS = {
    "models": {
        "model": {
            "blocks": [f"blocks.{index}" for index in range(8)],
            "has_statistics": False,
            "head": "head",
            "is_transformers": False,
        }
    }
}


def test_a_wrong_line_is_refused_in_one_line(notebook: Kernel):
    assert "%memadvise [RUN] [--target 8GiB]" in notebook.run("%memadvise mine --card T4").said
    assert "nosuch" in notebook.run("%memadvise nosuch").said
