"""The PyTorch that a prediction is for: the one that runs here, or one that a user names."""

from __future__ import annotations

import re

import torch

from memlab.allocator.rules import release
from memlab.errors import PredictionError
from memlab.trace.trace import Trace
from memlab.units import one_line

OLDEST, NEWEST = (2, 10), (2, 15)
"""The releases of which memlab knows the allocator's rules and cuBLAS's workspaces, all compared with PyTorch's own."""
RELEASES = tuple(f"2.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))
"""The same, each as a user names it."""
HERE = "torch that ran"
"""The key in a trace's versions for the PyTorch whose operators ran, where "torch" is another one."""

_VERSION = re.compile(r"\d+\.\d+(\.\d+)?((a|b|rc|\.dev|\.post)\d+)*(\+[\w.]+)?", re.ASCII)


def checked_version(torch_version: object) -> str:
    """The version that a prediction is for: the one named, or that of this PyTorch for None and for the same release.

    PredictionError for anything but the text of a version from 2.10 to 2.15.
    """
    if torch_version is None:
        return torch.__version__
    if not isinstance(torch_version, str) or _VERSION.fullmatch(torch_version) is None:
        what = 'a version of PyTorch is a text such as "2.14" or "2.12.1+cu130"'
        raise PredictionError(f"{what}, got {one_line(repr(torch_version), 80)}.")
    if not OLDEST <= release(torch_version) <= NEWEST:
        known = f"memlab knows the memory of PyTorch {_text(OLDEST)} to {_text(NEWEST)}"
        raise PredictionError(f"{known}, not of {torch_version:.40}: name one of those.")
    return torch.__version__ if release(torch_version) == release(torch.__version__) else torch_version


def other_version(trace: Trace) -> str:
    """The PyTorch that a prediction is for, if another one ran; "" for the same one."""
    versions = trace.made_by.versions
    return versions["torch"] if HERE in versions else ""


def what_follows(trace: Trace) -> str:
    """What of a prediction is as in the PyTorch that it is for, and what as in the one that ran."""
    own = "the order of equal free blocks, the workspaces of cuBLAS, the seeds of CUDA graphs and the choice of attention's kernel"
    other = f"operators and their other kernels are those of {trace.made_by.versions[HERE]}, which ran here"
    return f"{own} are those of PyTorch {other_version(trace)}; {other}"


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
