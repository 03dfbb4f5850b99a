"""Variables that CUDA reads once, when it starts: which cards it may see, and whether a launch waits for its end.

Why before: torch asks the driver for its cards at the first use of CUDA, not at `import torch`, and the driver reads these
variables then and never again. Setting them after the import but before that is early enough, and after it has no effect.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch

from memlab.errors import DoesNotApply
from memlab.savings.technique import EXACT, Technique
from memlab.workloads.job import Job

_CUDA = "CUDA C++ Programming Guide, CUDA Environment Variables, https://docs.nvidia.com/cuda/cuda-c-programming-guide/"


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """An environment variable, and afterwards what it was."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _early(name: str, value: Callable[[], str]) -> Callable[[Job], None]:
    def before(job: Job) -> None:
        if job.device.type != "cuda":
            raise DoesNotApply(f"{name} is read by CUDA, and this job runs on the CPU.")
        if torch.cuda.is_initialized():
            raise DoesNotApply(
                f"{name} is read once, at the first use of CUDA, which has been: set it first in a new process."
            )
        job.making.append(lambda: _read_by_cuda(name, value()))

    return before


@contextlib.contextmanager
def _read_by_cuda(name: str, value: str) -> Iterator[None]:
    with variable(name, value):
        torch.cuda.init()
        yield


def _first_card() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


TECHNIQUES = (
    Technique(
        name="cuda_visible_devices",
        idea="A process sees only the cards named in CUDA_VISIBLE_DEVICES, so that none takes a context by accident.",
        attacks=("reserved",),
        kind="practice",
        stage="build",
        equality=EXACT,
        price="None.",
        not_when="CUDA is initialised already: the variable is read once, at the first use of CUDA.",
        code="import os\n\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'      # before the first use of CUDA\nimport torch",
        references=(_CUDA, "PyTorch docs, CUDA semantics, https://docs.pytorch.org/docs/stable/notes/cuda.html"),
        tips=("E5",),
        before=_early("CUDA_VISIBLE_DEVICES", _first_card),
    ),
    Technique(
        name="cuda_launch_blocking",
        idea="Each launch waits for its end, so that an error is raised on the line that made it. It saves no memory.",
        attacks=("none",),
        kind="practice",
        stage="build",
        equality=EXACT,
        price="Time: host and card no longer work side by side.",
        slower=True,
        not_when="Anything but the search for a failing line; CUDA is initialised already.",
        code="import os\n\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'      # before the first use of CUDA; or in the shell",
        references=(_CUDA,),
        tips=("B6",),
        before=_early("CUDA_LAUNCH_BLOCKING", lambda: "1"),
    ),
)
