"""The callbacks of trainers, with the real Trainers and tiny models. Needs the extra `third-party`; each script is a process."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memlab
from third_party import vision

REPOSITORY = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("torchvision") is not None:  # trainers import it, also one that was built for another torch
    vision.load()

TRAINERS = ("transformers", "lightning")


def ran(folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"} | environment
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=variables, capture_output=True, text=True, timeout=600
    )


def script(trainer: str) -> Path:
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"needs {trainer}")
    return REPOSITORY / "tests" / "third_party" / f"train_{trainer}.py"


@pytest.mark.sample(3)
@pytest.mark.simulated
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    "culprit, how", [("kept", "callback"), ("widen", "callback"), ("kept", "run"), ("widen", "run"), ("kept", "both")]
)
def test_the_page_after_out_of_memory_names_the_culprit(trainer, culprit, how, tmp_path):
    held = {"kept": "kept_", "widen": ".widen"}[culprit]
    path, words = script(trainer), (["-m", "memlab", "run", "--out", "out"] if how != "callback" else [])
    done = ran(tmp_path, *words, path, "out", culprit, *(["plain"] if how == "run" else []))
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory.")
    name = "train" if how == "callback" else f"train_{trainer}"
    assert [one.name for one in (tmp_path / "out").glob("*.html")] >= [f"{name}.html"]
    page = (tmp_path / "out" / f"{name}.html").read_text()
    for text in (page, done.stderr):
        assert "ran out of memory" in text
        assert held in text
        assert f"train_{trainer}.py" in text
        assert "%mem" not in text
        assert "_interrupt` keeps" not in text
    run = memlab.load(tmp_path / "out" / f"{name}.memlab")
    assert run.trace.made_by.devices[0].num_ooms == 1
    if culprit == "widen":
        modules = [
            name for name in run.breakdown("module") if name != "elsewhere"
        ]  # the square of its output is of no module
        assert modules[0].endswith(held)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_training_is_kept_and_its_output_is_its_own(trainer, tmp_path):
    done, plain = (ran(tmp_path, script(trainer), *words) for words in (["out"], ["out", "none", "plain"]))
    assert (done.returncode, plain.returncode) == (0, 0), done.stderr
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1] == "trained 4"
    run = memlab.load(tmp_path / "out" / "train.memlab")
    assert run.is_exact
    assert (tmp_path / "out" / "train.html").read_text().startswith("<!doctype html>")
    assert f"memlab: page {tmp_path / 'out' / 'train.html'}" in done.stderr
    assert "nothing is measured" not in done.stderr


# --- transformers -----------------------------------------------------------------------------------------------------


def tiny_trainer(folder, *callbacks, kind=None, **more):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    data = [{"input_ids": (ids := torch.randint(0, 100, (16,))), "labels": ids} for _ in range(8)]
    wanted = {"max_steps": 3, "logging_steps": 1, "report_to": [], "eval_strategy": "steps", "eval_steps": 2} | more
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, save_strategy="no", disable_tqdm=True, use_cpu=True, **wanted
    )
    model = transformers.GPT2LMHeadModel(config)
    return (kind or transformers.Trainer)(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=[*callbacks]
    )


def reporter():
    """A callback that records what reporters get, as TensorBoard's does."""
    transformers = pytest.importorskip("transformers")

    class Reporter(transformers.TrainerCallback):
        def __init__(self):
            self.rows = []

        def on_log(self, args, state, control, logs=None, **more):
            self.rows.append(dict(logs))

    return Reporter()


def callback(trainer, **options):
    pytest.importorskip(trainer)
    return importlib.import_module(f"memlab.integrations.{trainer}").MemoryCallback(**options)


def check_figures(row, prefix="memory"):
    """The categories of a row are all of its peak, and no module is more than that."""
    of = {name.removeprefix(f"{prefix}/"): count for name, count in row.items() if name.startswith(f"{prefix}/")}
    shares = [count for name, count in of.items() if name.startswith("category/")]
    modules = [count for name, count in of.items() if name.startswith("module/")]
    assert of["peak_allocated_bytes"] == sum(shares) > 0
    assert 0 < sum(modules) <= of["peak_allocated_bytes"]
    assert all(type(count) is int and name.endswith(("_bytes", "peak_step")) for name, count in of.items())
    return of


def test_figures_are_in_the_history_and_at_every_reporter(tmp_path, leaves_nothing_behind):
    before, after, memory = reporter(), type(reporter())(), callback("transformers", overhead=None)
    trainer = tiny_trainer(tmp_path, before, memory, after)
    result = trainer.train()
    history = [{name: value for name, value in row.items() if name != "step"} for row in trainer.state.log_history]
    assert history == before.rows == after.rows
    steps = [row for row in history if "loss" in row]
    assert [check_figures(row)["peak_step"] for row in steps] == [1, 2, 3]
    assert [len(check_figures(row, "eval_memory")) > 5 for row in history if "eval_loss" in row] == [True, True]
    assert check_figures(history[-1], "train_memory")["peak_allocated_bytes"] == memory.run.peak_bytes
    assert any("h.1" in name for name in steps[0])
    assert not [name for name in result.metrics if "memory" in name]
    metrics = trainer.evaluate()
    assert "epoch" in metrics
    assert not [name for name in metrics if "memory" in name]
    assert "log" not in vars(trainer)


