"""The batch that is offered after an out-of-memory error, followed, with a trainer and a model that are not ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel import kernel
from simulated_machines import machine_at

pytestmark = pytest.mark.simulated
pytest.importorskip("transformers")

START = """
import torch, memlab
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
%load_ext memlab
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        tokens = torch.randint(0, 50257, (512,))
        return {"input_ids": tokens, "labels": tokens}
"""
CELL = """
model = GPT2LMHeadModel(GPT2Config(n_layer=4))
arguments = TrainingArguments("out", per_device_train_batch_size=16, max_steps=2, report_to=[], save_strategy="no",
                              disable_tqdm=True)
Trainer(model, arguments, train_dataset=Data()).train()
"""


def test_the_batch_of_a_trainer_fits_and_a_larger_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(*machine_at(tmp_path / "gpu", 4096, "8.6").popitem())
    with kernel(tmp_path, START) as notebook:
        assert notebook.run(f"%%memtrack --no-live --quiet\n{CELL}").error == "OutOfMemoryError"
        ways = notebook.value("[(way.kind, (way.change, way.cell)) for way in memlab.explain_oom().ways.ways]")
        change, cell = dict(ways)["batch"]
        size = int(change.split("=")[1].split("`")[0])
        assert change.startswith(f"`per_device_train_batch_size={size}`") and f"; {size + 1} " in change, change
        for count, status in ((size, "ok"), (size + 1 if change.endswith("does not fit") else 2 * size, "error")):
            notebook.ok("%memoom release")
            reply = notebook.run(cell.replace(f"_size={size},", f"_size={count},"))
            assert (reply.status, reply.error) == (status, "OutOfMemoryError" if status == "error" else ""), reply.said
