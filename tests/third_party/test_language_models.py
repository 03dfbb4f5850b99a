"""`memlab predict hf:ORG/NAME`: what is read of a hub, what runs, what is answered."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not all(map(importlib.util.find_spec, ("transformers", "accelerate", "peft"))):
    pytest.skip("needs the extra third-party", allow_module_level=True)
if importlib.util.find_spec("torchvision") is not None:
    from third_party.vision import load

    load()  # transformers imports it where it is installed
from huggingface_hub import constants, file_download

from memlab.__main__ import main
from memlab.api.language_model import predict_model
from memlab.errors import MemlabError
from memlab.language_models import Generation, TrainingStep
from memlab.language_models.configuration import configuration
from memlab.prediction.cards import cards
from third_party.hub import CODE, FILES, LLAMA, Hub, hub

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub, where huggingface_hub looks for it, with a cache of its own. It reads its variables when it is imported."""
    with hub() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        yield found


def folder(path: Path, **settings: object) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **settings}))
    return str(path)


def test_only_the_configuration_is_read(server):
    assert configuration("hf:org/tiny").name_or_path == "org/tiny"
    assert server.files == {"config.json"}
    assert server.token == "Bearer hf_of_the_test"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "the hub has no model org/none, or it is private"),
        ("gated", "org/gated is gated"),
        ("empty", "org/empty has no config.json"),
        ("not-json", "is no JSON"),
        ("deep", "is no JSON"),
        ("list", "is a JSON list"),
        ("large", "larger than 1 MiB"),
        ("untyped", "model_type"),
        ("unknown", "no such type"),
        ("own-code", "--trust-remote-code"),
        ("many-layers", "num_hidden_layers 1e+09"),
        ("nested-layers", "n_layer 1e+300"),
        ("text", "hidden_size"),
        ("quantized", "stored quantized (gptq)"),
        ("encoder-decoder", "'t5'"),
        ("../..", "is no name of a model on the hub"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(server, refused, name, said):
    line = refused(2, "predict", f"hf:org/{name}", "--card", "T4")
    assert said in line and "\x1b" not in line
    assert server.files <= {"config.json"}


def test_known_architectures_need_no_code_of_the_model(server):
    assert type(configuration("hf:org/known-with-code")).__module__.startswith("transformers.")
    assert server.files == {"config.json"}


def test_code_runs_when_it_is_trusted(tmp_path):
    place = folder(tmp_path / "own", model_type="own", auto_map=json.loads(FILES["org/own-code"])["auto_map"])
    Path(place, "configuration_own.py").write_bytes(CODE)
    with pytest.raises(MemlabError, match="--trust-remote-code"):
        configuration(place)
    with pytest.raises(SystemExit, match="remote code has run"):
        configuration(place, trust_remote_code=True)


def test_offline_it_offers_a_folder(server, monkeypatch):
    configuration("hf:org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert configuration("hf:org/tiny").model_type == "llama"  # from the cache
    with pytest.raises(MemlabError, match=r"give a folder that has its config\.json"):
        configuration("hf:org/gated")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow", "broken"])
def test_a_hub_that_does_not_answer(server, monkeypatch, name, capfd):
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(file_download, "_ETAG_RETRY_TIMEOUT", 1, raising=False)
    with pytest.raises(MemlabError, match=r"give a folder that has its config\.json"):
        configuration(f"hf:org/{name}")
    assert capfd.readouterr() == ("", "")


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MemlabError, match=r"there is no config\.json in '\./nothing'"):
        configuration("./nothing")
    with pytest.raises(MemlabError, match="A model on the hub is hf:org/tiny"):
        configuration("org/tiny")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seq", "5000"], "has 4,096 positions, and a sequence has 5,000 tokens"),
        (["--nf4"], "--lora 16"),
        (["--optimizer", "best"], "got 'best'"),
        (["--attn", "flash"], "attention is sdpa or eager, got 'flash'"),
        (["--dtype", "int8"], "got 'int8'"),
        (["--lora", "0"], "lora is a whole number from 1"),
        (["--batch", "0"], "argument --batch"),
        (["--serve", "--context", "1,x"], "argument --context"),
        (["--serve", "--cache", "none"], "got 'none'"),
        (["--serve", "--context", "8"], "new_tokens is less than the context of 8"),
        (["--limit", "nan"], "--limit: it is a number of seconds above 0"),
        (["--steps", "3"], "--steps"),
    ],
)
def test_wrong_usage(tmp_path, refused, words, said):
    assert said in refused(2, "predict", folder(tmp_path / "tiny"), *words)