def test_tensorboard_gets_the_figures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = tiny_trainer(
        tmp_path, callback("transformers", overhead=None), report_to=["tensorboard"], eval_strategy="no"
    )
    trainer.train()
    files = list(tmp_path.rglob("*tfevents*"))
    found = EventAccumulator(str(files[0].parent)).Reload().Tags()["scalars"]
    assert {"train/memory/peak_allocated_bytes", "train/memory/category/parameter_bytes"} <= set(found)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_error_stays_as_it_is_and_nothing_stays_behind(trainer, tmp_path, capfd, leaves_nothing_behind):
    mine = ValueError("mine")

    def fail(*_, **__):
        raise mine

    memory = callback(trainer, out=tmp_path / "runs")
    with pytest.raises(ValueError, match="mine") as raised:
        if trainer == "transformers":
            failing = tiny_trainer(tmp_path, memory)
            failing.compute_loss = fail
            failing.train()
        else:
            module, data = tiny_module()
            module.training_step = fail
            tiny_lightning(tmp_path, memory).fit(module, data)
    assert raised.value is mine
    assert not hasattr(mine, "__notes__")
    assert memlab.load(tmp_path / "runs" / "training.memlab").trace.notes["raised"] is True
    assert "memlab: page" in capfd.readouterr().err


def test_a_trainer_that_got_the_callback_later_is_measured_within_it(tmp_path, capfd, leaves_nothing_behind):
    rows, memory = reporter(), callback("transformers", overhead=None)
    trainer = tiny_trainer(tmp_path, rows)
    trainer.add_callback(memory)
    trainer.train()
    assert "nothing is measured: pass MemoryCallback to the Trainer's constructor" in capfd.readouterr().err
    assert not [name for row in rows.rows for name in row if "memory" in name]
    with memory:
        trainer.train()
    assert check_figures(next(row for row in reversed(rows.rows) if "loss" in row))
    assert memory.run.peak_bytes > 0


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_cannot_be_measured_is_one_line_and_the_training_goes_on(trainer, tmp_path, capfd, leaves_nothing_behind):
    memory = callback(trainer, device="cuda:77")
    if trainer == "transformers":
        assert tiny_trainer(tmp_path, memory, eval_strategy="no").train().global_step == 3
    else:
        module, data = tiny_module()
        tiny_lightning(tmp_path, memory).fit(module, data)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("memlab")]
    assert len(said) == 1, said
    assert said[0].startswith("memlab: nothing is measured: cannot measure cuda:77")


def test_rows_that_come_fast_share_their_figures(tmp_path):
    rows = reporter()
    tiny_trainer(tmp_path, rows, callback("transformers", overhead=0.01), eval_strategy="no", max_steps=12).train()
    steps = [row for row in rows.rows if "loss" in row]
    assert len(steps) == 12
    assert check_figures(steps[0])
    assert len([row for row in steps if "memory/peak_allocated_bytes" in row]) < 6


def test_some_steps_are_measured(tmp_path):
    rows, memory = reporter(), callback("transformers", overhead=None, skip=1, steps=1, out=tmp_path / "runs")
    tiny_trainer(tmp_path, rows, memory, eval_strategy="no").train()
    steps = [row for row in rows.rows if "loss" in row]
    assert ["memory/peak_allocated_bytes" in row for row in steps] == [False, True, False]
    assert steps[1]["memory/peak_step"] == 2
    assert (tmp_path / "runs" / "training.html").exists()


def test_a_trainer_of_trl(tmp_path, monkeypatch):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[EOS]": 1, "a": 2, "b": 3}, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=4, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, bf16=False, max_length=16,
    )  # fmt: skip
    rows = reporter()
    trainer = trl.SFTTrainer(
        transformers.GPT2LMHeadModel(config), arguments, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([{"text": "a b a b"}] * 8),
        callbacks=[rows, callback("transformers", overhead=None)],
    )  # fmt: skip
    trainer.train()
    steps = [row for row in rows.rows if "loss" in row]
    assert [check_figures(row)["peak_step"] for row in steps] == [1, 2]
    assert all("entropy" in row or "mean_token_accuracy" in row for row in steps)  # its own figures are there too


# --- Lightning --------------------------------------------------------------------------------------------------------


def tiny_module():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)

        def training_step(self, batch, index):
            return self.head(self.encoder(batch[0]).relu()).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 64)), batch_size=4)


