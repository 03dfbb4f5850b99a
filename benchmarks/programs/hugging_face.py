"""Training steps of models of transformers of many kinds: experts, recurrences, encoders, speech, series, images, captions.

Needs the extra `third-party`. Models are built from configurations (nothing is downloaded). Importing this module adds them to
`PROGRAMS`. Layers are not dropped at random: which ones would be another draw in each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from torch import Tensor

from benchmarks.programs.registry import program

WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8}
GROUPED = {
    **WIDE,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGES = {"image_size": 128, "patch_size": 16}
Batch = Callable[[], dict[str, Any]]


def ids(count: int, length: int, vocabulary: int = 8000) -> Tensor:
    """Random tokens, none of which has a meaning of its own."""
    return torch.randint(10, vocabulary, (count, length), device="cuda")


def trained(model: Any, batch: Batch, steps: int = 2) -> None:
    """Steps of a model that computes its own loss."""
    model.cuda().train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    for _ in range(steps):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def causal(model: Any, count: int = 4, length: int = 256) -> None:
    """A language model on random tokens."""

    def batch() -> dict[str, Any]:
        tokens = ids(count, length, model.config.get_text_config().vocab_size)
        return {"input_ids": tokens, "labels": tokens}

    trained(model, batch)


# --- language models ----------------------------------------------------------------------------------------------------


def llama(**options: Any) -> Any:
    """A Llama of 6 million weights."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, **options))


def whisper() -> Any:
    """A small Whisper for 10 seconds of sound."""
    config = hf.WhisperConfig(
        d_model=256, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=512, decoder_ffn_dim=512, num_mel_bins=80, max_source_positions=500, vocab_size=8000, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


# --- mixtures of experts ------------------------------------------------------------------------------------------------


@program
def experts_mixtral() -> None:
    causal(hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=8, output_router_logits=True)))


@program
def experts_qwen3() -> None:
    config = hf.Qwen3MoeConfig(
        **GROUPED,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        output_router_logits=True,
    )
    causal(hf.Qwen3MoeForCausalLM(config))


@program
def experts_gpt_oss() -> None:
    config = hf.GptOssConfig(**{**GROUPED, "head_dim": 32, "num_local_experts": 4, "sliding_window": 64})
    causal(hf.GptOssForCausalLM(config))


@program
def experts_deepseek() -> None:
    config = hf.DeepseekV3Config(
        **{**GROUPED, "num_key_value_heads": 8}, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32,
    )  # fmt: skip
    causal(hf.DeepseekV3ForCausalLM(config))


# --- other decoders -----------------------------------------------------------------------------------------------------


@program
def decoder_gemma3() -> None:
    config = hf.Gemma3TextConfig(**{**GROUPED, "head_dim": 32, "sliding_window": 64, "num_hidden_layers": 6})
    causal(hf.Gemma3ForCausalLM(config))


@program
def decoder_mamba2() -> None:
    config = hf.Mamba2Config(
        hidden_size=256,
        num_hidden_layers=2,
        vocab_size=8000,
        num_heads=8,
        head_dim=64,
        state_size=64,
        n_groups=1,
        chunk_size=64,
    )
    causal(hf.Mamba2ForCausalLM(config))


@program
def decoder_qwen3_next() -> None:
    config = hf.Qwen3NextConfig(
        **{**GROUPED, "num_hidden_layers": 4}, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
        shared_expert_intermediate_size=128, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32,
    )  # fmt: skip
    causal(hf.Qwen3NextForCausalLM(config), count=2)


@program
def decoder_recurrent_gemma() -> None:
    config = hf.RecurrentGemmaConfig(
        **{**GROUPED, "num_attention_heads": 4, "num_key_value_heads": 1}, lru_width=256, attention_window_size=64
    )
    causal(hf.RecurrentGemmaForCausalLM(config), count=2, length=128)


@program
def decoder_rwkv() -> None:
    causal(hf.RwkvForCausalLM(hf.RwkvConfig(hidden_size=256, num_hidden_layers=2, vocab_size=8000)), count=2, length=64)


@program
def decoder_bloom() -> None:
    causal(hf.BloomForCausalLM(hf.BloomConfig(hidden_size=256, n_layer=3, n_head=8, vocab_size=8000)))


@program
def decoder_falcon_alibi() -> None:
    config = hf.FalconConfig(hidden_size=256, num_hidden_layers=3, num_attention_heads=8, vocab_size=8000, alibi=True)
    causal(hf.FalconForCausalLM(config))


@program
def decoder_padded_batch() -> None:
    """Sequences of several lengths with a mask, as a data collator makes them."""
    model = llama()

    def batch() -> dict[str, Any]:
        tokens = ids(4, 256)
        mask = (torch.arange(256)[None] < torch.tensor([256, 200, 120, 77])[:, None]).long().cuda()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    trained(model, batch)


# --- encoders -----------------------------------------------------------------------------------------------------------