def test_a_training_step(tmp_path):
    found = predict_model(TrainingStep(folder(tmp_path / "tiny"), batch=2, tokens=128), "T4")
    weights = sum(one.numel() for one in _model().parameters())
    assert found.prediction.fits == "yes" and found.smallest in cards
    assert sum(found.shares.values()) == found.prediction.allocated_bytes.high
    assert found.shares["weights"] == pytest.approx(2 * weights, rel=0.001)
    assert found.shares["optimizer state"] == pytest.approx(4 * weights, rel=0.001)
    assert found.shares["logits"] % (2 * 128 * LLAMA["vocab_size"] * 2) == 0
    assert "gradient checkpointing  off" in found.text and "adamw_torch_fused" in found.text
    assert found.facts["smallest_card"] == found.smallest


def test_the_smallest_card_is_one_that_it_was_predicted_for(tmp_path):
    """GPUs before Ampere have no flash attention in bfloat16: what fits theirs by size may need a matrix of all scores there."""
    long = {"max_position_embeddings": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
    step = TrainingStep(folder(tmp_path / "tiny", **long), batch=150, tokens=4096)
    found = predict_model(step, "RTX 4090")
    older = [card for card in cards.values() if card.compute_capability < (8, 0)]
    by_replay = [card for card in older if found.prediction.for_card(card).fits == "yes"]
    smallest = min(by_replay, key=lambda card: card.usable_bytes)
    assert cards[found.smallest].usable_bytes > smallest.usable_bytes, "else nothing is at stake"
    for one in (found, predict_model(step, smallest)):
        assert predict_model(step, one.smallest, smallest=False).prediction.fits == "yes"
    assert one.prediction.fits == "no"


def _model():
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA))


