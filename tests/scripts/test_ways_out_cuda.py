"""What the page of a script says to do after an out-of-memory error works when it is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import memlab_ran, ran
from simulated_machines import machine_at

pytestmark = pytest.mark.simulated


def run(folder: Path, total_mb: int, code: str, **variables: str) -> tuple[int, str]:
    """Exit status and report of a script on a GPU of its own."""
    (folder / "train.py").write_text(code)
    machine = machine_at(folder / f"gpu{total_mb}", total_mb=total_mb, context_mb=150)
    status, _, err = memlab_ran(folder, "run", "train.py", **machine, **variables)
    return status, err


@dataclass(frozen=True)
class Case:
    """A script that fails on a GPU of `total_mb`, the advice it gets, and what of its text changes if that is followed."""

    total_mb: int
    code: str
    advice: str
    instead: tuple[str, str]


EVALUATION = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
outputs = []
for step in range(30):
    output = model(torch.randn(8 * 1024, 1024, device="cuda"))
    outputs.append(output)
"""
STEPS = """
import torch
def main():
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(60):
        loss = model(torch.randn(8 * 1024, 1024, device="cuda")).mean()
        loss.backward(retain_graph=True)
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
main()
"""
CASES = {
    "graphs in a list": Case(
        2000, EVALUATION, "of earlier steps, most of it autograd graphs: store `.detach()`",
        ("append(output)", "append(output.detach())"),
    ),
    "graphs in a list of a function": Case(
        1200, STEPS, "of main() keeps", ("append(loss)", "append(loss.item())")
    ),
    "no gradients": Case(
        1000, EVALUATION.replace("outputs.append(output)", "").replace("8 * 1024, 1024", "24 * 1024, 1024"),
        "`with torch.inference_mode():`", ("for step", "mode = torch.inference_mode()\nmode.__enter__()\nfor step"),
    ),
    "results in a list": Case(
        1200, EVALUATION.replace("append(output)", "append(output.detach())"), "keep them on the CPU (`.cpu()`)",
        ("output.detach()", "output.detach().cpu()"),
    ),
    "the graph of the step before": Case(
        700, EVALUATION.replace("outputs.append(output)", "pass"), "`del output` before the next step", ("pass", "del output"),
    ),
    "half the batch": Case(
        1000, STEPS.replace("retain_graph=True", "").replace("append(loss)", "append(0)").replace("8 *", "40 *"),
        "half the batch: ", ("40 * 1024", "20 * 1024"),
    ),
    "gradients in a forward": Case(
        1450, """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)])
    def forward(self, x):
        y = self.layers(x)
        with torch.no_grad():
            mask = torch.ones(64 * 2**20, device="cuda") * 2
        return y * mask[0]
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(64, 4096, device="cuda")).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""", "`optimizer.zero_grad()` before the forward", ("    loss = model", "    optimizer.zero_grad()\n    loss = model"),
    ),
    "temporaries of the optimizer": Case(
        1550, """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(5)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""", "`fused=True` in the optimizer", ("parameters())\nfor", "parameters(), fused=True)\nfor"),
    ),
    "objects that refer to each other": Case(
        1000, """
import gc, torch
class Box: pass
gc.disable()
for step in range(30):
    box = Box()
    box.content, box.itself = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda"), box
""", "`gc.collect()`: no name", ("    box = ", "    gc.collect()\n    box = "),
    ),
    "the limit of the process": Case(
        1000, """
import torch
torch.cuda.set_per_process_memory_fraction(0.25)
kept = [torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
""", "`torch.cuda.set_per_process_memory_fraction(1.0)`", ("fraction(0.25)", "fraction(1.0)"),
    ),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_what_is_advised_avoids_the_error(tmp_path, name):
    case = CASES[name]
    status, report = run(tmp_path, case.total_mb, case.code)
    assert status == 1 and "ran out of memory" in report
    assert case.advice in report, report
    assert case.code.count(case.instead[0]) == 1
    status, report = run(tmp_path, case.total_mb, case.code.replace(*case.instead))
    assert status == 0, report


def test_what_the_step_that_failed_needs_is_not_to_be_deleted(tmp_path):
    code = CASES["half the batch"].code.replace('torch.randn(40 * 1024, 1024, device="cuda")', "x")
    _, report = run(
        tmp_path,
        1000,
        code.replace("        loss =", '        x = torch.randn(40 * 1024, 1024, device="cuda")\n        loss ='),
    )
    assert "ran out of memory" in report
    assert "`del " not in report
    assert "__main__" not in report and "a value in use" not in report  # no path leads through memlab's own functions


def test_the_command_that_is_named_counts_the_whole_step(tmp_path):
    case = CASES["half the batch"]
    _, report = run(tmp_path, case.total_mb, case.code)
    (command,) = re.findall(r"`(memlab predict --card \S+ SCRIPT) ARGS`", report)
    machine = machine_at(tmp_path / "predicting", total_mb=case.total_mb)
    status, out, _ = ran(tmp_path, "-m", *command.replace("SCRIPT", "train.py").split(), **machine)
    assert (status, "does not fit" in out) == (1, True)


FRAGMENTED = """
import torch
first = [torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(40)]
del first
kept = [torch.empty(16 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(40)]
large = torch.empty(800 * 2**20, dtype=torch.uint8, device="cuda")
"""
PIECES = """
import torch
blocks = [torch.empty(9 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(180)]
kept = blocks[::2]
del blocks
large = torch.empty(500 * 2**20, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.parametrize(("code", "helps"), [(FRAGMENTED, True), (PIECES, False)])
def test_expandable_segments_are_advised_where_they_would_have_helped(tmp_path, code, helps):
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    status, report = run(tmp_path, 2048, code)
    assert status == 1 and "but fragmented" in report
    (advice,) = [line for line in report.splitlines() if f"restart with `{setting}`" in line] or [""]
    assert ("[enough for this request]" in advice) is helps
    assert bool(advice) is helps
    status, _ = run(tmp_path, 2048, code, **dict([setting.split("=")]))
    assert (status == 0) is helps
