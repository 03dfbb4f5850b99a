"""How smooth the explorer is: a million blocks in Chromium, panned and zoomed by a real mouse and wheel.

    python -m benchmarks.explorer                     # writes benchmarks/results/explorer.json
    taskset -c 0,1 python -m benchmarks.explorer 1000000     # on two cores of a larger machine

A frame is the time between two calls of requestAnimationFrame while the picture moves: it holds everything that the main thread
does in between, and is 16.7 ms at best (60 a second). `draw` is the part of it that the explorer's own code takes, `picture` the
time that the worker needs for the detail of another part, during which the last picture is moved. It needs the extra `browser`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from memlab.trace import Blocks, Device, Events, Kind, MadeBy, Trace
from memlab.views.explorer import Explorer, ExplorerRun

RESULTS = Path(__file__).parent / "results" / "explorer.json"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND"]
LAYERS, IN_LAYER = 48, 12
WATCH = """() => {
  const frames = window.frames_ms = []; let before = performance.now(); window.isWatching = true;
  const next = now => { frames.push(now - before); before = now; if (window.isWatching) requestAnimationFrame(next); };
  requestAnimationFrame(now => { before = now; requestAnimationFrame(next); });
  Object.assign(document.querySelector('.memlab-explorer').memlabExplorer, {drawMs: [], pictureMs: []});
}"""
SETTLED = """() => { const {explorer} = document.querySelector('.memlab-explorer').memlabExplorer;
  const isSettled = ({isBusy, isStale, picture}) => !isBusy && !isStale && picture && picture.view.x0 === explorer.view.x0;
  return explorer.plots.every(isSettled); }"""


def training_like(count: int) -> Trace:
    """A trace of `count` blocks: weights that stay, and steps of activations that are freed in reverse, with temporaries."""
    random, weights = np.random.default_rng(0), 2 * LAYERS
    per_step = 2 * LAYERS * IN_LAYER
    steps = max(1, (count - weights) // per_step)
    kept, ops = per_step // 2, np.empty(2 * per_step, "i8")
    # One step as numbers of its blocks, + for an allocation and - for a free: each kept block is followed by a temporary.
    for i in range(kept):
        ops[3 * i : 3 * i + 3] = i + 1, kept + i + 1, -(kept + i + 1)
    ops[3 * kept :] = -np.arange(kept, 0, -1)
    rows = np.abs(ops) - 1 + weights + per_step * np.arange(steps)[:, None]
    block = np.concatenate((np.arange(weights), rows.ravel()))
    old, new = np.full(weights, Kind.PREEXISTING), np.where(np.tile(ops, steps) > 0, Kind.ALLOC, Kind.FREE)
    total = weights + per_step * steps
    size = 512 * random.integers(1, 4000, total)
    size[:weights] = 64 << 20
    gaps = random.integers(1_000, 40_000, len(new))
    times, zero = np.concatenate((np.zeros(weights), np.cumsum(gaps))), np.zeros(len(block), "i8")
    events = Events(times, np.concatenate((old, new)), block, size[block], size[block], zero, zero, block * 512)
    inside = (np.arange(total) - weights) % per_step
    layer = np.where(np.arange(total) < weights, np.arange(total) // 2, inside % kept // IN_LAYER)
    category = np.where(np.arange(total) < weights, 1, np.where(inside < kept, 4, 7))
    blocks = Blocks.unknown(
        total, category=category, module=layer, op=inside % IN_LAYER, line=layer % 40, stack=layer % 40
    )
    texts = {
        "module": tuple(f"model.layers.{i}.mlp" for i in range(LAYERS)),
        "op": tuple(f"aten.op{i}" for i in range(IN_LAYER)),
        "line": tuple(f"train.py:{i}" for i in range(40)),
        "stack": tuple(f"train.py:{i} step\nmain.py:3 main" for i in range(40)),
    }
    made_by = MadeBy("made", (Device(0, "GPU", 80 << 30),), duration_ns=int(times[-1]))
    return Trace(events, blocks, made_by, first_row=weights, texts=texts)


def measure(page: Any, path: Path) -> dict[str, Any]:
    """Frames while the page is zoomed and panned, in milliseconds."""
    begin = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_function(
        "() => document.querySelector('.memlab-explorer').memlabExplorer.pictures > 0", timeout=120_000
    )
    found: dict[str, Any] = {"seconds_until_the_first_picture": round(time.perf_counter() - begin, 2)}
    box = page.locator("canvas").first.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 200
    page.mouse.click(x, y)
    page.wait_for_function(SETTLED)
    moves: dict[str, list[float]] = {"zoom": [], "pan": []}
    draws, pictures = [], []
    for turn in range(4):
        for name, frames in moves.items():
            page.evaluate(WATCH)
            for i in range(60):
                if name == "zoom":
                    page.mouse.wheel(0, -120 if (i < 30) == (turn % 2 == 0) else 100)
                else:
                    if i == 0:
                        page.mouse.move(x, y)
                        page.mouse.down()
                    page.mouse.move(x + 300 * np.sin(i / 6), y)
                page.wait_for_timeout(16)
            if name == "pan":
                page.mouse.up()
            page.evaluate("() => { window.isWatching = false; }")
            frames += page.evaluate("window.frames_ms")
            page.wait_for_function(SETTLED)
            draws += page.evaluate("document.querySelector('.memlab-explorer').memlabExplorer.drawMs")
            pictures += page.evaluate("document.querySelector('.memlab-explorer').memlabExplorer.pictureMs")
    both = [*moves["zoom"], *moves["pan"]]
    for name, values in {"frame": both, **moves, "draw": draws, "picture": pictures}.items():
        ordered = sorted(values)
        last = ordered[int(0.95 * (len(ordered) - 1))]
        figures = {"median": statistics.median(ordered), "p95": last, "max": ordered[-1]}
        found[f"{name}_ms"] = {what: round(value, 1) for what, value in figures.items()} | {"count": len(ordered)}
    return found


def main() -> None:
    from playwright.sync_api import sync_playwright

    results: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(), "load": [round(one, 1) for one in os.getloadavg()], "runs": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("MEMLAB_CHROMIUM", "/usr/bin/chromium"), args=FLAGS
        )
        results["chromium"] = browser.version
        for count in map(int, sys.argv[1:] or ["10000", "100000", "1000000"]):
            trace = training_like(count)
            begin, path = time.perf_counter(), Path(folder) / f"{count}.html"
            Explorer(ExplorerRun(f"{count:,} blocks", trace, 0)).save(path)
            facts = {
                "blocks": len(trace.blocks), "events": len(trace.events), "page_mib": round(path.stat().st_size / 2**20, 2),
                "seconds_to_write": round(time.perf_counter() - begin, 2),
            }  # fmt: skip
            page = browser.new_page(viewport={"width": 1300, "height": 900})
            results["runs"][count] = {**facts, **measure(page, path)}
            page.close()
            print(count, json.dumps(results["runs"][count]), flush=True)
        browser.close()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
