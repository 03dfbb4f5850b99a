"""Loops that end by a value: they must neither end at once nor go on for ever, though every value that they read is unknown.

LBFGS stops where a gradient is small, a step too short, or a direction leads upwards; each would end it at its first
iteration here, with nothing kept of earlier ones. So the loss that it reads falls from reading to reading, and what it
compares comes out such that it goes on: the largest number of iterations is the most memory. `nn.init.trunc_normal_` draws
again what fell outside until nothing does; two rounds show all the memory that it takes. Any other code that asks the same
question over and over is told to stop after a while (torch/optim/lbfgs.py, torch/nn/init.py, 2.11 to 2.15).
"""

from __future__ import annotations

import os
import sys
from typing import Any

SEARCHED = "LBFGS was taken to use all its iterations"
REDRAWN = "nn.init.trunc_normal_ was taken to draw again twice"
ENDLESS = "a loop that waited for a value was ended after {} rounds"
MOST_ROUNDS = 10_000
_BETWEEN = ("_tensor.py", "_ops.py")


class Losses:
    """The readings so far; each is smaller than the one before."""

    count = 0


class Asked:
    """The last question: where it was asked, and how often in a row."""

    place: Any = None
    times = 0


def answer(tensor: Any, run: Any) -> Any:
    """What such a loop reads of a single number, None for everybody else."""
    frame = _reader()
    if frame is None:
        return None
    name = frame.f_code.co_filename.replace(os.sep, "/")
    if name.endswith("torch/optim/lbfgs.py"):
        run.assume(SEARCHED)
        return _goes_on(tensor)
    times = _times(frame)
    if name.endswith("torch/nn/init.py"):
        run.assume(REDRAWN)
        return times % 3 != 0
    if tensor.numel() == 1 and str(tensor.dtype) == "torch.bool" and times > MOST_ROUNDS:
        run.assume(ENDLESS.format(MOST_ROUNDS))
        Asked.times = 0
        return False
    return None


def _times(frame: Any) -> int:
    """How often in a row this place has asked."""
    place = (id(frame), frame.f_code, frame.f_lasti)
    Asked.times = Asked.times + 1 if place == Asked.place else 1
    Asked.place = place
    return Asked.times


def _goes_on(tensor: Any) -> Any:
    noted = tensor.__dict__.get("compared")
    if noted is not None:
        # `grad.abs().max() <= tolerance` ends it, so does `gtd > -tolerance`; `ys > 1e-10` lets it remember a step, and
        # `1 / sum < 1` (in a min) makes the first step a tensor
        operator, bound = noted
        return operator == "lt" or (operator == "gt" and bound >= 0)
    Losses.count += 1
    return 1.0 + 1.0 / Losses.count


def compared(func: Any, args: Any, out: Any, run: Any) -> None:
    """Note what a tensor was compared with."""
    if isinstance(args[1], int | float) and out.dim() == 0:
        out.__dict__["compared"] = (func._schema.name.rpartition("::")[2], args[1])


def _reader() -> Any:
    """The frame that reads the value: not one of ours, nor of those that only pass it on."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.replace(os.sep, "/").rpartition("/")
        if not folder.endswith("memlab/predictor/pretend") and name not in _BETWEEN:
            return frame
        frame = frame.f_back
    return None
