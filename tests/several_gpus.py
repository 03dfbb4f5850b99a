"""Programs on two GPUs, and their peaks on each: measured on a simulated machine, or predicted.

python tests/several_gpus.py measured|predicted|fitted NAME     # prints JSON: [allocated, reserved] of each GPU
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memlab
from memlab.units import GiB

FIRST, SECOND = "cuda:0", "cuda:1"
CAPABILITY = (8, 0)
CARD = memlab.Card("a card", 8 * GiB, CAPABILITY, 0, 8 * GiB, 8 * GiB, 108)
Steps = Callable[[], None]


class Stages(nn.Module):
    """Naive model parallelism: one part on each GPU, and what the first makes is copied to the second."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first.to(FIRST), second.to(SECOND)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(FIRST)).to(SECOND))


def layers(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.GELU())))


def mlp() -> None:
    model = Stages(layers(512, 2048, 512), layers(512, 1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(torch.randn(300, 512)), torch.randint(10, (300,), device=SECOND))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


class Tokens(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(count)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Head(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(count))
        )
        self.out = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(x))


def transformer() -> None:
    model = Stages(Tokens(256, 2), Head(256, 3))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        ids = torch.randint(1000, (8, 65))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten().to(SECOND))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def tied() -> None:
    """The table of the first GPU is also the last layer on the second, to which it is copied, transposed and in halves."""
    table = nn.Embedding(4000, 384, device=FIRST)
    middle = layers(384, 1536, 384).to(SECOND)
    optimizer = torch.optim.AdamW([*table.parameters(), *middle.parameters()])
    for _ in range(3):
        ids = torch.randint(4000, (2000,), device=FIRST)
        h = middle(table(ids).to(SECOND))
        logits = h.half() @ table.weight.t().to(SECOND, torch.float16)
        loss = nn.functional.cross_entropy(logits.float(), ids.to(SECOND))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def mixed_precision() -> None:
    model = Stages(layers(512, 1024, 512), layers(512, 2048, 16))
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(500, 512)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class Scaled(torch.autograd.Function):
    """Backward makes a tensor on "cuda": on the GPU of the thread that runs it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.full(grad.shape, 2.0, device="cuda")


def current_device() -> None:
    """The current GPU and its streams, checkpoints, copies into slices, and functions that ask for "cuda" in backward."""
    second = layers(256, 1024, 256).cuda(1)
    with torch.cuda.device(0):
        first = layers(256, 512, 256).cuda()
        beside = torch.cuda.Stream()
    for _ in range(3):
        torch.cuda.set_device(1)
        with torch.cuda.stream(beside):
            x = torch.randn(400, 256, device="cuda", requires_grad=True)
            elsewhere = torch.empty(3000, 300, device=SECOND)
        torch.cuda.default_stream(0).wait_stream(beside)
        x.record_stream(torch.cuda.default_stream(0))
        h = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False)
        batch = torch.zeros(2, 400, 256, device="cuda")
        batch[0].copy_(h.t().contiguous().t())
        y = Scaled.apply(torch.utils.checkpoint.checkpoint(second, batch, use_reentrant=False))
        torch.cuda.set_device(0)
        y.square().sum().backward()
        torch.cuda.empty_cache()
        del x, elsewhere, h, batch, y


def gpt2() -> Any:
    from third_party.hugging_face import hf

    config = hf.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=500, n_positions=64)
    return hf.GPT2LMHeadModel(config)


PLACES = {"transformer.wte": 0, "transformer.wpe": 0, "transformer.drop": 0, "transformer.h.0": 0, "transformer.h.1": 0,
          "transformer.h.2": 1, "transformer.h.3": 1, "transformer.ln_f": 1, "lm_head": 0}  # fmt: skip


def train(model: Any, ids: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def dispatched() -> None:
    from accelerate import dispatch_model

    train(dispatch_model(gpt2(), device_map=PLACES), torch.randint(500, (4, 64), device=FIRST))


def device_map() -> None:
    """Loaded on its GPUs by transformers, which shares them out itself."""
    from third_party.hugging_face import hf

    with tempfile.TemporaryDirectory() as folder:
        gpt2().save_pretrained(folder)
        model = hf.GPT2LMHeadModel.from_pretrained(folder, device_map="balanced")
    train(model, torch.randint(500, (4, 64), device=FIRST))


PROGRAMS: dict[str, Steps] = {
    one.__name__: one for one in (mlp, transformer, tied, mixed_precision, current_device, dispatched, device_map)
}


def measured(step: Steps) -> list[list[int]]:
    step()
    return [[torch.cuda.max_memory_allocated(number), torch.cuda.max_memory_reserved(number)] for number in range(2)]


def predicted(step: Steps) -> list[list[int]]:
    """As the allocators of the GPUs count, without the range that a prediction adds to *reserved*."""
    devices = memlab.predict(step, CARD, devices=2).trace.made_by.devices
    return [[one.end_peak_allocated_bytes, one.end_peak_reserved_bytes] for one in devices]


def fitted(step: Steps) -> list[Any]:
    """The peaks of a tracked run, and the least of *reserved* that it needs on a card."""
    with memlab.track(live=False, show=False) as run:
        peaks = measured(step)
    (row,) = memlab.fit(run, on=[CARD]).rows
    return [*peaks, row.needs_bytes.low - CARD.context_bytes.low]


if __name__ == "__main__":
    way = {"measured": measured, "predicted": predicted, "fitted": fitted}[sys.argv[1]]
    print(json.dumps(way(PROGRAMS[sys.argv[2]])))
