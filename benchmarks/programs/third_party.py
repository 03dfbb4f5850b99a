"""Training steps of models that other people wrote: timm, diffusers, peft, transformers, torchvision, with their own utilities.

Needs the extra `third-party`. Models are built from configurations (nothing is downloaded) in sizes between a laptop's and a
workstation's GPU. Importing this module adds them to `PROGRAMS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import peft
import timm
import timm.data
import timm.loss
import timm.optim
import timm.utils
import torch
import torchvision
import transformers as hf
from torch import Tensor, nn

from benchmarks.programs.registry import images, program, train

Batch = Callable[[], tuple[Tensor, ...]]


def classify(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss: Any = None, steps: int = 3
) -> None:
    """Train an image classifier."""
    train(model, optimizer, batch, loss or nn.CrossEntropyLoss(), steps)


# --- timm ---------------------------------------------------------------------------------------------------------------


def timm_step(name: str, optimizer: str, count: int = 8, size: int = 224, **options: Any) -> None:
    """Three steps of one of timm's models with one of timm's optimizers."""
    model = timm.create_model(name, num_classes=100, **options).cuda()
    made = timm.optim.create_optimizer_v2(model, opt=optimizer, lr=1e-3, weight_decay=0.05)
    classify(model, made, images(count, size, classes=100), timm.loss.LabelSmoothingCrossEntropy(0.1).cuda())


@program
def timm_resnet50d_lamb() -> None:
    timm_step("resnet50d", "lamb")


@program
def timm_efficientnet_rmsprop() -> None:
    timm_step("efficientnet_b0", "rmsproptf", drop_rate=0.2, drop_path_rate=0.2)


@program
def timm_convnext_adamw() -> None:
    timm_step("convnext_tiny", "adamw", drop_path_rate=0.1)


@program
def timm_vit_small_lion() -> None:
    timm_step("vit_small_patch16_224", "lion", count=16)


@program
def timm_swin_adamp() -> None:
    timm_step("swin_tiny_patch4_window7_224", "adamp")


@program
def timm_regnet_nesterov() -> None:
    timm_step("regnety_016", "nesterov")


@program
def timm_mobilenetv3_adafactor() -> None:
    timm_step("mobilenetv3_large_100", "adafactor", count=16)


@program
def timm_mixer_adabelief() -> None:
    timm_step("mixer_s16_224", "adabelief", count=16)


@program
def timm_cait_nadamw() -> None:
    timm_step("cait_xxs24_224", "nadamw")


@program
def timm_maxvit_adan() -> None:
    timm_step("maxvit_tiny_rw_224", "adan", count=4)


@program
def timm_beit_layer_decay() -> None:
    model = timm.create_model("beit_base_patch16_224", num_classes=100).cuda()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    classify(model, optimizer, images(8, 224, classes=100))


@program
def timm_scaler_clip_and_average() -> None:
    """timm's training loop: autocast, its gradient scaler with clipping, an averaged model."""
    model = timm.create_model("resnet26", num_classes=100).cuda()
    average = timm.utils.ModelEmaV3(model)
    optimizer = timm.optim.create_optimizer_v2(model, opt="momentum", lr=0.1, weight_decay=1e-4)
    scaler, batch, loss_of = timm.utils.NativeScaler(), images(16, 160, classes=100), nn.CrossEntropyLoss()
    for _ in range(3):
        inputs, target = batch()
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model(inputs), target)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        average.update(model)


@program
def timm_mixup_checkpointed() -> None:
    model = timm.create_model("deit_small_patch16_224", num_classes=100).cuda()
    model.set_grad_checkpointing(True)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, num_classes=100)
    batch = images(16, 224, classes=100)
    classify(model, optimizer, lambda: mixup(*batch()), timm.loss.SoftTargetCrossEntropy())


# --- diffusers ----------------------------------------------------------------------------------------------------------


def denoise(model: nn.Module, shape: tuple[int, ...], optimizer: torch.optim.Optimizer, **condition: Any) -> None:
    """Train a model to predict the noise that a scheduler added."""
    schedule = diffusers.DDPMScheduler(num_train_timesteps=1000)
    for _ in range(3):
        clean, noise = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
        when = torch.randint(0, 1000, (shape[0],), device="cuda")
        found = model(schedule.add_noise(clean, noise, when), when, **condition, return_dict=False)[0]
        nn.functional.mse_loss(found[:, : shape[1]], noise).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program
