"""What the answers to a user's questions take in a notebook: what is typed, and seconds until the answer stands there.

    python -m benchmarks.questions          # writes benchmarks/results/questions.json, and prints the table in docs/start.md

The model is GPT-2 small (124 million parameters, batch 8, 1,024 tokens, fp32), predicted for an RTX 4060 of 8 GB; the last four
questions are asked of a small model on the CPU. Seconds are those of the clock, which other work on the machine adds to, and of the
processors, of the kernel and the children that ended. The same questions by clicks are in benchmarks/explorer.py.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
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

net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
history = []

def train(steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        output = net(torch.randn(512, 512))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(output)
"""
CELL = '%%memtrack --predict "RTX 4060" --name {}\nstep({})'
QUESTIONS = (
    ("what does this cell need on 8 GB", CELL.format("before", 8), "Does not fit"),
    ("make it fit 8 GB", "%memadvise before --target 7GiB", "reach"),
    ("which GPU do I need", "%memfit before", "mallest"),
    ("the largest batch", 'memlab.max_batch(lambda batch: (lambda: step(batch)), "RTX 4060")', "Largest batch"),
    ("did this change help", CELL.format("after", 2) + "\n\n%memcompare before after", "instead of"),
    (
        "which layer holds the peak",
        "%%memtrack --quiet --name layers\ntrain(1)\n\nmemlab.runs['layers'].modules()",
        "net",
    ),
    ("which line leaks", "%%memtrack --quiet --lines --name leak\ntrain(6)\n\nmemlab.runs['leak'].leaks()", "Grows by"),
    ("what keeps this tensor alive", "%memwho history", "history"),
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

    def processor_s() -> float:
        times = kernel.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)

    rows, kernel = [], psutil.Process(manager.provisioner.pid)
    try:
        if "rror" in (said := answer(SETUP)):
            raise RuntimeError(said)
        for question, cells, expected in QUESTIONS:
            begin_s, used_s, shown = time.monotonic(), processor_s(), ""
            for cell in cells.split("\n\n"):
                shown = answer(cell)
            took_s, used_s = time.monotonic() - begin_s, processor_s() - used_s
            is_there, count = expected in shown, len(cells.split("\n\n"))
            seconds = {"seconds": round(took_s, 1), "processor_seconds": round(used_s, 1)}
            rows.append({"question": question, "cells": cells.split("\n\n"), **seconds, "answered": is_there})
            print(f"| {question} | {count} | {took_s:.1f} | {used_s:.1f} | {'yes' if is_there else shown[-600:]} |")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    RESULTS.write_text(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
