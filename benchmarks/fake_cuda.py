"""What fake CUDA costs: whole predictions as multiples of a bare FakeTensorMode forward and backward in the same run.

    python -m benchmarks.fake_cuda                  # one process per model, a table
    python -m benchmarks.fake_cuda --model "llama 8B"

A prediction builds the model, moves it to "cuda", runs forward, backward and an optimizer's step, twice; beside it stand one
forward and backward within it, and the host memory that it took. The bare one runs the same forward and backward of a model
that was built under FakeTensorMode, without a card and without a log. Both are the best of a few.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.programs.language import Gpt, LlamaLayer
from benchmarks.programs.vision import resnet50
from memlab.fake_cuda import FakeCuda

RESULTS = Path(__file__).parent / "results" / "fake_cuda.json"
CARD = SimpleNamespace(
    name="a very large card", total_bytes=4 << 40, usable_bytes=4 << 40, compute_capability=(9, 0), context_bytes=(0, 0),
    multiprocessors=132,
)  # fmt: skip


class Llama(nn.Module):
    """A Llama of any size."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, words: int = 128_256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, 8, hidden) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x: Any = self.embed(ids)
        size: Any = self.layers[0].size
        turn = (x.new_ones(ids.shape[1], size), x.new_ones(ids.shape[1], size))
        for layer in self.layers:
            x = layer(x, turn)
        return self.head(self.norm(x))


def ids(device: str, batch: int, length: int, words: int) -> torch.Tensor:
    return torch.randint(words, (batch, length), device=device)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[str], torch.Tensor]]] = {
    "gpt-2 small": (lambda: Gpt(768, 12, 12, 50_257, 1024), lambda device: ids(device, 8, 1024, 50_257)),
    "resnet-50": (resnet50, lambda device: torch.randn(32, 3, 224, 224, device=device)),
    "llama 8B": (lambda: Llama(4096, 32, 32, 14_336), lambda device: ids(device, 1, 2048, 128_256)),
    "llama 70B": (lambda: Llama(8192, 80, 64, 28_672), lambda device: ids(device, 1, 2048, 128_256)),
}


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).float().square().mean().backward()


def bare(name: str, rounds: int) -> list[float]:
    """Forward and backward under FakeTensorMode."""
    build, batch = MODELS[name]
    with FakeTensorMode():
        model, inputs = build(), batch("cpu")
        return [timed(lambda: step(model, inputs)) for _ in range(rounds)]


def predicted(name: str) -> dict[str, float]:
    """A whole prediction, and one forward and backward within it."""
    build, batch = MODELS[name]
    start = time.perf_counter()
    with FakeCuda(CARD) as fake:
        model = build().to("cuda")
        built_s = time.perf_counter() - start
        optimizer = torch.optim.AdamW(model.parameters())
        steps = []
        for _ in range(2):
            inputs = batch("cuda")
            steps.append(timed(functools.partial(step, model, inputs)))
            optimizer.step()
            optimizer.zero_grad()
        events = len(fake.log)
        peak = fake.log.allocator.peak_allocated_bytes
    whole_s = time.perf_counter() - start
    return {
        "whole_s": whole_s,
        "built_s": built_s,
        "step_s": min(steps),
        "events": events,
        "peak_allocated_bytes": peak,
    }


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Both in this process: what is loaded late is loaded before."""
    with FakeCuda(CARD):
        nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda")).sum().backward()
    resting = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runs = [predicted(name) for _ in range(rounds)]
    extra_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resting) / 1024
    bare_s = min(bare(name, rounds + 1))
    best = min(runs, key=lambda run: run["whole_s"])
    return {
        "model": name, "torch": torch.__version__, "bare_s": bare_s, **best, "step_multiple": best["step_s"] / bare_s,
        "whole_multiple": best["whole_s"] / bare_s, "extra_mib": extra_mib,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    wanted = parser.parse_args()
    if wanted.model:
        print(json.dumps(measure(wanted.model, wanted.rounds)))
        return
    print(
        f"{'model':12s} {'bare fwd+bwd':>13s} {'fake fwd+bwd':>16s} {'':>7s} {'whole':>8s} {'':>7s} {'extra':>9s}  events"
    )
    found = []
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.fake_cuda", "--model", name, "--rounds", str(wanted.rounds)]
        one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        found.append(one)
        print(
            f"{name:12s} {one['bare_s']:11.2f} s {one['step_s']:14.2f} s {one['step_multiple']:6.2f}x {one['whole_s']:6.2f} s "
            f"{one['whole_multiple']:6.2f}x {one['extra_mib']:5.0f} MiB  {one['events']}",
            flush=True,
        )
    if wanted.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
