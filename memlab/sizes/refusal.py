"""Why a forward could not be run without data, in one line: what, where, and what to do about it."""

from __future__ import annotations

import linecache
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_MEASURE = "measure a real step with memlab.track()"
_TYPES = " A shape stands for float32; for another type give torch.empty(shape, dtype=..., device='meta')."
_OF_NO_KERNEL = ("UnsupportedOperatorException", "UnsupportedFakeTensorException")
_OF_NO_TYPE = (*_OF_NO_KERNEL, "DataDependentOutputException", "DynamicOutputShapeException")
"""Errors to which the type of the inputs has nothing to say."""


class WrongIndices(Exception):
    """What a real operator would refuse and one on stand-ins does not: PyTorch's fake embedding takes any type (2.13)."""

    def __init__(self, operator: str, dtype: torch.dtype) -> None:
        super().__init__(f"{operator} looks up rows by whole numbers, got {str(dtype).removeprefix('torch.')}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that a forward raised on stand-ins, without its traceback, which would hold them."""

    kind: str
    message: str
    operator: str
    layer: str
    place: str

    def text(self, model: str, with_shapes: bool) -> str:
        """One line; `with_shapes` if inputs were given as shapes."""
        what, advice = self._what()
        inside = f" in {self.layer}" if self.layer else ""
        hint = _TYPES if with_shapes and self.kind not in _OF_NO_TYPE else ""
        how = "would fail" if self.kind == WrongIndices.__name__ else "cannot be run without data"
        return f"the forward of {model} {how}: {what}{inside}{self.place}. {advice}.{hint}"

    def _what(self) -> tuple[str, str]:
        if self.kind == "DataDependentOutputException":
            asks = "item(), bool(), int() or float()" if "_local_scalar_dense" in self.operator else self.operator
            return f"it asks for a tensor's value ({asks})", f"Take that out of the forward, or {_MEASURE}"
        if self.kind == "DynamicOutputShapeException":
            return f"the size of {self.operator}'s result hangs on values", f"Use a fixed size there, or {_MEASURE}"
        if self.kind in _OF_NO_KERNEL:
            what = f"PyTorch knows no sizes for {self.operator or self.message}"
            return what, f"Register a fake kernel for it, or {_MEASURE}"
        if self.kind == WrongIndices.__name__:
            return self.message, "Give it indices: torch.zeros(shape, dtype=torch.long)"
        return f"{self.kind}: {self.message}", f"Does it run on real inputs? Then {_MEASURE}"


def refusal(error: Exception, layer: str) -> Refusal:
    """Take from an error what is worth saying."""
    message = str(error).strip()
    first = message.splitlines()[0].rstrip(".")[:240] if message else "no message"
    return Refusal(type(error).__name__, first, str(getattr(error, "func", "")), layer, _place(error))


def _place(error: Exception) -> str:
    """The innermost line of the user's own code."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    mine = [(file, line) for file, line in frames if not file.startswith((_TORCH, _OURS, "<string", "<frozen"))]
    if not mine:
        return ""
    file, line = mine[-1]
    is_cell = "ipykernel_" in file or file.startswith("<ipython-input")
    place = f"line {line} of a cell" if is_cell else f"{Path(file).name}:{line}"
    source = linecache.getline(file, line).strip()
    return f" at {place}" + (f" ({source[:80]})" if source else "")
