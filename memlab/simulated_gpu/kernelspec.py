"""Jupyter kernels on a simulated GPU: written where Jupyter looks for kernels, and removed again."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memlab.errors import SimulatedGpuError
from memlab.units import one_line

PREFIX = "memlab-simulated-"
_MARK = "memlab_simulated_gpu"
"""A key of the metadata: only kernels that have it are ever removed."""


def install(label: str, arguments: Sequence[str], prefix: str | None) -> Path:
    """Write the kernel "Python (simulated LABEL)", which runs `memlab simulate ARGUMENTS`; under `prefix`, else for the user."""
    name = kernel_name(label)
    spec = {
        "argv": [sys.executable, "-m", "memlab", "simulate", *arguments, "--", sys.executable, "-m", "ipykernel_launcher",
                 "-f", "{connection_file}"],
        "display_name": f"Python (simulated {one_line(label, 80)})",
        "language": "python",
        "metadata": {"debugger": True, _MARK: True},
    }  # fmt: skip
    manager = _manager(prefix)
    with tempfile.TemporaryDirectory(prefix="memlab-") as folder:
        (Path(folder) / "kernel.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        try:
            return Path(manager.install_kernel_spec(folder, name, user=prefix is None, prefix=prefix))
        except OSError as error:
            where = f" under {prefix!r}" if prefix else ""
            raise SimulatedGpuError(
                f"cannot write the kernel{where}: {error.strerror or error}. Use --user or --prefix FOLDER."
            ) from None


def kernel_name(label: str) -> str:
    """A name that Jupyter allows, which is also a name of a folder."""
    return PREFIX + (re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:60] or "gpu")


def remove(label: str | None, prefix: str | None) -> list[Path]:
    """Remove the kernel of that label, or all that `install` wrote; the folders that are gone."""
    manager = _manager(prefix)
    gone = []
    for name, folder in manager.find_kernel_specs().items():
        if name.startswith(PREFIX) and (label is None or name == kernel_name(label)) and _is_ours(Path(folder)):
            try:
                gone.append(Path(manager.remove_kernel_spec(name)))
            except OSError as error:
                raise SimulatedGpuError(f"cannot remove {folder!r}: {error.strerror or error}.") from None
    return gone


def _is_ours(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "kernel.json").read_text(encoding="utf-8"))["metadata"][_MARK])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def default_prefix() -> str | None:
    """Where a kernel goes unless told: with this environment if it is one of its own (venv or conda), else to the user."""
    is_own = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    return sys.prefix if is_own else None


def _manager(prefix: str | None) -> Any:
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError:
        raise SimulatedGpuError("a Jupyter kernel needs Jupyter: pip install jupyterlab.") from None
    manager = KernelSpecManager()
    own = str(Path(prefix) / "share" / "jupyter" / "kernels") if prefix else None
    if own and own not in manager.kernel_dirs:
        manager.kernel_dirs = [own, *manager.kernel_dirs]
    return manager
