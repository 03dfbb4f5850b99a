"""`memlab COMMAND` on the command line."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys

import pytest
import torch
from processes import python

from memlab.__main__ import PIPE_CLOSED, main
from memlab.cli.language_model import numbers
from memlab.errors import MemlabError
from memlab.language_models.configuration import required


def test_the_cards_are_listed(capsys):
    assert main(["cards"]) == 0
    assert "RTX 4060" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["no such"], ["--unknown"]])
def test_what_is_no_command_is_refused_with_the_ones_there_are(arguments, capsys):
    assert main(arguments) == 2
    assert "memlab: there is no command" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; from memlab.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    found = python("-c", code)
    assert found.startswith("memlab run")
    assert found.endswith("False\n")


@pytest.mark.parametrize(
    "words, said",
    [
        (["run"], "which script?"),
        (["run", "nothing.py"], "there is no script 'nothing.py'"),
        (["run", "-m", "nothing.at.all"], "there is no module 'nothing.at.all'"),
        (["run", "--steps", "0", "train.py"], "steps is a number of optimizer steps, 1 or more, got 0"),
        (["run", "--budget", "lots", "train.py"], "lots"),
        (["run", "--name", "../up", "train.py"], "got '../up'"),
        (["run", "--out", "train.py/x", "train.py"], "cannot write to 'train.py/x'"),
        (["run", "--unknown", "train.py"], "--unknown"),
        (["predict", "--card", "nothing", "train.py"], "nothing"),
        (["show", "nothing"], "there is no file 'nothing'"),
        (["show", "."], "there is no run in '.'"),
        (["check", "a", "--baseline", "b", "--tolerance", "much"], "'much'"),
        (["check", "a", "--baseline", "b", "--tolerance", "-2%"], "one that begins with '-' is written after '='"),
        (["compare", "a", "b"], "'a'"),
        (["fit", "train.py"], "not a memlab trace"),
        (["show", ""], "argument FILE|DIR: it is empty"),
        (["show", "x" * 5000], "File name too long"),
        (["check", "a", "--baseline", ""], "argument --baseline: it is empty"),
        (["compare", "", "b"], "argument A: it is empty"),
        (["fit", "--on", "", "a"], "argument --on: it is empty"),
        (["run", "x" * 5000], "there is no script 'xxx"),
        (["run", "--out", "", "train.py"], "argument --out: it is empty"),
        (["run", "--name", "..", "train.py"], "got '..'"),
        (["run", "--name", "x" * 201, "train.py"], "1 to 200 characters"),
        (["run", "--device", "gpu", "train.py"], "--device is cpu, cuda, cuda:1, mps or xpu, got 'gpu'"),
        (["predict", "--card", "", "train.py"], "argument --card: it is empty"),
        (["predict", "--card", "8GBB", "train.py"], "'8GBB' is neither a card nor a size"),
        (["predict", "--card", "-1GiB", "train.py"], "expected one argument"),
        (["predict", "--nnodes", "", "train.py"], "argument --nnodes: it is empty"),
        (["predict", "--torch", "two", "train.py"], 'a version of PyTorch is a text such as "2.14"'),
        (["predict", "--torch", "2.9", "train.py"], "PyTorch 2.10 to 2.15, not of 2.9"),
        (["predict", "--limit", "nan", "train.py"], "argument --limit: it is a number of seconds above 0, got 'nan'"),
        (["predict", "--out", "no/folder/x", "train.py"], "there is no folder"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path, monkeypatch, refused, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "train.py").write_text("print(1)")
    assert said in refused(2, *words)


@pytest.mark.parametrize(
    "command", ["run", "predict", "show", "compare", "fit", "check", "cards", "progress", "doctor", "simulate"]
)
def test_every_command_has_help_with_an_example(capsys, command):
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    assert f"  memlab {command}" in capsys.readouterr().out.partition("examples:")[2]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
def test_a_model_without_transformers_is_one_line(refused):
    needs = "models by name need transformers, accelerate: pip install transformers accelerate"
    assert refused(2, "predict", "hf:org/tiny", "--card", "T4") == f"memlab predict: {needs}\n"


def test_a_package_whose_import_fails_is_said_with_the_cause(tmp_path, monkeypatch):
    """As peft's does beside a torchvision that was built for another torch: pip install would change nothing."""
    (tmp_path / "broken_peft.py").write_text(
        "try:\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "except RuntimeError as error:\n    raise ImportError('no Bloom') from error"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MemlabError) as refusal:
        required("broken_peft")
    why = "RuntimeError: operator torchvision::nms does not exist"
    assert str(refusal.value) == f"models by name need broken_peft, whose import fails here ({why}): install it anew."


@pytest.mark.parametrize(("text", "found"), [("4", (4,)), ("32k", (32768,)), ("8,1K, 2", (2, 8, 1024))])
def test_numbers(text, found):
    assert numbers(text) == found


def test_a_reader_that_has_read_enough_is_no_error():
    """`memlab cards | head -1`."""
    command = [sys.executable, "-m", "memlab", "cards", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(120) == PIPE_CLOSED
        assert process.stderr.read() == b""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_calibrating_without_a_gpu_is_one_line(refused):
    assert refused(1, "calibrate").startswith("memlab calibrate: ")


def test_a_broken_pytorch_is_said_in_one_line(tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text('raise ImportError("libcudnn.so.9: cannot open shared object file")')
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from memlab.__main__ import main; print(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    assert done.stderr.startswith("memlab: PyTorch cannot be imported (libcudnn.so.9") and done.stderr.count("\n") == 1
