"""What runs in a prediction: two steps of transformers' Trainer, or its `generate`, on a model without weights."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from typing import Any

from memlab.errors import MemlabError
from memlab.language_models.configuration import configuration, required

DTYPES = ("bfloat16", "float16", "float32")
ATTENTION = ("sdpa", "eager")
CACHES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized")
_MOST = 1 << 24
_STEPS = 2
"""The optimizer's state is allocated in the first."""


@dataclass(frozen=True)
class _OfModel:
    """What both steps have: `model` is "hf:ORG/NAME", a folder, or a configuration of transformers, which it becomes.

    `dtype` is that of the weights. With `nf4` those of linear layers, but the last, are in 4 bits with double quantization.
    """

    model: Any
    _: dataclasses.KW_ONLY
    batch: int = 1
    nf4: bool = False
    dtype: str = "bfloat16"
    attention: str = "sdpa"
    trust_remote_code: bool = False

    def _check(self, **numbers: int | None) -> None:
        for name, number in {"batch": self.batch, **numbers}.items():
            if number is not None and (type(number) is not int or not 0 < number <= _MOST):
                raise MemlabError(f"{name} is a whole number from 1 to {_MOST:,}, got {number!r:.80}.")
        for name, chosen, known in (("dtype", self.dtype, DTYPES), ("attention", self.attention, ATTENTION)):
            if chosen not in known:
                raise MemlabError(f"{name} is {' or '.join(known)}, got {chosen!r:.80}.")
        if isinstance(self.model, str):
            object.__setattr__(self, "model", configuration(self.model, self.trust_remote_code))

    def _check_positions(self, tokens: int, what: str) -> None:
        positions = getattr(self.text, "max_position_embeddings", None)
        if isinstance(positions, int) and tokens > positions:
            raise MemlabError(f"{self.name} has {positions:,} positions, and {what} has {tokens:,} tokens.")

    @property
    def text(self) -> Any:
        """The configuration of the part that is the language model."""
        return self.model.get_text_config()

    @property
    def name(self) -> str:
        """The name of the model."""
        return str(self.model.name_or_path or self.model.model_type)

    @property
    def weights(self) -> str:
        """What the weights are, in words."""
        if self.nf4:
            return f"NF4 with double quantization, the last layer and embeddings {self.dtype}"
        return self.dtype

    def on_gpu(self) -> Any:
        """The model of transformers on the GPU, without weights; with `nf4`, layer by layer as it would be loaded."""
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                self.model, dtype=getattr(torch, self.dtype), attn_implementation=self.attention,
                trust_remote_code=self.trust_remote_code,
            )  # fmt: skip
        quantizer = None
        if self.nf4:
            bits = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=getattr(torch, self.dtype),
            )  # fmt: skip
            quantizer = transformers.quantizers.AutoHfQuantizer.from_config(bits)
            quantizer.preprocess_model(model, device_map=None)
            model.hf_quantizer = quantizer  # which from_pretrained sets
        made: dict[int, Any] = {}  # tied weights stay tied
        for module in model.modules():
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                if id(tensor) not in made:
                    made[id(tensor)] = self._loaded(tensor)
                setattr(module, name, made[id(tensor)])
        if quantizer is not None:
            quantizer.postprocess_model(model)
        return model

    def _loaded(self, tensor: Any) -> Any:
        """A tensor of the meta device on the GPU, as from_pretrained loads it."""
        import torch

        if hasattr(tensor, "quant_state"):  # of bitsandbytes, which quantizes it as it arrives
            whole = torch.empty(tensor.shape, dtype=getattr(torch, self.dtype))
            return type(tensor)(whole, requires_grad=False, **tensor.__dict__).to("cuda")
        there = torch.empty_like(tensor, device="cuda")
        return torch.nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else there


