"""The symbols of CUDA's libraries: those that PyTorch imports, by version (csrc/symbols.txt), and how they are recognized."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu.elf import Linkage

_SYMBOL = re.compile(
    r"_*cuda|cu[A-Z]|cublas|cudnn|cufft|cuFile|cufile|cupti|curand|cusolver|cusparse|nccl|nvml|nvrtc|nvshmem|nvJitLink"
)
_LIBRARY = re.compile(
    r"lib(cu(da|dart|blas|dnn|fft|file|pti|rand|solver|sparse)|nccl|nvrtc|nvshmem|nvJitLink|nvidia-ml)"
)
FOUND_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")
"""The driver's libraries: PyTorch and Triton open them by name, and no header lists them."""


@dataclass(frozen=True, slots=True)
class CudaSymbols:
    """Symbols of CUDA's libraries (name to version node, "" for none) and the names of the libraries that have them."""

    nodes: dict[str, str]
    libraries: frozenset[str]

    def __or__(self, other: CudaSymbols) -> CudaSymbols:
        """Both; where they disagree about a version node, the other's."""
        return CudaSymbols(self.nodes | other.nodes, self.libraries | other.libraries)

    def beyond(self, known: CudaSymbols) -> CudaSymbols:
        """What these have and the known ones lack."""
        nodes = {
            name: node
            for name, node in self.nodes.items()
            if name not in known.nodes or node not in ("", known.nodes[name])
        }
        return CudaSymbols(nodes, self.libraries - known.libraries)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.libraries)


def imported(linkages: list[Linkage]) -> CudaSymbols:
    """What these shared objects want of CUDA; a version node that any of them names counts for all."""
    nodes: dict[str, str] = {}
    for one in linkages:
        for name, node in one.imports.items():
            if _SYMBOL.match(name):
                nodes[name] = node or nodes.get(name, "")
    needed = {name for one in linkages for name in one.needed}
    return CudaSymbols(nodes, frozenset(filter(_LIBRARY.match, needed)))


def listed(path: Path) -> CudaSymbols:
    """The symbols of a list: lines "soname LIBRARY", then lines "SYMBOL NODE", with "-" for no node."""
    nodes, libraries = {}, set()
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise SimulatedGpuError(f"cannot read memlab's list of CUDA symbols: {error}. Install memlab again.") from None
    for line in lines:
        match line.split():
            case [] | ["#", *_]:
                continue
            case ["soname", library]:
                libraries.add(library)
            case [symbol, node]:
                nodes[symbol] = "" if node == "-" else node
            case _:
                raise SimulatedGpuError(
                    f"{str(path)!r} has a line that is no symbol: {line[:80]!r}. Install memlab again."
                )
    return CudaSymbols(nodes, frozenset(libraries))