def tiny_lightning(folder, *callbacks, **more):
    lightning = pytest.importorskip("lightning")
    wanted = {"max_epochs": 1, "logger": False, "log_every_n_steps": 2} | more
    return lightning.Trainer(
        accelerator="cpu", devices=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[*callbacks], **wanted,
    )  # fmt: skip


def test_loggers_of_lightning_get_the_figures(tmp_path, leaves_nothing_behind):
    lightning = pytest.importorskip("lightning")
    memory = callback("lightning", overhead=None)
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    module, data = tiny_module()
    tiny_lightning(tmp_path, memory, logger=logger, max_steps=5).fit(module, data)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    found = [
        {name: int(float(value)) for name, value in row.items()} for row in rows if "memory/peak_allocated_bytes" in row
    ]
    assert [row["step"] for row in found] == [1, 3, 4]
    assert all(check_figures(row) for row in found)
    assert max(row["memory/peak_allocated_bytes"] for row in found) == memory.run.peak_bytes
    assert {"memory/module/Module.encoder_bytes", "memory/module/Module.head_bytes"} <= found[0].keys()


# --- predictions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_first_step_is_predicted_and_the_training_is_the_same(trainer, tmp_path, capfd, leaves_nothing_behind):
    memory, losses = callback(trainer, predict="RTX 4060"), []
    for callbacks in ([memory], []):
        torch.manual_seed(0)
        if trainer == "transformers":
            losses.append(tiny_trainer(tmp_path, *callbacks, eval_strategy="no").train().training_loss)
        else:
            module, data = tiny_module()
            tiny_lightning(tmp_path, *callbacks).fit(module, data)
            losses.append(module.head.weight.sum().item())
    assert losses[0] == losses[1]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("memlab: predicted")]
    assert len(said) == 1
    assert "fits on RTX 4060" in said[0]
    # The CPU has no workspaces of cuBLAS, which are "other", and rounds nothing.
    there, here = memory.prediction.breakdown(), memory.run.breakdown()
    assert there["optimizer"] == pytest.approx(here["optimizer"], rel=0.01)
    assert there["parameter"] == here["parameter"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_would_be_predicted_wrongly_is_refused_in_one_line(trainer, tmp_path, capfd):
    memory = callback(trainer, predict="RTX 4060")
    if trainer == "transformers":
        failing = tiny_trainer(tmp_path, memory, eval_strategy="no")
        failing.state.global_step = 0
        failing.get_batch_samples = None
        with pytest.raises(TypeError):
            failing.train()
        why = "TypeError"
    else:
        module, data = tiny_module()
        module.automatic_optimization = False
        tiny_lightning(tmp_path, memory).fit(module, data)
        why = "it takes its optimizer steps itself"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("memlab: the training step")]
    assert len(said) == 1
    assert why in said[0]
    assert memory.prediction is None


# What Lightning's `self.log` keeps are single numbers, and they are not predicted. The peak is that of segments placed as here:
# before PyTorch 2.12 the range covers others, too.
@pytest.mark.simulated
@pytest.mark.parametrize(
    ("trainer", "words", "logged_bytes"),
    [("transformers", ["1"], 0), ("transformers", ["3"], 0), ("lightning", [], 4096)],
)
def test_a_prediction_is_the_training_on_the_device(trainer, words, logged_bytes, tmp_path):
    done = ran(tmp_path, script(trainer), "out", "none", "predict", *words)
    predicted, measured = map(int, done.stdout.splitlines()[-1].split()[1:])
    assert measured - logged_bytes <= predicted <= measured


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "much"}, "much"), ({"steps": 0}, "steps is a number of optimizer steps, 1 or more, got 0"),
        ({"modules": -1}, "modules is the number"), ({"overhead": 2}, "overhead is a share"),
        ({"predict": "GTX 9"}, "GTX 9"), ({"name": "a/b"}, "a name is that of a run"), ({"out": "/proc/no"}, "cannot write"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_line(trainer, options, said):
    with pytest.raises(memlab.MemlabError, match=said) as refused:
        callback(trainer, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("trainer, module", [("transformers", "transformers"), ("lightning", "lightning.pytorch")])
def test_a_library_that_is_not_installed_is_named(trainer, module, tmp_path):
    text = f"""
import sys
import memlab, memlab.integrations
assert not {{"transformers", "lightning", "pytorch_lightning"}} & sys.modules.keys()
sys.modules[{module!r}] = sys.modules["pytorch_lightning"] = None
import memlab.integrations.{trainer}
"""
    done = ran(tmp_path, "-c", text)
    last = done.stderr.rstrip().splitlines()[-1]
    assert last == (
        f"ImportError: memlab.integrations.{trainer} needs {trainer}, which is not installed: pip install {trainer}."
    )
