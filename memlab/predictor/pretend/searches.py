"""LBFGS: its search must go on as on a card that computes, though every value that it reads is unknown.

It stops where a gradient is small, a step too short, or a direction leads upwards; each would end it at the first iteration
here, with nothing kept of earlier ones. So the loss that it reads falls from reading to reading, and what it compares comes
out such that it goes on (torch/optim/lbfgs.py, 2.11 to 2.15). The largest number of iterations is the most memory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

SEARCHED = "LBFGS was taken to use all its iterations"
_FILE = "lbfgs.py"
_BETWEEN = ("_tensor.py", "_ops.py")


class Losses:
    """The readings so far; each is smaller than the one before."""

    count = 0


def answer(tensor: Any, run: Any) -> Any:
    """What LBFGS reads of a single number, None for everybody else."""
    if not _is_searching():
        return None
    run.assume(SEARCHED)
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


def _is_searching() -> bool:
    """Whether the code that reads is LBFGS itself, and not the closure that it calls."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.replace(os.sep, "/").rpartition("/")
        if not folder.endswith("memlab/predictor/pretend") and name not in _BETWEEN:
            return name == _FILE and folder.endswith("torch/optim")
        frame = frame.f_back
    return False
