"""Calibration: measure a GPU of this machine once and store the result, which `cards.find` uses from then on.

A new process (this module, run as a script) makes a CUDA context, multiplies and convolves in the usual dtypes, and reports
its device memory at each stage. The context grows with the kernels that a program uses, so it is an interval: bare, and
after the common kernels. Where the driver does not distinguish processes (Windows, some containers) it begins at 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memlab.errors import PredictionError
from memlab.probes.counters import Nvml
from memlab.trace.file import atomic_file
from memlab.units import ByteRange, format_bytes, one_line

VERSION = 1
LIMIT_S = 300.0
_MAX_FILE = 1 << 20
_MAX_KEPT = 200
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements of one GPU with one driver and one PyTorch."""

    card: str
    capability_major: int
    capability_minor: int
    multiprocessors: int
    driver: str
    torch: str
    total_memory_bytes: int
    context_low_bytes: int
    context_high_bytes: int
    blas_workspace_bytes: int
    convolution_workspace_bytes: int
    measured_at_s: int

    def __str__(self) -> str:
        return (
            f"{self.card} (driver {self.driver}, PyTorch {self.torch}): {format_bytes(self.total_memory_bytes)} usable, "
            f"context {self.context_bytes}, cuBLAS workspace {format_bytes(self.blas_workspace_bytes)}, "
            f"cuDNN workspace up to {format_bytes(self.convolution_workspace_bytes)}"
        )

    @property
    def context_bytes(self) -> ByteRange:
        """Memory of the process outside the allocator: the bare context, and after the common kernels."""
        return ByteRange(self.context_low_bytes, self.context_high_bytes)


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


def main(arguments: Sequence[str] = ()) -> int:
    """`python -m memlab calibrate [DEVICE]`: print the result, and where it is stored."""
    try:
        print(calibrate(int(arguments[0]) if arguments else 0))
        print(f"kept in {path()}")
    except ValueError:
        print(f"calibrate takes the number of a device, got {arguments[0]!r:.80}.", file=sys.stderr)
        return 2
    except PredictionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


# --- the file ---


def path() -> Path:
    """The file of calibrations: in MEMLAB_CONFIG, else in the system's configuration folder."""
    if own := os.environ.get("MEMLAB_CONFIG"):
        return Path(own) / "calibration.json"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "memlab" / "calibration.json"


def kept() -> tuple[Calibration, ...]:
    """All calibrations of this machine; an unreadable file gives a warning and is ignored."""
    try:
        where = path()
        facts = where.stat()
    except (OSError, RuntimeError):
        return ()
    return _read_once(where, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=4)
def _read_once(where: Path, *state: int) -> tuple[Calibration, ...]:
    try:
        return read(where)
    except PredictionError as error:
        warnings.warn(f"{error} It is ignored.", stacklevel=4)
        return ()


def read(where: Path) -> tuple[Calibration, ...]:
    """The calibrations in an untrusted file: PredictionError with one line if one is invalid."""
    try:
        if where.stat().st_size > _MAX_FILE:
            raise ValueError(f"it has more than {format_bytes(_MAX_FILE)}")
        found = json.loads(where.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        entries = found.get("calibrations")
        if not isinstance(entries, list) or len(entries) > _MAX_KEPT:
            raise ValueError(f"it holds no list of at most {_MAX_KEPT} calibrations")
        return tuple(parsed(entry) for entry in entries)
    except (OSError, ValueError, RecursionError, PredictionError) as error:
        raise PredictionError(f"the calibration file {str(where)!r} cannot be used: {one_line(str(error))}.") from None


def keep(measured: Calibration) -> Path:
    """Add a calibration to the file, atomically; an unreadable file is renamed and kept."""
    where, before = path(), tuple[Calibration, ...]()
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        if where.exists():
            try:
                before = read(where)
            except PredictionError:
                where.replace(where.with_name(f"{where.name}.unreadable"))
        same = (measured.card, measured.driver, measured.torch)  # which it replaces
        others = [one for one in before if (one.card, one.driver, one.torch) != same]
        entries = [dataclasses.asdict(one) for one in [*others, measured][-_MAX_KEPT:]]
        with atomic_file(where) as file:
            file.write(json.dumps({"version": VERSION, "calibrations": entries}, indent=1).encode())
    except OSError as error:
        raise PredictionError(f"cannot keep the calibration in {str(where)!r}: {error.strerror or error}.") from None
    return where


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable(),
    "int": lambda value: type(value) is int and 0 <= value < 1 << 50,
}


def parsed(facts: Any) -> Calibration:
    """A calibration from untrusted values; PredictionError if one is out of range."""
    if not isinstance(facts, Mapping):
        raise PredictionError("a calibration must be a table of values")
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Calibration)}
    for name, kind in kinds.items():
        if not _CHECKS[kind](facts.get(name)):
            raise PredictionError(f"{name} of a calibration is {facts.get(name)!r:.80}")
    measured = Calibration(**{name: facts[name] for name in kinds})
    if not 0 <= measured.context_low_bytes <= measured.context_high_bytes < measured.total_memory_bytes:
        raise PredictionError(f"the context of {measured.card!r} does not lie within its memory")
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