def diffusers_unet_with_average() -> None:
    model = diffusers.UNet2DModel(
        sample_size=64, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(64, 128, 128, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    ).cuda()  # fmt: skip
    average = diffusers.training_utils.EMAModel(model.parameters(), decay=0.999)
    denoise(model, (4, 3, 64, 64), torch.optim.AdamW(model.parameters()))
    average.step(model.parameters())


def conditioned() -> Any:
    """A small U-Net of the kind Stable Diffusion has."""
    return diffusers.UNet2DConditionModel(
        sample_size=32, in_channels=4, out_channels=4, layers_per_block=2, block_out_channels=(64, 128, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=256,
        attention_head_dim=8,
    ).cuda()  # fmt: skip


@program
def diffusers_text_to_image() -> None:
    model = conditioned()
    text = torch.randn(4, 77, 256, device="cuda")
    denoise(model, (4, 4, 32, 32), torch.optim.AdamW(model.parameters()), encoder_hidden_states=text)


@program
def diffusers_text_to_image_checkpointed() -> None:
    model = conditioned()
    model.enable_gradient_checkpointing()
    text = torch.randn(4, 77, 256, device="cuda")
    denoise(model, (4, 4, 32, 32), torch.optim.AdamW(model.parameters()), encoder_hidden_states=text)


@program
def diffusers_autoencoder() -> None:
    model = diffusers.AutoencoderKL(
        block_out_channels=(64, 128), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=64, latent_channels=4, norm_num_groups=32,
    ).cuda()  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        clean = torch.randn(4, 3, 64, 64, device="cuda")
        posterior = model.encode(clean).latent_dist
        loss = nn.functional.mse_loss(model.decode(posterior.sample()).sample, clean) + 1e-6 * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def diffusers_transformer() -> None:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=6,
        attention_head_dim=64,
        in_channels=4,
        num_layers=6,
        sample_size=32,
        patch_size=2,
        out_channels=8,
    ).cuda()
    labels = torch.randint(0, 1000, (8,), device="cuda")
    denoise(model, (8, 4, 32, 32), torch.optim.AdamW(model.parameters()), class_labels=labels)


# --- transformers and peft ----------------------------------------------------------------------------------------------


def language(model: Any, count: int, length: int, optimizer: Any = None, cast: Any = None, **more: Any) -> None:
    """Three steps on random tokens; a model of `transformers` computes its own loss."""
    model.cuda().train()
    chosen = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = (optimizer or torch.optim.AdamW)(chosen)
    for _ in range(3):
        ids = torch.randint(0, model.config.vocab_size, (count, length), device="cuda")
        with torch.autocast("cuda", cast or torch.bfloat16, enabled=cast is not None):
            loss = model(input_ids=ids, labels=ids, **more).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def gpt2(**options: Any) -> Any:
    """GPT-2 with four of its twelve layers."""
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=4, n_embd=512, n_head=8, **options))


