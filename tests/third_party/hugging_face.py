"""Hugging Face architectures, small: decoders, encoders, both, vision, speech."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import transformers as hf

from third_party import vision as torchvision_models

if importlib.util.find_spec("torchvision") is not None:
    torchvision_models.load()  # transformers imports it where it is installed
hf.logging.set_verbosity_error()
Made = tuple[torch.nn.Module, Callable[[], dict[str, Any]]]
LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PARTS = {**LAYERS, "intermediate_size": 128}
SMALL = {**PARTS, "vocab_size": 200}
GROUPED = {**SMALL, "num_key_value_heads": 2}
PATCHES = {"image_size": 32, "patch_size": 8}
SIDES = {
    f"{side}_{part}": number
    for side in ("encoder", "decoder")
    for part, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
}


def tokens(batch: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 200, (batch, length), device="cuda")


def language(maker: Any, config: str, **settings: Any) -> Callable[[], Made]:
    def batch() -> dict[str, Any]:
        ids = tokens()
        return {"input_ids": ids, "labels": ids}

    return lambda: (maker.from_config(getattr(hf, f"{config}Config")(**settings)), batch)


decoder = functools.partial(language, hf.AutoModelForCausalLM)
encoder = functools.partial(language, hf.AutoModelForMaskedLM)
both = functools.partial(language, hf.AutoModelForSeq2SeqLM, vocab_size=200)


def vision(config: str, **settings: Any) -> Callable[[], Made]:
    def batch() -> dict[str, Any]:
        images = torch.randn(2, 3, 32, 32, device="cuda")
        return {"pixel_values": images, "labels": torch.randint(0, 2, (2,), device="cuda")}

    return lambda: (hf.AutoModelForImageClassification.from_config(getattr(hf, f"{config}Config")(**settings)), batch)


def whisper() -> Made:
    config = hf.WhisperConfig(
        d_model=64, **SIDES, vocab_size=200, max_source_positions=50, max_target_positions=40, num_mel_bins=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config)
    return model, lambda: {"input_features": torch.randn(2, 20, 100, device="cuda"), "labels": tokens()}


def clip() -> Made:
    text = {**SMALL, "max_position_embeddings": 40, "eos_token_id": 2}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config={**PARTS, **PATCHES}, projection_dim=32))
    images = {"pixel_values": lambda: torch.randn(2, 3, 32, 32, device="cuda")}
    return model, lambda: {"input_ids": tokens(), "pixel_values": images["pixel_values"](), "return_loss": True}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": decoder("GPT2", n_embd=64, n_layer=2, n_head=4, vocab_size=200, n_positions=64),
    "llama": decoder("Llama", **GROUPED),
    "mistral": decoder("Mistral", **GROUPED),
    "qwen2": decoder("Qwen2", **GROUPED),
    "qwen3": decoder("Qwen3", **GROUPED, head_dim=16),
    "gemma2": decoder("Gemma2", **GROUPED, head_dim=16),
    "phi3": decoder("Phi3", **GROUPED, pad_token_id=0),
    "opt": decoder("OPT", **LAYERS, vocab_size=200, ffn_dim=128, word_embed_proj_dim=64, max_position_embeddings=64),
    "bloom": decoder("Bloom", hidden_size=64, n_layer=2, n_head=4, vocab_size=200),
    "gpt_neox": decoder("GPTNeoX", **SMALL),
    "falcon": decoder("Falcon", **LAYERS, vocab_size=200),
    "mixtral": decoder("Mixtral", **GROUPED, num_local_experts=4),
    "bert": encoder("Bert", **SMALL),
    "roberta": encoder("Roberta", **SMALL),
    "distilbert": encoder("DistilBert", dim=64, hidden_dim=128, n_layers=2, n_heads=4, vocab_size=200),
    "electra": encoder("Electra", **SMALL, embedding_size=64),
    "t5": both("T5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": both("Bart", d_model=64, **SIDES, max_position_embeddings=64),
    "vit": vision("ViT", **PARTS, **PATCHES),
    "swin": vision("Swin", image_size=32, patch_size=2, embed_dim=24, depths=[1, 1], num_heads=[2, 2], window_size=4),
    "convnext": vision("ConvNext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "whisper": whisper,
    "clip": clip,
}
