"""Models of other libraries run unmodified in fake CUDA, and peak where they peak on the simulated GPU.

Needs the packages of the extra `third-party`; what is not installed is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from processes import python

import memlab
from memlab.allocator.rules import release
from memlab.units import GiB

PACKAGES = {"hugging_face": "transformers", "vision": "torchvision"}


def side(which: str, module: str, folder: Path, *names: str) -> dict[str, object]:
    if importlib.util.find_spec(PACKAGES[module]) is None:
        pytest.skip(f"needs {PACKAGES[module]}")
    output = folder / f"{which}.json"
    python("-m", "third_party.run_steps", which, module, output, *names)
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.release  # CI compares the same with the simulated GPU
@pytest.mark.parametrize(("module", "least"), [("hugging_face", 12), ("vision", 10)])
def test_models_train_in_fake_cuda(module, least, tmp_path):
    found = side("fake", module, tmp_path)
    assert not {name: what for name, what in found.items() if isinstance(what, str)}
    assert len(found) >= 2 * least


@pytest.mark.parametrize(("module", "names"), [("hugging_face", ("gpt2", "vit")), ("vision", ("resnet18",))])
def test_libraries_may_be_imported_within(module, names, tmp_path):
    found = side("inside", module, tmp_path, *names)
    assert found.keys() == set(names)
    assert all(peak > 0 and events > 100 for peak, events in found.values())


@pytest.mark.simulated
@pytest.mark.parametrize("module", PACKAGES)
def test_peaks_are_those_of_the_fake_device(module, tmp_path):
    there, here = side("native", module, tmp_path), side("fake", module, tmp_path)
    failed = {name: what for found in (there, here) for name, what in found.items() if isinstance(what, str)}
    assert not failed
    wrong = {name: (there[name][0], here[name][0]) for name in there if there[name][0] != here[name][0]}
    assert not wrong, f"peaks there and here: {wrong}"


OFFLOADED = {
    "cpu_offload": ("accelerate", 115_738_624), "model_cpu_offload": ("diffusers", 18_272_768),
    "sequential_cpu_offload": ("diffusers", 15_436_800),
}  # fmt: skip
"""With PyTorch 2.12.1. Before, cuBLASLt had a workspace of its own, and *allocated* is a range, as the driver's places matter."""


@pytest.mark.simulated
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_models_take_what_they_take_on_the_simulated_gpu(name):
    """A process for each: cuBLAS keeps its workspace."""
    package, peak = OFFLOADED[name]
    pytest.importorskip(package)
    measured, predicted = both_ways(name)
    assert predicted[0][0] <= measured[0] == predicted[2][0] <= predicted[0][1]
    assert release(torch.__version__) < (2, 12) or predicted[0] == [peak, peak]
    assert predicted[1][0] <= measured[1] <= predicted[1][1]


@pytest.mark.simulated
def test_a_cache_that_fills_what_is_free_lies_in_the_range():
    pytest.importorskip("transformers")
    measured, predicted = both_ways("paged_cache")
    for there, (low, high) in zip(measured, predicted[:2], strict=True):
        assert 4 * GiB < low <= there <= high < 1.2 * low


def both_ways(name):
    """What a program took, and the ranges of what it was predicted to take."""
    both = ("measured", "predicted")
    return [json.loads(python("-m", "offloaded_programs", how, name).splitlines()[-1])[name] for how in both]


def library(name):
    """A library of the extra, with torchvision loaded before it: both import that where it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        from third_party.vision import load

        load()
    return pytest.importorskip(name)


CARD = memlab.Card("a card", 8 * GiB, (8, 0), 0, 8 * GiB, 8 * GiB, 108)


def lightning_step(lightning, folder):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(512, 512)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 512)), batch_size=8)
    lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, precision="16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    ).fit(Module(), data)  # fmt: skip


def test_a_lightning_loop(tmp_path):
    step = functools.partial(lightning_step, library("lightning"), tmp_path)
    found = memlab.predict(step, CARD)
    held = (512 * 512 + 512) * 4
    assert found.fits == "yes"
    assert found.breakdown()["parameter"] == held
    assert found.breakdown()["optimizer"] >= 2 * held
    assert found.peak_allocated_bytes > 4 * held


def trainer_step(transformers, config, folder):
    data = [{"input_ids": (ids := torch.randint(0, 500, (16,))), "labels": ids} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", bf16=True,
        disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=data).train()


def test_a_trainer_loop(tmp_path):
    transformers = library("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=500, n_positions=16)
    held = 4 * sum(one.numel() for one in transformers.GPT2LMHeadModel(config).parameters())
    found = memlab.predict(functools.partial(trainer_step, transformers, config, tmp_path), CARD)
    assert found.fits == "yes"
    assert held <= found.breakdown()["parameter"] < 1.1 * held
    assert found.peak_allocated_bytes > 4 * held


def test_a_model_of_torchvision():
    models = library("torchvision.models")

    def step():
        model = models.resnet18(num_classes=10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            images = torch.randn(8, 3, 64, 64, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), torch.zeros(8, dtype=torch.long, device="cuda"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    found = memlab.predict(step, CARD)
    held = 4 * sum(one.numel() for one in models.resnet18(num_classes=10).parameters())
    assert found.fits == "yes"
    assert held <= found.breakdown()["parameter"] < 1.1 * held
    assert found.peak_allocated_bytes > 3 * held


def generating(transformers, config, **options):
    model = transformers.GPT2LMHeadModel(config).cuda().eval()
    ids = torch.ones(2, 8, dtype=torch.long, device="cuda")
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, pad_token_id=0, **options)
    if options["num_beams"] == 1 and made.shape != (2, 28):
        raise ValueError(f"made {tuple(made.shape)}")


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_goes_to_its_length(beams):
    transformers = library("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500, n_positions=64, eos_token_id=9)
    step = functools.partial(generating, transformers, config, do_sample=False, num_beams=beams)
    found = memlab.predict(step, CARD)
    assert found.fits == "yes"
    assert "if it runs as long as was assumed (test_third_party.py:" in found.verdict
    line = f"test_third_party.py:{generating.__code__.co_firstlineno + 3} utils.py:"
    read = [text for text in found.assumptions if text.startswith(line) and text.endswith(" times)")]
    times = [int(text.rpartition("(")[2].removesuffix(" times)")) for text in read]
    assert 19 <= max(times) <= 21, "it asks once per token whether all sequences have ended"
