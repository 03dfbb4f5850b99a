"""Run in a fresh process by `calibration`: makes a CUDA context, uses the common kernels, prints what they took as JSON.

What this process has of the device is asked of the driver; less what PyTorch's allocator reserved it is the context with
the kernels and libraries loaded so far.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from memlab.probes.nvml import Nvml

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def measure(index: int) -> dict[str, Any]:
    """The facts of `Calibration` about one device."""
    torch.cuda.set_device(index)
    held = torch.empty(1, device="cuda")
    with Nvml.open() as nvml:
        bare = _beside_allocator(nvml, index)
        blas = _taken(_multiply)
        conv = max(_taken(functools.partial(_convolve, dtype)) for dtype in _TYPES)
        _train_a_little()
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
    """What this process has beside PyTorch's allocator, at least and at most."""
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved(index)
    reading = nvml.read(index)
    if reading.own_bytes is not None:
        own = max(reading.own_bytes - reserved, 0)
        return own, own
    free, total = torch.cuda.mem_get_info(index)
    return 0, max(total - free - reserved, 0)  # with what other processes hold


def _taken(work: Callable[[], int]) -> int:
    """How much more than its own tensors a work asked PyTorch's allocator for at once; it returns what those are."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    own = work()
    return max(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - own, 0)


def _multiply() -> int:
    factor = torch.ones(16, 16, device="cuda")
    return factor.nbytes + torch.mm(factor, factor).nbytes


def _convolve(dtype: torch.dtype) -> int:
    """A convolution as in the first stage of a ResNet."""
    try:
        image = torch.ones(16, 64, 56, 56, device="cuda", dtype=dtype)
        weight = torch.ones(64, 64, 3, 3, device="cuda", dtype=dtype)
        result = torch.nn.functional.conv2d(image, weight, padding=1)
    except RuntimeError:  # a card without this type, a cuDNN without a plan for it
        return 1 << 62
    return image.nbytes + weight.nbytes + result.nbytes


def _train_a_little() -> None:
    """Loads the kernels of an ordinary training step, as far as the card has them."""
    for dtype in _TYPES:
        try:
            net = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
                torch.nn.Flatten(), torch.nn.Linear(8 * 15 * 15, 32), torch.nn.LayerNorm(32), torch.nn.GELU(),
                torch.nn.Dropout(), torch.nn.Linear(32, 10),
            ).to("cuda", dtype)  # fmt: skip
            optimizer = torch.optim.AdamW(net.parameters())
            target = torch.zeros(4, dtype=torch.long, device="cuda")
            torch.nn.functional.cross_entropy(
                net(torch.ones(4, 3, 32, 32, device="cuda", dtype=dtype)), target
            ).backward()
            optimizer.step()
            heads = torch.ones(1, 2, 64, 32, device="cuda", dtype=dtype, requires_grad=True)
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).sum().backward()
        except RuntimeError:
            continue
    torch.cuda.synchronize()


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver library, an old one, ROCm: the runtime's version says as much
        return str(torch.version.cuda or torch.version.hip or "unknown")


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
