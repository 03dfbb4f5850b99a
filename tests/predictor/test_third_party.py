"""Models of other libraries run unmodified in pretend CUDA, and peak where they peak on the pretend device.

Needs the packages of the extra `third-party`; what is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
PACKAGES = {"hugging_face": "transformers", "vision": "torchvision"}


def side(which: str, module: str, folder: Path, *names: str) -> dict[str, object]:
    if importlib.util.find_spec(PACKAGES[module]) is None:
        pytest.skip(f"needs {PACKAGES[module]}")
    output = folder / f"{which}.json"
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if which == "native":
        env |= {"FAKEGPU_SHM": str(folder / "gpu")}
    command = [sys.executable, "-m", "third_party.sides", which, module, str(output), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(("module", "least"), [("hugging_face", 12), ("vision", 10)])
def test_models_train_in_pretend_cuda(module, least, tmp_path):
    found = side("pretend", module, tmp_path)
    assert not {name: what for name, what in found.items() if isinstance(what, str)}
    assert len(found) >= 2 * least


@pytest.mark.fakegpu
@pytest.mark.parametrize("module", PACKAGES)
def test_peaks_are_those_of_the_pretend_device(module, tmp_path):
    there, here = side("native", module, tmp_path), side("pretend", module, tmp_path)
    failed = {name: what for found in (there, here) for name, what in found.items() if isinstance(what, str)}
    assert not failed
    wrong = {name: (there[name][0], here[name][0]) for name in there if there[name][0] != here[name][0]}
    assert not wrong, f"peaks there and here: {wrong}"


def test_a_lightning_loop(tmp_path):
    lightning = pytest.importorskip("lightning")
    from memlab.predictor.pretend import PretendCuda

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 16)), batch_size=8)
    with PretendCuda(card()) as pretend:
        trainer = lightning.Trainer(
            accelerator="gpu", devices=1, max_epochs=1, precision="16-mixed", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, data)
        assert pretend.log.allocator.peak_allocated_bytes >= 16 * 4 * 4 * 3


def test_a_trainer_loop(tmp_path):
    transformers = pytest.importorskip("transformers")
    try:
        trainer_class, arguments = transformers.Trainer, transformers.TrainingArguments
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"transformers has no Trainer here: {error}")
    from memlab.predictor.pretend import PretendCuda

    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16)
    data = [{"input_ids": (ids := torch.randint(0, 50, (16,))), "labels": ids} for _ in range(8)]
    with PretendCuda(card()) as pretend:
        model = transformers.GPT2LMHeadModel(config)
        trainer_class(
            model,
            arguments(
                output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", bf16=True,
                disable_tqdm=True,
            ),
            train_dataset=data,
        ).train()  # fmt: skip
        assert next(model.parameters()).is_cuda
        assert pretend.log.allocator.peak_allocated_bytes > 3 * sum(one.numel() * 4 for one in model.parameters())


def card():
    import types

    return types.SimpleNamespace(
        name="card",
        total_bytes=8 << 30,
        usable_bytes=8 << 30,
        compute_capability=(8, 0),
        context_bytes=(0, 0),
        multiprocessors=108,
    )
