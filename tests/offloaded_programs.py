"""Models of which libraries decide what is on the GPU: weights that come when they are used (diffusers, accelerate), and paged
caches (transformers).

python -m offloaded_programs measured|predicted NAME...     # as JSON: the most that was allocated and reserved by each
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch


def cpu_offload() -> None:
    """Accelerate moves the weights of each layer, and drops them after it."""
    import accelerate
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4)).eval()
    accelerate.cpu_offload(model, torch.device("cuda:0"))
    with torch.no_grad():
        for _ in range(2):
            model(torch.zeros(2, 128, dtype=torch.long, device="cuda"))


def pipeline() -> Any:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    found = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler(num_train_timesteps=10))
    found.set_progress_bar_config(disable=True)
    return found


def model_cpu_offload() -> None:
    """Diffusers moves a whole model when it is its turn."""
    found = pipeline()
    found.enable_model_cpu_offload()
    found(batch_size=4, num_inference_steps=2, output_type="np")


def sequential_cpu_offload() -> None:
    """Diffusers moves layer by layer."""
    found = pipeline()
    found.enable_sequential_cpu_offload()
    found(batch_size=4, num_inference_steps=2, output_type="np")


def paged_cache() -> None:
    """Continuous batching of transformers: its pages fill most of what is free."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=8000
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    prompts = [[1] * length for length in (100, 220, 37, 512)]
    settings = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(prompts, generation_config=settings)
    assert [len(one.generated_tokens) for one in answers.values()] == [8] * 4


def measured(program: Any) -> list[int]:
    """By PyTorch's counters."""
    torch.cuda.reset_peak_memory_stats()
    program()
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def predicted(program: Any) -> list[list[int]]:
    """By memlab, for the GPU that `simulated_machines` describes: ranges, and the peak of segments placed as there."""
    import memlab

    found = memlab.predict(program, memlab.Card("GPU", 8 << 30, (8, 0), multiprocessors=108))
    return [list(found.allocated_bytes), list(found.reserved_bytes), [found.peak_allocated_bytes]]


if __name__ == "__main__":
    how, *names = sys.argv[1:]
    print(json.dumps({name: globals()[how](globals()[name]) for name in names}))
