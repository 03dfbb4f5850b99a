"""Programs whose memory depends on values: loops with an end, selection, experts, alignment, generation, detection.

Needs the extra `third-party`, and scipy for DETR's matching. Models are built from configurations (nothing is downloaded).
Importing this module adds them to `PROGRAMS`. Measured with `--values`, as a simulated GPU reads zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from benchmarks.programs.hugging_face import (
    GROUPED,
    IMAGES,
    WAVES,
    WIDE,
    causal,
    ids,
    llama,
    pictures,
    sound,
    trained,
    whisper,
)
from benchmarks.programs.registry import program

# --- plain PyTorch ------------------------------------------------------------------------------------------------------


@program
def loop_until_converged() -> None:
    """Training ends when the loss is small; what it noted stays on the GPU."""
    model, noted = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda(), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    inputs = torch.randn(2048, 256, device="cuda")
    target = inputs[:, :8].sum(1, keepdim=True)
    loss = torch.tensor(1e9)
    while loss.item() > 1.0:
        found = model(inputs)
        loss = F.mse_loss(found, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        noted.append(found.detach().expand(-1, 64).clone())


@program
def hard_examples() -> None:
    """Only examples with a loss above the mean take part in backward."""
    model = nn.Sequential(nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 100)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        inputs, target = torch.randn(4096, 128, device="cuda"), torch.randint(100, (4096,), device="cuda")
        with torch.no_grad():
            losses = F.cross_entropy(model(inputs), target, reduction="none")
        hard = losses > losses.mean()
        F.cross_entropy(model(inputs[hard]), target[hard]).backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def tokens_per_expert() -> None:
    """Each expert gets the tokens that chose it, in a loop as most repositories write it."""
    router, experts = nn.Linear(256, 8).cuda(), nn.ModuleList()
    experts.extend(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8))
    experts.cuda()
    optimizer = torch.optim.AdamW([*router.parameters(), *experts.parameters()])
    for _ in range(3):
        tokens = torch.randn(4096, 256, device="cuda")
        weights, chosen = router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def edges_within_a_radius() -> None:
    """A graph network whose edges join points that are near."""
    points = torch.rand(1024, 3, device="cuda")
    message = nn.Sequential(nn.Linear(64 * 2, 64), nn.SiLU(), nn.Linear(64, 64)).cuda()
    optimizer, state = torch.optim.Adam(message.parameters()), torch.randn(1024, 64, device="cuda")
    for _ in range(2):
        start, end = torch.nonzero(torch.cdist(points, points) < 0.2, as_tuple=True)
        sent = message(torch.cat([state[start], state[end]], 1))
        torch.zeros_like(state).index_add_(0, end, sent).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def tokens_until_the_end() -> None:
    """Sampling one token after the other until each sequence has ended."""
    embed, recur, head = nn.Embedding(50, 256).cuda(), nn.Linear(256, 256).cuda(), nn.Linear(256, 50).cuda()
    made, state = [torch.ones(64, dtype=torch.long, device="cuda")], torch.zeros(64, 256, device="cuda")
    is_over, kept = torch.zeros(64, dtype=torch.bool, device="cuda"), []
    while not is_over.all() and len(made) < 200:
        state = torch.tanh(recur(state)) + embed(made[-1])
        scores = head(state).log_softmax(-1)
        made.append(torch.multinomial(scores.exp(), 1)[:, 0])
        kept.append(scores)
        is_over |= made[-1] < 4
    (-torch.stack(kept).gather(2, torch.stack(made[1:])[..., None])).mean().backward()


@program
def aligned_by_ctc() -> None:
    """Lengths and targets are on the GPU."""
    model = nn.Sequential(nn.Conv1d(80, 256, 5, 2, 2), nn.ReLU(), nn.Conv1d(256, 64, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        scores = model(torch.randn(16, 80, 600, device="cuda")).permute(2, 0, 1).log_softmax(-1)
        lengths = torch.randint(5, 40, (16,), device="cuda")
        targets = torch.randint(1, 64, (16, 40), device="cuda")
        F.ctc_loss(scores, targets, torch.full((16,), 300, device="cuda"), lengths).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- generation ---------------------------------------------------------------------------------------------------------


def prompt(count: int = 4, length: int = 128) -> dict[str, Any]:
    """A prompt without padding."""
    return {
        "input_ids": ids(count, length),
        "attention_mask": torch.ones(count, length, dtype=torch.long, device="cuda"),
    }


def generated(model: Any, **how: Any) -> None:
    """Up to 48 tokens."""
    model.cuda().eval().generate(**how, max_new_tokens=48)


@program
def generate_greedy() -> None:
    generated(llama(), **prompt(), do_sample=False)


@program
def generate_sampling_until_the_end() -> None:
    """One token in 16 ends a sequence."""
    ends = list(range(0, 8000, 16))
    generated(llama(), **prompt(8), do_sample=True, top_k=50, top_p=0.9, repetition_penalty=1.1, eos_token_id=ends)


@program
def generate_beams() -> None:
    generated(llama(), **prompt(), num_beams=4, do_sample=False)


@program
def generate_beams_until_the_end() -> None:
    ends = list(range(0, 8000, 16))
    generated(llama(), **prompt(), num_beams=4, do_sample=True, early_stopping=True, eos_token_id=ends)


@program
def generate_static_cache() -> None:
    generated(llama(), **prompt(), do_sample=False, cache_implementation="static", disable_compile=True)


@program
def generate_assisted() -> None:
    generated(llama(), **prompt(1), do_sample=False, assistant_model=llama().cuda().eval())


@program
def generate_prompt_lookup() -> None:
    generated(llama(), **prompt(1), do_sample=False, prompt_lookup_num_tokens=4)


@program
def generate_gemma_sliding_window() -> None:
    config = hf.Gemma3TextConfig(**{**GROUPED, "head_dim": 32, "sliding_window": 64, "num_hidden_layers": 6})
    generated(hf.Gemma3ForCausalLM(config), **prompt(), do_sample=False)


@program
def generate_mixtral() -> None:
    config = hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
    generated(hf.MixtralForCausalLM(config), **prompt(), do_sample=False)


@program
def generate_t5_beams() -> None:
    config = hf.T5Config(
        d_model=256, d_ff=512, num_layers=3, num_heads=4, d_kv=64, vocab_size=8000, decoder_start_token_id=0
    )
    generated(hf.T5ForConditionalGeneration(config), **prompt(), num_beams=4, do_sample=False)


@program
def generate_bart_beams() -> None:
    config = hf.BartConfig(
        d_model=256, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=512, decoder_ffn_dim=512, encoder_attention_heads=4,
        decoder_attention_heads=4, vocab_size=8000, forced_eos_token_id=None,
    )  # fmt: skip
    generated(hf.BartForConditionalGeneration(config), **prompt(), num_beams=3, do_sample=False, no_repeat_ngram_size=3)


@program
def generate_whisper() -> None:
    generated(whisper(), input_features=torch.randn(4, 80, 1000, device="cuda"), do_sample=False)


@program
def generate_mamba2() -> None:
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
    generated(hf.Mamba2ForCausalLM(config), **prompt(), do_sample=False)


# --- transformers -------------------------------------------------------------------------------------------------------


@program
def experts_switch() -> None:
    config = hf.SwitchTransformersConfig(
        d_model=256, d_ff=512, d_kv=64, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4, vocab_size=8000,
        decoder_start_token_id=0, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )  # fmt: skip
    causal(hf.SwitchTransformersForConditionalGeneration(config), length=128)


@program
def speech_wav2vec2_pretraining() -> None:
    """As the example script: masked spans and negatives are drawn on the host."""
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices, _sample_negative_indices

    config = hf.Wav2Vec2Config(**WAVES, proj_codevector_dim=128, codevector_dim=128, num_negatives=20)
    model = hf.Wav2Vec2ForPreTraining(config)
    length = int(model._get_feat_extract_output_lengths(32000))

    def batch() -> dict[str, Any]:
        mask = _compute_mask_indices((2, length), 0.3, 5)
        negatives = _sample_negative_indices((2, length), 20, mask_time_indices=mask)
        return {
            "input_values": sound(), "mask_time_indices": torch.tensor(mask).cuda(),
            "sampled_negative_indices": torch.tensor(negatives).cuda(),
        }  # fmt: skip

    trained(model, batch)


@program
def sound_vits() -> None:
    """Text to speech, whose length is predicted by the model."""
    config = hf.VitsConfig(
        vocab_size=50, hidden_size=96, num_hidden_layers=2, ffn_dim=192, flow_size=96, spectrogram_bins=129,
        upsample_initial_channel=64, depth_separable_num_layers=2, prior_encoder_num_flows=2,
        posterior_encoder_num_wavenet_layers=2,
        prior_encoder_num_wavenet_layers=2,
    )  # fmt: skip
    model = hf.VitsModel(config).cuda().eval()
    with torch.no_grad():
        model(input_ids=torch.randint(1, 50, (2, 60), device="cuda"))


def boxes(count: int, each: int, classes: int) -> list[dict[str, Tensor]]:
    """Targets of detection: class labels, and boxes as centre and size."""
    return [
        {
            "class_labels": torch.randint(0, classes, (each,), device="cuda"),
            "boxes": torch.rand(each, 4, device="cuda") * 0.4 + 0.1,
        }
        for _ in range(count)
    ]


def resnet(stages: list[str]) -> Any:
    """A backbone that is built from its configuration."""
    return hf.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )


SEARCH = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256}


@program
def detection_detr() -> None:
    config = hf.DetrConfig(
        **SEARCH, backbone_config=resnet(["stage4"]),
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=50, num_labels=20, auxiliary_loss=True,
    )  # fmt: skip
    trained(hf.DetrForObjectDetection(config), lambda: {"pixel_values": pictures(2, 256), "labels": boxes(2, 5, 20)})


@program
def detection_deformable() -> None:
    config = hf.DeformableDetrConfig(
        **SEARCH, backbone_config=resnet(["stage2", "stage3", "stage4"]), use_timm_backbone=False,
        use_pretrained_backbone=False, backbone=None, num_queries=50, num_labels=20, num_feature_levels=4, auxiliary_loss=True,
    )  # fmt: skip
    trained(
        hf.DeformableDetrForObjectDetection(config),
        lambda: {"pixel_values": pictures(2, 256), "labels": boxes(2, 5, 20)},
    )


@program
def detection_rt_detr() -> None:
    config = hf.RTDetrConfig(
        d_model=128, encoder_hidden_dim=128, encoder_ffn_dim=256, decoder_ffn_dim=256, decoder_layers=2, num_queries=50,
        num_labels=20,
        backbone_config=hf.RTDetrResNetConfig(
            embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1] * 4, out_features=["stage2", "stage3", "stage4"],
            layer_type="basic",
        ),
        encoder_in_channels=[64, 128, 256], decoder_in_channels=[128, 128, 128], num_denoising=20,
    )  # fmt: skip
    trained(hf.RTDetrForObjectDetection(config), lambda: {"pixel_values": pictures(2, 256), "labels": boxes(2, 5, 20)})


@program
def detection_yolos() -> None:
    config = hf.YolosConfig(**WIDE, image_size=[128, 128], patch_size=16, num_detection_tokens=20, num_labels=20)
    trained(hf.YolosForObjectDetection(config), lambda: {"pixel_values": pictures(), "labels": boxes(4, 5, 20)})


def masks(count: int, each: int, size: int, classes: int) -> dict[str, Any]:
    """Targets of segmentation."""
    return {
        "mask_labels": [(torch.rand(each, size, size, device="cuda") > 0.5).float() for _ in range(count)],
        "class_labels": [torch.randint(0, classes, (each,), device="cuda") for _ in range(count)],
    }


@program
def segmentation_mask2former() -> None:
    config = hf.Mask2FormerConfig(
        backbone_config=hf.SwinConfig(image_size=128, embed_dim=32, depths=[1] * 4, num_heads=[2] * 4, window_size=4,
                                      out_features=["stage1", "stage2", "stage3", "stage4"]),
        hidden_dim=64, feature_size=64, mask_feature_size=64, num_queries=20, encoder_layers=2, decoder_layers=3,
        encoder_feedforward_dim=128, dim_feedforward=128, num_labels=10, num_attention_heads=4, train_num_points=1024,
    )  # fmt: skip
    trained(
        hf.Mask2FormerForUniversalSegmentation(config), lambda: {"pixel_values": pictures(2), **masks(2, 4, 128, 10)}
    )


@program
def video_mae() -> None:
    config = hf.VideoMAEConfig(
        **WIDE, image_size=64, patch_size=16, num_frames=8, decoder_hidden_size=128, decoder_num_hidden_layers=2,
        decoder_intermediate_size=256, decoder_num_attention_heads=4,
    )  # fmt: skip
    model, patches = hf.VideoMAEForPreTraining(config), 4 * 16

    def batch() -> dict[str, Any]:
        hidden = torch.zeros(patches, dtype=torch.bool)
        hidden[: patches * 3 // 4] = True
        return {
            "pixel_values": torch.randn(4, 8, 3, 64, 64, device="cuda"),
            "bool_masked_pos": hidden.expand(4, -1).cuda(),
        }

    trained(model, batch)


@program
def both_llava() -> None:
    """Features of an image replace the tokens that stand for it."""
    vision = hf.CLIPVisionConfig(**WIDE, **IMAGES)
    config = hf.LlavaConfig(
        vision_config=vision, text_config=hf.LlamaConfig(**GROUPED), image_token_index=5, vision_feature_layer=-2
    )
    model = hf.LlavaForConditionalGeneration(config)

    def batch() -> dict[str, Any]:
        tokens = torch.randint(10, 8000, (2, 128))
        tokens[:, 4 : 4 + 64] = 5
        tokens = tokens.cuda()
        return {"input_ids": tokens, "pixel_values": pictures(2), "labels": tokens}

    trained(model, batch)