@program
def encoder_longformer() -> None:
    config = hf.LongformerConfig(**WIDE, vocab_size=8000, attention_window=64, max_position_embeddings=600)
    causal(hf.LongformerForMaskedLM(config), 2, 512)


@program
def encoder_big_bird() -> None:
    config = hf.BigBirdConfig(**WIDE, vocab_size=8000, block_size=16, num_random_blocks=2, max_position_embeddings=600)
    causal(hf.BigBirdForMaskedLM(config), 2, 512)


@program
def encoder_reformer() -> None:
    config = hf.ReformerConfig(
        hidden_size=256, attention_head_size=32, num_attention_heads=8, vocab_size=8000, axial_pos_shape=[16, 16],
        axial_pos_embds_dim=[64, 192], attn_layers=["local", "lsh"], feed_forward_size=512, num_buckets=8, is_decoder=True,
        max_position_embeddings=256,
    )  # fmt: skip
    causal(hf.ReformerModelWithLMHead(config))


@program
def encoder_fnet() -> None:
    """Fourier transforms instead of attention."""
    causal(hf.FNetForMaskedLM(hf.FNetConfig(**{**WIDE, "vocab_size": 8000, "use_tpu_fourier_optimizations": False})))


@program
def encoder_modern_bert() -> None:
    config = hf.ModernBertConfig(**WIDE, vocab_size=8000, local_attention=64, pad_token_id=0)
    causal(hf.ModernBertForMaskedLM(config))


@program
def encoder_layout_lm() -> None:
    config = hf.LayoutLMv3Config(
        **WIDE, vocab_size=8000, input_size=128, coordinate_size=43, shape_size=42, num_labels=7
    )
    model = hf.LayoutLMv3ForTokenClassification(config)

    def batch() -> dict[str, Any]:
        corners = torch.randint(0, 400, (4, 128, 2))
        boxes = torch.cat([corners, corners + 100], -1).cuda()
        images, labels = torch.randn(4, 3, 128, 128, device="cuda"), torch.randint(0, 7, (4, 128), device="cuda")
        return {"input_ids": ids(4, 128), "bbox": boxes, "pixel_values": images, "labels": labels}

    trained(model, batch)


@program
def encoder_question_answering() -> None:
    model = hf.RobertaForQuestionAnswering(hf.RobertaConfig(**WIDE, vocab_size=8000))

    def batch() -> dict[str, Any]:
        at = torch.randint(0, 127, (2, 8), device="cuda")
        return {"input_ids": ids(8, 128), "start_positions": at[0], "end_positions": at[1]}

    trained(model, batch)


@program
def tables_tapas() -> None:
    model = hf.TapasForQuestionAnswering(hf.TapasConfig(**WIDE, vocab_size=8000))

    def batch() -> dict[str, Any]:
        kinds = torch.zeros(4, 128, 7, dtype=torch.long)
        kinds[..., 1], kinds[..., 2] = torch.arange(128) // 8 % 8, torch.arange(128) // 16
        labels = torch.randint(0, 2, (4, 128), device="cuda")
        return {"input_ids": ids(4, 128), "token_type_ids": kinds.cuda(), "labels": labels}

    trained(model, batch)


# --- sound and series ---------------------------------------------------------------------------------------------------


def sound(count: int = 2, length: int = 32000) -> Tensor:
    """Waves of 2 seconds."""
    return torch.randn(count, length, device="cuda")


WAVES = {
    **WIDE, "conv_dim": (128,) * 7, "num_conv_pos_embeddings": 32, "num_conv_pos_embedding_groups": 8, "vocab_size": 40,
    "num_feat_extract_layers": 7, "layerdrop": 0.0,
}  # fmt: skip


@program
def speech_wav2vec2_ctc() -> None:
    model = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAVES, ctc_loss_reduction="mean", ctc_zero_infinity=True))
    trained(model, lambda: {"input_values": sound(), "labels": torch.randint(1, 40, (2, 20), device="cuda")})


@program
def speech_hubert_ctc() -> None:
    model = hf.HubertForCTC(hf.HubertConfig(**WAVES, feat_extract_norm="layer", do_stable_layer_norm=True))
    trained(model, lambda: {"input_values": sound(), "labels": torch.randint(1, 40, (2, 20), device="cuda")})


@program
def speech_wavlm_classification() -> None:
    model = hf.WavLMForSequenceClassification(hf.WavLMConfig(**WAVES, num_labels=5))
    trained(model, lambda: {"input_values": sound(), "labels": torch.randint(0, 5, (2,), device="cuda")})


@program
def speech_whisper_masked() -> None:
    """Whisper with SpecAugment."""
    model = whisper()
    model.config.apply_spec_augment = True

    def batch() -> dict[str, Any]:
        return {"input_features": torch.randn(4, 80, 1000, device="cuda"), "labels": ids(4, 64)}

    trained(model, batch)


