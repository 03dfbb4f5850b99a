"""What the answers to a user's questions take in a notebook: what is typed, and seconds until the answer stands there.

    python -m benchmarks.questions          # writes benchmarks/results/questions.json, and prints the table in docs/start.md

The model is GPT-2 small (124 million parameters, batch 8, 1,024 tokens, fp32), predicted for an RTX 4060 of 8 GB; what a cell left
is asked of a small model on the CPU. Questions about the explorer are in benchmarks/explorer.py.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

RESULTS = Path(__file__).parent / "results" / "questions.json"
SETUP = """%load_ext memlab
import memlab, torch

def make_step(batch):
    return memlab.workloads["gpt"].sized("card", batch=batch)

def step(batch=8):
    model, optimizer, data, loss = make_step(batch)()
    model.cuda(); data = [one.cuda() for one in data]
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(*data[:-1]), data[-1]).backward()
        optimizer.step()
"""
CELL = '%%memtrack --predict "RTX 4060" --name {}\nstep({})'
QUESTIONS = (
    ("what does this cell need on 8 GB", CELL.format("before", 8), "Does not fit"),
    ("make it fit 8 GB", "%memadvise before --target 7GiB", "reach"),
    ("which GPU do I need", "%memfit before", "mallest"),
    ("the largest batch", 'memlab.max_batch(lambda batch: (lambda: step(batch)), "RTX 4060")', "Largest batch"),
    ("did this change help", CELL.format("after", 2) + "\n\n%memcompare before after", "instead of"),
    (
        "what did this cell leave",
        "%memledger on\n\nkept = [torch.ones(1000, 1000) for _ in range(4)]\n\n%memledger",
        "kept",
    ),
)


def main() -> None:
    """Ask each question in one kernel, in this order."""
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=120)

    def answer(code: str) -> str:
        texts: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            texts.append(
                str(content.get("text") or content.get("data", {}).get("text/plain") or content.get("evalue", ""))
            )

        client.execute_interactive(code, timeout=600, output_hook=hook)
        return "\n".join(texts)

    rows = []
    try:
        if "rror" in (said := answer(SETUP)):
            raise RuntimeError(said)
        for question, cells, expected in QUESTIONS:
            begin_s, shown = time.monotonic(), ""
            for cell in cells.split("\n\n"):
                shown = answer(cell)
            took_s = time.monotonic() - begin_s
            is_there = expected in shown
            rows.append(
                {"question": question, "cells": cells.split("\n\n"), "seconds": round(took_s, 1), "answered": is_there}
            )
            print(
                f"| {question} | {len(cells.split(chr(10) * 2))} | {took_s:.1f} s | {'yes' if is_there else shown[-600:]} |"
            )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    RESULTS.write_text(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
