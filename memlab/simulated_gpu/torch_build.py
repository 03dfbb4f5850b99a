"""Which PyTorch is installed, without importing it, and whether it can run on a simulated GPU."""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import elf
from memlab.simulated_gpu.elf import Linkage

CUDA = 13
_INSTEAD = "Predictions need none of that: %%memtrack --predict, memlab.predict"
_NEEDED = (
    "A simulated GPU needs Linux on x86-64 and a build of PyTorch for CUDA 13, which `pip install torch` gives there"
)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """An installed PyTorch: its version, the CUDA or ROCm version that it was built for ("" for none), its folder."""

    version: str
    cuda: str
    rocm: str
    folder: Path

    def linkages(self) -> list[Linkage]:
        """What its shared objects need."""
        return [elf.linkage(path) for path in sorted((self.folder / "lib").glob("*.so"))]


def installed() -> TorchBuild:
    """The PyTorch that this interpreter would import."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):  # half imported, or removed by a test
        spec = None
    if spec is None or not spec.origin:
        raise SimulatedGpuError(f"PyTorch is not installed for {sys.executable!r}. {_NEEDED}.")
    return read(Path(spec.origin).parent)


def read(folder: Path) -> TorchBuild:
    """The PyTorch in this folder, by its version.py."""
    try:
        tree = ast.parse((folder / "version.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        raise SimulatedGpuError(f"{str(folder)!r} has no readable version.py: it is no installed PyTorch.") from None
    values = dict(_constants(tree))
    return TorchBuild(values.get("__version__", ""), values.get("cuda", ""), values.get("hip", ""), folder)


def _constants(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """The texts that a module assigns to names, with or without an annotation."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield target.id, value.value


def suitable(torch: TorchBuild) -> TorchBuild:
    """The same build, if it can run on a simulated GPU here; else SimulatedGpuError says what is needed."""
    if reason := _unsuitable(torch):
        raise SimulatedGpuError(f"{_NEEDED}; {reason}. {_INSTEAD}.")
    return torch


def _unsuitable(torch: TorchBuild) -> str:
    system, processor = platform.system(), platform.machine()
    if (system, processor) != ("Linux", "x86_64"):
        return f"this is {'macOS' if system == 'Darwin' else system} on {processor}"
    if torch.rocm:
        return f"torch {torch.version} was built for ROCm {torch.rocm}"
    if not torch.cuda:
        return f"torch {torch.version} is a build for the CPU"
    major = re.match(r"\d+", torch.cuda)
    if major is None or int(major[0]) != CUDA:
        return f"torch {torch.version} was built for CUDA {torch.cuda}"
    return (
        "" if (torch.folder / "lib" / "libtorch_cuda.so").exists() else f"torch {torch.version} lacks libtorch_cuda.so"
    )


def libraries_beside(torch: TorchBuild, linkages: Iterable[Linkage], names: Iterable[str]) -> list[Path]:
    """The real libraries of these names that PyTorch's RPATH finds, which the linker prefers to LD_LIBRARY_PATH."""
    folders = dict.fromkeys(folder for one in linkages for folder in one.search_path)
    own = str(torch.folder / "lib")
    places = [Path(folder.replace("${ORIGIN}", own).replace("$ORIGIN", own)) for folder in folders]
    wanted = list(names)
    return [place / name for place in places for name in wanted if (place / name).exists()]
