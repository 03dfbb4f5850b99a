"""Two steps of programs under `torch.compile`, and what they took.

python -m compiled_programs measured|alone|predicted NAME...     # as JSON: the most that was allocated and reserved by each
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(y), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1, self.training)


class Model(nn.Module):
    """A language model that returns its loss; the number of tokens is no multiple of 8."""

    def __init__(self, layers: int = 2, width: int = 256, tokens: int = 1003) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, x: Any, y: Any) -> Any:
        found = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        return F.cross_entropy(self.head(self.norm(found)).flatten(0, 1), y.flatten())


def ids() -> Any:
    return torch.zeros(4, 256, dtype=torch.long, device="cuda")


GRAPHS: Any = {"mode": "reduce-overhead", "steps": 3}  # warms up, is captured, is replayed


def language(half: bool = False, steps: int = 2, **settings: Any) -> None:
    model = torch.compile(Model().cuda(), **settings)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            loss = model(ids(), ids())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def language_half() -> None:
    language(half=True)


def language_in_graphs() -> None:
    language(half=True, **GRAPHS)


def inference(steps: int = 2, **settings: Any) -> None:
    model = torch.compile(Model().cuda().eval(), **settings)
    with torch.no_grad():
        for _ in range(steps):
            model(ids(), ids())


def inference_in_graphs() -> None:
    inference(**GRAPHS)


def convolutions(in_place: bool = False, steps: int = 2, **settings: Any) -> None:
    layers = (
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.BatchNorm2d(64),
    )
    model = nn.Sequential(*layers, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 32 * 32, 10)).cuda()
    if in_place:
        model.compile()
    else:
        model = torch.compile(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss = F.cross_entropy(
            model(torch.randn(32, 3, 64, 64, device="cuda")), torch.zeros(32, dtype=torch.long, device="cuda")
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def in_place() -> None:
    """Modules of torch.nn alone: nothing is compiled."""
    convolutions(in_place=True)


def convolutions_in_graphs() -> None:
    convolutions(**GRAPHS)


def function(steps: int = 2, **settings: Any) -> None:
    @torch.compile(**settings)
    def scores(x: Any, weight: Any) -> Any:
        return torch.softmax((x @ weight).relu() * 2 + 1, -1) @ weight.t()

    weight = torch.randn(512, 2048, device="cuda", requires_grad=True)
    for _ in range(steps):
        scores(torch.randn(4096, 512, device="cuda"), weight).sum().backward()
        weight.grad = None


def function_in_graphs() -> None:
    function(**GRAPHS)


def checkpoints() -> None:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)
    ).cuda()

    @torch.compile
    def forward(x: Any) -> Any:
        for number, layer in enumerate(layers):
            x = checkpoint(layer, x, use_reentrant=number == 0)
        return x

    for _ in range(2):
        forward(torch.randn(2048, 512, device="cuda", requires_grad=True)).sum().backward()


def keeps_products(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> None:
    """A checkpoint that keeps its matrix products."""
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)
    ).cuda()
    contexts = functools.partial(create_selective_checkpoint_contexts, keeps_products)

    @torch.compile
    def forward(x: Any) -> Any:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x

    for _ in range(2):
        forward(torch.randn(2048, 512, device="cuda", requires_grad=True)).sum().backward()


class Broken(nn.Module):
    """Blocks with something between them that ends a graph."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.second, self.between = Block(256, 4), Block(256, 4), between

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(x)))


def broken(between: Any, steps: int = 2, **settings: Any) -> None:
    model = torch.compile(Broken(between).cuda(), **settings)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 512, 256, device="cuda")).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _prints(x: Any) -> Any:
    print("a block", file=sys.stderr)
    return x * 2


def _reads(x: Any) -> Any:
    return x * min(x.abs().mean().item() + 1, 1)


def _branches(x: Any) -> Any:
    if x.sum() > 0:
        return torch.tanh(x) * 2
    return torch.tanh(x) * 3


@torch.compiler.disable
def _disabled(x: Any) -> Any:
    return torch.sigmoid(x * 2) * x


def prints() -> None:
    broken(_prints)


def reads() -> None:
    broken(_reads)


def branches() -> None:
    broken(_branches)


def disabled() -> None:
    broken(_disabled)


class Cast(nn.Linear):
    """A layer that casts its weights itself, by several of the methods for that."""

    def forward(self, x: Any) -> Any:
        y = F.linear(x, self.weight.to(x.dtype), self.bias.to(dtype=x.dtype))
        return (y.float() * self.bias.type_as(y)).to(x) if y.get_device() == 0 else y


def casts() -> None:
    model = torch.compile(nn.Sequential(Cast(512, 1024), nn.GELU(), Cast(1024, 512)).cuda(), fullgraph=True)
    for _ in range(2):
        model(torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)).float().pow(2).mean().backward()


def prints_in_graphs() -> None:
    broken(_prints, **GRAPHS)


class Shared(nn.Module):
    """A layer that two graphs use; the second gets what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Cast(512, 512)

    def forward(self, x: Any) -> Any:
        return torch.sigmoid(self.layer(_prints(torch.tanh(self.layer(x))).relu())).pow(2).mean()


def shared() -> None:
    model = torch.compile(Shared().cuda())
    for _ in range(2):
        model(torch.randn(4096, 512, device="cuda")).backward()


class Norms(nn.Module):
    """Blocks that are normalized as in today's language models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Any) -> Any:
        x = x + self.down(F.relu(self.up(F.rms_norm(x, (512,)))).square())
        return 15 * torch.tanh(self.norm(x).float() / 15)


@torch.compile
def update(weight: Any, grad: Any, mean: Any, square: Any, step: Any, rate: Any) -> None:
    """A step of Adam that returns nothing, with settings on the host."""
    mean.lerp_(grad, 0.1)
    square.lerp_(grad.square(), 0.001)
    found = (square / (1 - 0.999**step)).sqrt() + 1e-8
    weight.add_(-(rate / (1 - 0.9**step)) * mean / found)


def norms() -> None:
    model = torch.compile(Norms().cuda().bfloat16())
    state = {one: (torch.zeros_like(one), torch.zeros_like(one)) for one in model.parameters()}
    for number in range(1, 3):
        model(torch.randn(8, 512, 512, device="cuda", dtype=torch.bfloat16)).pow(2).mean().backward()
        with torch.no_grad():
            for one, kept in state.items():
                update(one, one.grad, *kept, torch.tensor(float(number)), torch.tensor(0.01))
        model.zero_grad()


def measured(name: str) -> list[int]:
    """By PyTorch's counters."""
    globals()[name]()
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def measured_alone(*names: str) -> list[list[int]]:
    """Each in a process of its own, which has what all of them import."""
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_heuristics  # noqa: F401

    def child() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("fork"))  # CUDA is not initialized yet

    return [child().submit(measured, name).result() for name in names]


def predicted(name: str) -> list[int]:
    """By memlab, for the GPU that `simulated_machines` describes."""
    import memlab

    found = memlab.predict(globals()[name], memlab.Card("GPU", 8 << 30, (8, 0), multiprocessors=108))
    assert not [one for one in found.assumptions if "as eager" in one], found.assumptions
    return [found.peak_allocated_bytes, found.peak_reserved_bytes]


if __name__ == "__main__":
    how, *names = sys.argv[1:]
    found = measured_alone(*names) if how == "alone" else [globals()[how](name) for name in names]
    print(json.dumps(dict(zip(names, found, strict=True))))
