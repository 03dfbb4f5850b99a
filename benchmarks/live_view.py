"""What everything together costs: a tracked stretch in a real kernel, with the live view on, against bare stretches.

    python -m benchmarks.live_view vgg resnet transformer unet        # gpt2 where CUDA is available

CPU time of all threads of the kernel, medians and quartiles over alternating stretches in one process. No front end is
attached: what the browser does is its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

CODE = """
import statistics, time
import torch, memlab
from memlab import workloads

torch.set_num_threads(1)
step = workloads.{workload}()
for _ in range(3):
    step()
begin = time.process_time()
step()
count = max(3, int(0.6 / max(time.process_time() - begin, 1e-4)))

def stretch():
    begin = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - begin

bare, watched = [stretch()], []
for _ in range(11):
    with memlab.track("cost", show=True):
        watched.append(stretch())
    bare.append(stretch())
ratios = [w / ((a + b) / 2) for w, a, b in zip(watched, bare, bare[1:])]
import json
print(json.dumps({{"steps": count, "quartiles": statistics.quantiles(ratios, n=4)}}))
"""


def measure(workload: str) -> dict[str, Any]:
    """The quartiles of the slowdown of one workload, from a kernel of its own."""
    root = str(Path(__file__).parent.parent)
    manager, client = start_new_kernel(env={**os.environ, "PYTHONPATH": root})
    printed: list[str] = []

    def take(message: dict[str, Any]) -> None:
        if message["msg_type"] in ("stream", "error"):
            printed.append(message["content"].get("text") or message["content"]["evalue"])

    try:
        client.execute_interactive(CODE.format(workload=workload), output_hook=take, timeout=300, allow_stdin=False)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return json.loads(printed[-1])


def main() -> None:
    for workload in sys.argv[1:] or ["transformer"]:
        found = measure(workload)
        low, median, high = found["quartiles"]
        print(f"{workload}: {median:.2f} ({low:.2f} to {high:.2f}), {found['steps']} steps a stretch", flush=True)


if __name__ == "__main__":
    main()