@program
def speech_conformer_ctc() -> None:
    config = hf.Wav2Vec2ConformerConfig(**WAVES, position_embeddings_type="relative", conv_depthwise_kernel_size=15)
    model = hf.Wav2Vec2ConformerForCTC(config)
    trained(model, lambda: {"input_values": sound(), "labels": torch.randint(1, 40, (2, 20), device="cuda")})


@program
def series_autoformer() -> None:
    """Autocorrelation by Fourier transforms."""
    config = hf.AutoformerConfig(
        prediction_length=24, context_length=96, lags_sequence=[1, 2, 3], d_model=128, num_time_features=2
    )
    series(hf.AutoformerForPrediction(config), config, 24)


@program
def series_transformer() -> None:
    config = hf.TimeSeriesTransformerConfig(
        prediction_length=24, context_length=96, lags_sequence=[1, 2, 3], d_model=128, num_time_features=2
    )
    series(hf.TimeSeriesTransformerForPrediction(config), config, 24)


def series(model: Any, config: Any, future: int, count: int = 64) -> None:
    """A model of distributions over the next values; simulated GPUs fail the checks of arguments."""
    past = config.context_length + max(config.lags_sequence)
    torch.distributions.Distribution.set_default_validate_args(False)

    def batch() -> dict[str, Any]:
        return {
            "past_values": torch.randn(count, past, device="cuda"),
            "past_time_features": torch.randn(count, past, 2, device="cuda"),
            "past_observed_mask": torch.ones(count, past, device="cuda"),
            "future_values": torch.randn(count, future, device="cuda"),
            "future_time_features": torch.randn(count, future, 2, device="cuda"),
        }  # fmt: skip

    trained(model, batch)


@program
def series_patches() -> None:
    config = hf.PatchTSTConfig(
        num_input_channels=7, context_length=256, patch_length=16, patch_stride=8, d_model=128, prediction_length=24
    )
    model = hf.PatchTSTForPrediction(config)
    trained(
        model,
        lambda: {
            "past_values": torch.randn(32, 256, 7, device="cuda"),
            "future_values": torch.randn(32, 24, 7, device="cuda"),
        },
    )


# --- images -------------------------------------------------------------------------------------------------------------


def pictures(count: int = 4, size: int = 128) -> Tensor:
    """Random images."""
    return torch.randn(count, 3, size, size, device="cuda")


@program
def images_masked_autoencoder() -> None:
    config = hf.ViTMAEConfig(
        **WIDE,
        **IMAGES,
        decoder_hidden_size=128,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=256,
        decoder_num_attention_heads=4,
    )
    trained(hf.ViTMAEForPreTraining(config), lambda: {"pixel_values": pictures(8)})


@program
def images_dinov2() -> None:
    config = hf.Dinov2Config(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, mlp_ratio=2, **IMAGES, num_labels=10
    )
    model = hf.Dinov2ForImageClassification(config)
    trained(model, lambda: {"pixel_values": pictures(8), "labels": torch.randint(0, 10, (8,), device="cuda")})


@program
def images_super_resolution() -> None:
    config = hf.Swin2SRConfig(
        image_size=64, embed_dim=60, depths=[2, 2], num_heads=[6, 6], window_size=8, upscale=2, upsampler="pixelshuffle"
    )
    model = hf.Swin2SRForImageSuperResolution(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        found = model(pixel_values=pictures(2, 64)).reconstruction
        torch.nn.functional.l1_loss(found, torch.rand_like(found)).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- images and text ----------------------------------------------------------------------------------------------------


@program
def both_siglip() -> None:
    config = hf.SiglipConfig(
        text_config={**WIDE, "vocab_size": 8000, "max_position_embeddings": 64}, vision_config={**WIDE, **IMAGES}
    )
    trained(hf.SiglipModel(config), lambda: {"input_ids": ids(8, 64), "pixel_values": pictures(8), "return_loss": True})


@program
def both_blip_captions() -> None:
    config = hf.BlipConfig(
        text_config={
            **WIDE,
            "vocab_size": 8000,
            "encoder_hidden_size": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "sep_token_id": 3,
        },
        vision_config={**WIDE, **IMAGES},
    )
    model = hf.BlipForConditionalGeneration(config)

    def batch() -> dict[str, Any]:
        tokens = ids(4, 32)
        return {"input_ids": tokens, "pixel_values": pictures(), "labels": tokens}

    trained(model, batch)


@program
def both_vision_encoder_decoder() -> None:
    """Optical character recognition as TrOCR does it."""
    vision, text = hf.ViTConfig(**WIDE, **IMAGES), hf.GPT2Config(n_layer=2, n_embd=256, n_head=8, vocab_size=8000)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        vision, text, decoder_start_token_id=1, pad_token_id=0
    )
    model = hf.VisionEncoderDecoderModel(config)
    trained(model, lambda: {"pixel_values": pictures(), "labels": ids(4, 48)})
