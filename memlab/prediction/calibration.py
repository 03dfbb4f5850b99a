"""Calibration: measure a GPU of this machine once and store the result, which `cards.find` uses from then on.

A new process (this module, run as a script) makes a CUDA context, multiplies and convolves in the usual dtypes, and reports
its device memory at each stage. The context grows with the kernels that a program uses, so it is an interval: bare, and
after the common kernels. Where the driver does not distinguish processes (Windows, some containers) it begins at 0.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.errors import PredictionError
from memlab.prediction.calibration_file import Calibration, keep, parsed
from memlab.probes.counters import Nvml
from memlab.units import one_line

LIMIT_S = 300.0
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def calibrate(device: int = 0) -> Calibration:
    """Measure a GPU of this machine in a new process, store the result for predictions, and return it."""
    if not (torch.backends.cuda.is_built() and torch.cuda.is_available()):
        raise PredictionError("calibrate needs a GPU that PyTorch can use, and this machine has none.")
    command = [sys.executable, "-m", "memlab.prediction.calibration", str(device)]
    ours = str(Path(__file__).resolve().parents[2])  # this memlab, first on the new process's path
    paths = os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PredictionError(f"the calibration did not end well: {one_line(str(error))}") from None
    try:
        facts = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise PredictionError(f"the calibration failed: {one_line(last)}") from None
    measured = parsed(facts)
    keep(measured)
    return measured


# --- in the new process ---


def measure(index: int) -> dict[str, Any]:
    """The facts of `Calibration` about one device, whose context this process makes."""
    torch.cuda.set_device(index)
    held = torch.empty(1, device="cuda")
    with Nvml.open() as nvml:
        bare = _beside_allocator(nvml, index)
        blas = _taken(_multiply)
        conv = max(_taken(functools.partial(_convolve, dtype)) for dtype in _TYPES)
        for dtype in _TYPES:
            try:
                _train_a_little(dtype)
            except RuntimeError:  # a GPU without this dtype
                continue
        used = _beside_allocator(nvml, index)
    del held
    properties = torch.cuda.get_device_properties(index)
    return {
        "card": properties.name,
        "capability_major": properties.major,
        "capability_minor": properties.minor,
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "torch": torch.__version__,
        "total_memory_bytes": properties.total_memory,
        "context_low_bytes": bare[0],
        "context_high_bytes": max(used[1], bare[1]),
        "blas_workspace_bytes": blas,
        "convolution_workspace_bytes": conv,
        "measured_at_s": int(time.time()),
    }


def _beside_allocator(nvml: Nvml, index: int) -> tuple[int, int]:
    """Memory of this process outside PyTorch's allocator (context, kernels, libraries): lower and upper bound."""
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved(index)
    reading = nvml.read(index)
    if reading.own_bytes is not None:
        own = max(reading.own_bytes - reserved, 0)
        return own, own
    free, total = torch.cuda.mem_get_info(index)
    return 0, max(total - free - reserved, 0)  # including other processes


def _taken(work: Callable[[], int]) -> int:
    """The peak of a function's scratch memory: allocated minus its own tensors, whose bytes it returns."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    own = work()
    return max(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - own, 0)


def _multiply() -> int:
    factor = torch.ones(16, 16, device="cuda")
    return factor.nbytes + torch.mm(factor, factor).nbytes


def _convolve(dtype: torch.dtype) -> int:
    try:
        image = torch.ones(16, 64, 56, 56, device="cuda", dtype=dtype)
        weight = torch.ones(64, 64, 3, 3, device="cuda", dtype=dtype)
        result = nn.functional.conv2d(image, weight, padding=1)
    except RuntimeError:  # a GPU without this dtype, a cuDNN without a plan for it
        return 1 << 62
    return image.nbytes + weight.nbytes + result.nbytes


def _train_a_little(dtype: torch.dtype) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 15 * 15, 32),
        nn.LayerNorm(32), nn.GELU(), nn.Dropout(), nn.Linear(32, 10),
    ).to("cuda", dtype)  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters())
    images = torch.ones(4, 3, 32, 32, device="cuda", dtype=dtype)
    nn.functional.cross_entropy(net(images), torch.zeros(4, dtype=torch.long, device="cuda")).backward()
    optimizer.step()
    heads = torch.ones(1, 2, 64, 32, device="cuda", dtype=dtype, requires_grad=True)
    nn.functional.scaled_dot_product_attention(heads, heads, heads).sum().backward()


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver library, an old one, or ROCm: use the runtime's version
        return str(torch.version.cuda or torch.version.hip or "unknown")


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
