"""Two training steps of each model on either side: `python -m third_party.run_steps native|fake|inside MODULE OUTPUT [NAME...]`.

`inside` is fake CUDA where the libraries are imported within it, too. Writes a JSON: model -> [peak of bytes in blocks of
512, events] or "!error".
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from fake_gpus import card

CUBLAS, CUBLASLT = 8_519_680, 1031 * 1024
"""Workspaces of cuBLAS and, before PyTorch 2.12, of cuBLASLt, which `memlab.prediction.workspaces` adds. The latter would be 1 MiB,
as tensors are: this size is none of theirs."""


def steps(make: Any, low: bool) -> None:
    model, batch = make()
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            loss = model(**batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def native(make: Any, low: bool) -> list[int]:
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=400_000, clear_history=True)
    steps(make, low)
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    signs = {"alloc": 1, "free_requested": -1}
    return [signs[one["action"]] * one["size"] for one in entries if one["action"] in signs]


def fake(make: Any, low: bool) -> list[int]:
    from memlab.trace.columns import Kind

    make()  # libraries are loaded before, as by the first cells of a notebook
    with faking() as on:
        steps(make, low)
        columns = on.log.columns()
    return [int(s) if k == Kind.ALLOC else -int(s) for k, s in zip(columns["kind"], columns["nbytes"], strict=True)]


def faking() -> Any:
    from memlab.fake_cuda import FakeCuda

    return FakeCuda(card(capability=(8, 0), multiprocessors=108))


def inside(module: str, names: tuple[str, ...]) -> dict[str, Any]:
    with faking() as on:
        models = importlib.import_module(f"third_party.{module}").MODELS
        found = {}
        for name in names:
            before = len(on.log)
            steps(models[name], low=True)
            found[name] = [int(on.log.allocator.peak_allocated_bytes), len(on.log) - before]
    return found


def peak(events: list[int]) -> int:
    now = most = 0
    for event in events:
        nbytes = -(-abs(event) // 512) * 512
        now += nbytes if event > 0 else -nbytes
        most = max(most, now)
    return most


def main(side: str, module: str, output: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = str(CUBLASLT // 1024)  # PyTorch reads it at the first product
    if side == "inside":
        Path(output).write_text(json.dumps(inside(module, names)), encoding="utf-8")
        return
    run = native if side == "native" else fake
    found: dict[str, Any] = {}
    models = importlib.import_module(f"third_party.{module}").MODELS
    for name, low in itertools.product(names or models, (False, True)):
        try:
            events = [one for one in run(models[name], low) if abs(one) not in (CUBLAS, CUBLASLT)]
            what: Any = [peak(events), len(events)]
        except Exception as error:
            what = f"!{type(error).__name__}: {str(error)[:300]}"
        found[f"{name}{' bf16' if low else ''}"] = what
    Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
