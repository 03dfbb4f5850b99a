"""Which line of the user's program asks: the key of an assumption."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from typing import Any, ClassVar

import torch

from memlab.errors import MemlabError
from memlab.torch_internals.cell_code import cell_number

_OWN = str(Path(__file__).resolve().parents[1])
_INNER = (_OWN, str(Path(torch.__file__).parent), "<frozen ", "<string>")
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
MOST_READS = 3


@functools.cache
def _distance(file: str) -> int:
    """0 for code of the user, 1 for that of libraries, 2 for PyTorch's and memlab's."""
    if file.startswith(_INNER):
        return 2
    is_library = "-packages" in file or (file.startswith(_STANDARD) and cell_number(file) is None)
    return int(is_library)


def where() -> str:
    """The innermost line of the user's, or else of a library: "train.py:41"; "" if there is none."""
    frame: Any = sys._getframe(1)
    nearest = ""
    while frame is not None:
        file = frame.f_code.co_filename
        distance = _distance(file)
        if distance == 0 or (distance == 1 and not nearest):
            nearest = f"{_name(file)}:{frame.f_lineno}"
            if distance == 0:
                break
        frame = frame.f_back
    return nearest


def _name(file: str) -> str:
    number = cell_number(file)
    if number is None:
        return file.replace("\\", "/").rpartition("/")[2]
    return f"cell {number}" if number else "cell"


class Reads:
    """The assumed values that were read since fake CUDA was switched on, by key: an error may come from them."""

    keys: ClassVar[dict[str, None]] = {}

    @classmethod
    def said(cls) -> str:
        """They in half a sentence."""
        keys = list(cls.keys)
        more = f" and {len(keys) - MOST_READS} more" if len(keys) > MOST_READS else ""
        return f"after values that only a GPU computes were assumed: {', '.join(keys[:MOST_READS])}{more}"


def assume(cuda: Any, what: str, text: str) -> None:
    """Record an assumption with its key, the line that asked and what for: "train.py:41 nonzero: ..."."""
    place = where()
    key = f"{place} {what}" if place else what
    Reads.keys[key] = None
    cuda.assume(f"{key}: {text}")


def explain(error: BaseException | None) -> None:
    """Say in an error of the user's program that values had been assumed, as it may come from them."""
    if not Reads.keys or not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError | MemlabError):
        return
    if len(error.args) == 1 and str(error) == error.args[0]:
        error.args = (f"{error} ({Reads.said()})",)
    else:
        error.add_note(f"This was raised {Reads.said()}.")
