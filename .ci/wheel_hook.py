"""The hook of hatchling that puts the compiled library into the wheel for Linux on x86-64."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SimulatedGpuHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the library for the symbols of all supported versions of PyTorch.

    Elsewhere, and where there is no C compiler, the wheel is the same without it: then it is compiled at first use.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is built."""
        if version == "editable" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        sys.path.insert(0, self.root)
        from memlab.simulated_gpu import library
        from memlab.simulated_gpu.library import SimulatedGpuError

        self.built = Path(tempfile.mkdtemp(prefix="memlab-"))
        try:
            library.prebuild(self.built)
        except SimulatedGpuError as error:
            self.app.display_warning(f"without the library of the simulated GPU: {error}")
            return
        finally:
            sys.path.remove(self.root)
        build_data["force_include"][str(self.built)] = "memlab/simulated_gpu/lib"
        build_data["pure_python"] = False
        # The tag manylinux_2_N, without which package indexes refuse wheels for Linux, says that glibc 2.N is enough: the
        # newest of whose symbols the library asks for. Nothing else is linked.
        compiled = b"".join(path.read_bytes() for path in self.built.glob("*.so"))
        minor = max(map(int, re.findall(rb"\bGLIBC_2\.(\d+)", compiled)))
        build_data["tag"] = f"py3-none-manylinux_2_{minor}_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after it."""
        if hasattr(self, "built"):
            shutil.rmtree(self.built, ignore_errors=True)
