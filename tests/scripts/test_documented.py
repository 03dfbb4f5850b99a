"""The commands of README and docs, run one after another as they stand there, on a script that they fit."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, memlab_ran, ran

ARGUMENTS = """
import argparse, os, torch
from torch import distributed, nn
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--config")
options = parser.parse_args()
"""
TRAINING = """
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10)).to(device)
if "RANK" in os.environ:
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5 * options.epochs):
    nn.functional.cross_entropy(model(torch.randn(options.batch, 256, device=device)),
                                torch.randint(10, (options.batch,), device=device)).backward()
    optimizer.step()
    optimizer.zero_grad()
if "RANK" in os.environ:
    distributed.destroy_process_group()
"""
USED = """
import memlab, torch
from torch import nn

class Work:
    def __init__(self, batch=8):
        self.x = torch.randn(batch, 256, device="cuda")
        self.model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 10)).cuda()
    def __call__(self):
        self.model(self.x).sum().backward()

def step():
    Work()()

make = make_step = Work
"""


def commands(page: str) -> list[list[str]]:
    """The words of each command of a page; what follows two spaces is a remark."""
    found = re.findall(r"^    ((?:memlab|torchrun) .*)$", (REPOSITORY / page).read_text("utf-8"), re.MULTILINE)
    said = [re.split(r"\s{2,}", line)[0] for line in found]
    return [[word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)] for line in said]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(ARGUMENTS + TRAINING)
    (tmp_path / "tools").mkdir()
    shutil.copy(tmp_path / "train.py", tmp_path / "tools")
    (tmp_path / "small.yaml").touch()
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["README.md", "docs/scripts.md", "docs/ranks.md"])
def test_documented_commands_do_what_they_say(folder, page):
    done = set()
    for words in commands(page):
        if words[1] == "simulate":  # tests/simulated_gpu has it
            continue
        if (folder / "runs").exists():
            for name in ("before", "after", "main"):
                if (folder / "runs/train.memlab").exists():
                    shutil.copy(folder / "runs/train.memlab", folder / f"{name}.memlab")
            shutil.copytree(folder / "runs", folder / "main_runs", dirs_exist_ok=True)
        if words[0] == "memlab":
            status, out, err = memlab_ran(folder, *words[1:])
        else:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where memlab is
            status, out, err = ran(folder, "-m", "torch.distributed.run", *words[1:], PATH=path)
        done.add(words[1])
        if words[:2] == ["memlab", "fit"]:  # the run is one of the CPU, which fits no GPU
            assert (status, err.count("\n")) == (2, 1), out + err
        else:
            assert status == 0, f"{' '.join(words)}: {out}{err}"
        assert "Traceback" not in out + err
    assert {"run", "predict"} <= done
    if page == "docs/ranks.md":
        blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
        used = [block for block in blocks if "memlab.ranks(" in block or "memlab.predict(" in block]
        assert len(used) == 2
        (folder / "used.py").write_text(USED + "".join(used))
        status, out, err = ran(folder, "used.py")
        assert status == 0, out + err