def llama(**options: Any) -> Any:
    """A Llama of 60 million weights."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=32000, **options,
        )
    )  # fmt: skip


@program
def transformers_gpt2() -> None:
    language(gpt2(), 4, 256)


@program
def transformers_gpt2_eager_attention() -> None:
    language(gpt2(attn_implementation="eager"), 4, 256, cast=torch.float16)


@program
def transformers_llama_checkpointed() -> None:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    language(model, 4, 512, cast=torch.bfloat16)


@program
def transformers_qwen3_adafactor() -> None:
    config = hf.Qwen3Config(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=30000,
    )  # fmt: skip
    language(hf.Qwen3ForCausalLM(config), 2, 512, optimizer=torch.optim.Adafactor)


@program
def transformers_bert_masked() -> None:
    config = hf.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536)
    language(hf.BertForMaskedLM(config), 16, 128)


@program
def transformers_deberta() -> None:
    config = hf.DebertaV2Config(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=32000,
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=64,
    )  # fmt: skip
    language(hf.DebertaV2ForMaskedLM(config), 8, 128)


@program
def transformers_t5() -> None:
    config = hf.T5Config(d_model=384, d_ff=1024, num_layers=4, num_heads=6, d_kv=64, decoder_start_token_id=0)
    language(hf.T5ForConditionalGeneration(config), 8, 128)


@program
def transformers_mamba() -> None:
    language(hf.MambaForCausalLM(hf.MambaConfig(hidden_size=256, num_hidden_layers=2, vocab_size=8000)), 2, 64)


@program
def transformers_whisper() -> None:
    config = hf.WhisperConfig(
        d_model=256, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=1024, decoder_ffn_dim=1024, num_mel_bins=80, max_source_positions=500, vocab_size=10000,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config).cuda()

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 80, 1000, device="cuda"), torch.randint(0, 10000, (4, 64), device="cuda")

    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        sound, text = batch()
        model(input_features=sound, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def transformers_segformer() -> None:
    model = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=20)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        labels = torch.randint(0, 20, (2, 256, 256), device="cuda")
        loss = model(pixel_values=torch.randn(2, 3, 256, 256, device="cuda"), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def transformers_clip_contrastive() -> None:
    parts = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = hf.CLIPConfig(
        text_config={**parts, "vocab_size": 10000, "max_position_embeddings": 77, "eos_token_id": 2},
        vision_config={**parts, "image_size": 224, "patch_size": 32}, projection_dim=256,
    )  # fmt: skip
    model = hf.CLIPModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids = torch.randint(3, 10000, (32, 77), device="cuda")
        model(input_ids=ids, pixel_values=torch.randn(32, 3, 224, 224, device="cuda"), return_loss=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def peft_lora_on_llama() -> None:
    config = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    language(peft.get_peft_model(llama(), config), 4, 256, cast=torch.bfloat16)


@program
def peft_dora_on_gpt2() -> None:
    config = peft.LoraConfig(r=8, use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    language(peft.get_peft_model(gpt2(), config), 4, 128)


@program
def peft_prefix_tuning() -> None:
    config = peft.PrefixTuningConfig(num_virtual_tokens=20, task_type="CAUSAL_LM")
    language(peft.get_peft_model(gpt2(), config), 4, 128)


@program
def peft_ia3_on_t5() -> None:
    config = hf.T5Config(d_model=256, d_ff=768, num_layers=3, num_heads=4, d_kv=64, decoder_start_token_id=0)
    language(
        peft.get_peft_model(hf.T5ForConditionalGeneration(config), peft.IA3Config(task_type="SEQ_2_SEQ_LM")), 8, 64
    )


# --- torchvision --------------------------------------------------------------------------------------------------------


def segment(model: nn.Module, count: int = 4, size: int = 256) -> None:
    """Train a segmentation network of torchvision: its loss is the sum of its heads'."""
    model.cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(3):
        target = torch.randint(0, 21, (count, size, size), device="cuda")
        heads = model(torch.randn(count, 3, size, size, device="cuda"))
        loss = sum(weight * nn.functional.cross_entropy(heads[name], target, ignore_index=255)
                   for name, weight in (("out", 1.0), ("aux", 0.5)) if name in heads)  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def torchvision_deeplab() -> None:
    segment(torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, aux_loss=True))


@program
def torchvision_lraspp() -> None:
    segment(torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None), count=8)


@program
def torchvision_video() -> None:
    model = torchvision.models.video.r3d_18(weights=None, num_classes=50).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(2, 3, 8, 112, 112, device="cuda"), torch.randint(0, 50, (2,), device="cuda")

    classify(model, optimizer, batch)


@program
def torchvision_swin_v2_average() -> None:
    model = torchvision.models.swin_v2_t(weights=None, num_classes=100).cuda()
    average = torch.optim.swa_utils.AveragedModel(model)
    classify(model, torch.optim.AdamW(model.parameters()), images(4, 256, classes=100))
    average.update_parameters(model)


@program
def torchvision_raft() -> None:
    model = torchvision.models.optical_flow.raft_small(weights=None).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        first, second = (torch.randn(1, 3, 128, 192, device="cuda") for _ in range(2))
        flows = model(first, second, num_flow_updates=6)
        sum((flow.abs().mean() for flow in flows), torch.zeros((), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def torchvision_detection_backbone() -> None:
    """RetinaNet's network without the matching of anchors, whose sizes depend on values."""
    net = (
        torchvision.models.detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=21)
        .cuda()
        .train()
    )
    optimizer = torch.optim.SGD([weight for weight in net.parameters() if weight.requires_grad], 0.01, momentum=0.9)
    for _ in range(2):
        maps = list(net.backbone(torch.randn(2, 3, 320, 320, device="cuda")).values())
        out = net.head(maps)
        loss = out["cls_logits"].sigmoid().mean() + out["bbox_regression"].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