def test_the_cache_of_an_inference(tmp_path, capsys):
    """Keys and values of every layer, grouped heads and token: by hand."""
    words = ["--serve", "--context", "1k", "--batch", "3", "--card", "T4", "--json"]
    assert main(["predict", folder(tmp_path / "tiny"), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cache_bytes"] == 2 * 2 * 3 * 2 * (1024 - 8) * 16 * 2
    assert found["decode_bytes"] > 0 and found["prefill_bytes"] == found["allocated_bytes"][1]
    assert (found["batch"], found["tokens"]) == (3, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["static", "offloaded", "offloaded_static"])
def test_other_caches(tmp_path, cache):
    found = predict_model(Generation(folder(tmp_path / "tiny"), context=1024, cache=cache), "T4", smallest=False)
    dynamic = predict_model(Generation(folder(tmp_path / "tiny"), context=1024), "T4", smallest=False)
    assert found.generated is not None and dynamic.generated is not None
    if cache == "static":
        assert found.generated.cache_bytes == pytest.approx(dynamic.generated.cache_bytes, rel=0.02)
    else:
        assert found.generated.cache_bytes <= dynamic.generated.cache_bytes


@pytest.mark.slow
def test_a_sliding_window_is_a_view_until_the_next_token(tmp_path):
    """After the prompt transformers keeps a slice of all keys and values: the memory is that of all; decode copies the window."""
    settings = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    sliding = predict_model(Generation(folder(tmp_path / "sliding", **settings), context=1024), "T4", smallest=False)
    whole = predict_model(Generation(folder(tmp_path / "tiny"), context=1024), "T4", smallest=False)
    assert sliding.generated is not None and whole.generated is not None
    assert whole.generated.cache_bytes == 2 * 2 * 2 * (1024 - 8) * 16 * 2
    # Each layer has the size of its window as a tensor.
    assert sliding.generated.cache_bytes == whole.generated.cache_bytes + 2 * 8


@pytest.mark.slow
def test_several_sizes_are_a_table(tmp_path, capsys):
    words = ["--card", "T4", "--seq", "64,128", "--batch", "1,2"]
    assert main(["predict", *words, folder(tmp_path / "tiny")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:7]]
    assert [row[:3] for row in rows] == [[batch, tokens, "fits"] for tokens in ("64", "128") for batch in ("1", "2")]
    assert main(["predict", folder(tmp_path / "tiny"), *words, "--json"]) == 0
    assert [one["fits"] for one in json.loads(capsys.readouterr().out)] == ["yes"] * 4


@pytest.mark.slow
def test_adapters_are_what_is_trained(tmp_path):
    found = predict_model(TrainingStep(folder(tmp_path / "tiny"), tokens=64, lora=4), "T4", smallest=False)
    inner, width, groups = 128, 64, 32
    sides = 2 * (width + width) + 2 * (width + groups) + 3 * (width + inner)
    assert found.shares["optimizer state"] == pytest.approx(2 * 2 * 4 * 4 * sides, rel=0.01)  # two moments, float32


@pytest.mark.slow
@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
def test_weights_of_four_bits(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    place = folder(tmp_path / "tiny", **sizes)
    step = TrainingStep(place, tokens=64, lora=4, nf4=True, gradient_checkpointing=True)
    found = predict_model(step, "T4", smallest=False)
    linear = 2 * (512 * 512 * 2 + 512 * 256 * 2 + 3 * 512 * 1024)
    # Half a byte each, and of each 64 one scale, of 8 bits; the embedding and the last layer are float32 in training.
    assert found.shares["weights"] == pytest.approx(
        linear * (0.5 + 1 / 64) + 4 * 2 * 1000 * 512 + 4 * linear / 512, rel=0.06
    )


def test_a_script_with_such_an_argument_is_a_script(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import sys; assert sys.argv[1:] == ['hf:org/tiny']")
    with pytest.raises(SystemExit) as ended:
        main(["predict", "--card", "T4", str(tmp_path / "train.py"), "hf:org/tiny"])
    assert ended.value.code == 3
    assert "the script allocated nothing on a GPU" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "hf:org/tiny", "--help"])
    assert "--gradient-checkpointing" in capsys.readouterr().out
    assert "memlab.language_models" in sys.modules


@pytest.mark.simulated
@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="needs bitsandbytes")
def test_bitsandbytes_runs_on_the_simulated_gpu():
    """Its weights are half a byte each and its moments a byte, as their sizes say."""
    import bitsandbytes

    before = torch.cuda.memory_allocated()
    layer = bitsandbytes.nn.Linear4bit(1024, 1024, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
    weight = torch.nn.Parameter(torch.randn(1024, 4096, device="cuda"))
    quantized = layer.weight.numel()
    assert (layer.weight.dtype, quantized) == (torch.uint8, 1024 * 1024 // 2)
    held = torch.cuda.memory_allocated()
    assert held - before > quantized + 4 * weight.numel()
    optimizer = bitsandbytes.optim.Adam8bit([weight])
    weight.grad = torch.ones_like(weight)
    layer(torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)).sum()
    optimizer.step()
    moments = torch.cuda.memory_allocated() - held - 4 * weight.numel()
    assert 2 * weight.numel() < moments < 2.2 * weight.numel() + (9 << 20)  # and a workspace of cuBLAS