@dataclass(frozen=True)
class TrainingStep(_OfModel):
    """Two steps of transformers' Trainer on sequences of `tokens` without padding; with `lora`, of adapters of that rank.

    Adapters are on all linear layers but the last. `optimizer` is a name that TrainingArguments knows as `optim`. Operators run
    in bfloat16 (autocast), in float16 if that is the `dtype`.
    """

    tokens: int = 2048
    lora: int | None = None
    optimizer: str = "adamw_torch_fused"
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        transformers, *_ = required(
            "transformers", "accelerate", *_packages(self.nf4), *(("peft",) if self.lora else ())
        )
        self._check(tokens=self.tokens, lora=self.lora)
        self._check_positions(self.tokens, "a sequence")
        known = [str(one.value) for one in transformers.training_args.OptimizerNames]
        if self.optimizer not in known:
            raise MemlabError(
                f"optimizer is one that the Trainer knows, got {self.optimizer!r:.80}: {', '.join(known)}."
            )
        if self.nf4 and self.lora is None:
            raise MemlabError("weights in NF4 are not trained: give the rank of adapters too, --lora 16 (lora=16).")

    @property
    def scores(self) -> tuple[int, ...]:
        """The numbers of elements that logits have: of all positions, and without the last."""
        return tuple(self.batch * count * self.text.vocab_size for count in (self.tokens, self.tokens - 1) if count)

    @property
    def settings(self) -> dict[str, str]:
        """What is predicted, in words: what was not asked for too."""
        rank = f"LoRA of rank {self.lora} on all linear layers but the last" if self.lora else "full fine-tuning"
        autocast = "float16" if self.dtype == "float16" else "bfloat16"
        return {
            "training": f"{rank}, two steps of transformers' Trainer (autocast to {autocast})",
            "weights": self.weights,
            "batch": f"{self.batch} x {self.tokens:,} tokens, without padding",
            "optimizer": self.optimizer,
            "gradient checkpointing": "on" if self.gradient_checkpointing else "off",
            "attention": self.attention,
        }

    def __call__(self) -> None:
        """Train, on the device "cuda"."""
        import accelerate
        import torch
        import transformers

        model = self.on_gpu()
        recompute = {"use_reentrant": False}
        if self.lora is not None:
            import peft

            if self.nf4:
                model = peft.prepare_model_for_kbit_training(model, self.gradient_checkpointing, recompute)
            adapters = peft.LoraConfig(r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, adapters)
        accelerate.state.check_cuda_p2p_ib_support = lambda: True  # it would start nvidia-smi, in this child process
        is_half = self.dtype == "float16"
        settings = transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(), per_device_train_batch_size=self.batch, max_steps=_STEPS,
            bf16=not is_half, fp16=is_half, optim=self.optimizer,
            gradient_checkpointing=self.gradient_checkpointing, gradient_checkpointing_kwargs=recompute,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        row = torch.ones(self.tokens, dtype=torch.long)
        sequences = [{"input_ids": row, "labels": row}] * (_STEPS * self.batch)
        trainer = transformers.Trainer(model, settings, train_dataset=sequences)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


@dataclass(frozen=True)
class Generation(_OfModel):
    """`generate` of transformers, greedily: the prompt at once (prefill), then token by token (decode) up to `context`.

    All sequences have the same length. `cache` holds the keys and values, as `cache_implementation` of `generate`.
    """

    context: int = 4096
    new_tokens: int = 8
    cache: str = "dynamic"

    def __post_init__(self) -> None:
        required("transformers", *_packages(self.nf4))
        self._check(context=self.context, new_tokens=self.new_tokens)
        self._check_positions(self.context, "the context")
        if self.cache not in CACHES:
            raise MemlabError(f"cache is one of {', '.join(CACHES)}, got {self.cache!r:.80}.")
        if self.new_tokens >= self.context:
            raise MemlabError(f"new_tokens is less than the context of {self.context:,}, got {self.new_tokens:,}.")

    @property
    def scores(self) -> tuple[int, ...]:
        """The number of elements that logits have: of the last position."""
        return (self.batch * self.text.vocab_size,)

    @property
    def settings(self) -> dict[str, str]:
        """What is predicted, in words: what was not asked for too."""
        prompt = self.context - self.new_tokens
        return {
            "inference": f"generate of transformers, {self.cache} cache; servers such as vLLM reserve theirs by other rules",
            "weights": self.weights,
            "batch": f"{self.batch} x {self.context:,} tokens: prompts of {prompt:,}, then {self.new_tokens:,} one by one",
            "attention": self.attention,
        }

    def __call__(self) -> None:
        """Generate, on the device "cuda"."""
        import torch

        model = self.on_gpu().eval()
        prompt = torch.ones(self.batch, self.context - self.new_tokens, dtype=torch.long, device="cuda")
        cache = {} if self.cache == "dynamic" else {"cache_implementation": self.cache}
        written = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=self.new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0, **cache,
        )  # fmt: skip
        if written.shape[1] != self.context:
            raise MemlabError(f"generate ended after {written.shape[1]:,} of {self.context:,} tokens")


def _packages(nf4: bool) -> tuple[str, ...]:
    return ("accelerate", "bitsandbytes") if nf4 else ()
