"""Reproducible runs: every seed, every flag, and what each costs in memory.

Seeds cost nothing. CUBLAS_WORKSPACE_CONFIG=:4096:8 gives each handle 8 x 4 MiB = 32 MiB of workspace, where the default
before Hopper is 8.1 MiB; backward has a thread, and so a handle, of its own. `:16:8` costs 128 KiB, and time.
Deterministic operators may sort, which takes temporaries.
Limits: PYTHONHASHSEED is read as the interpreter starts: set here it counts for processes started later. A prediction takes the
default workspace of cuBLAS, whatever the variable says.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from memlab.savings.switches.cudnn import cudnn
from memlab.savings.switches.environment import variable
from memlab.savings.technique import Technique, changes
from memlab.workloads.job import Job, seeded

SEED = 0


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only operators that give the same bits each time, with a warning where there is none; afterwards as before."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with cudnn(deterministic=True, benchmark=False), variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8"):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """The same random numbers and the same bits each time; afterwards the user's random numbers go on where they were."""
    with seeded(SEED), _numpy_seeded(), variable("PYTHONHASHSEED", str(SEED)), deterministic():
        yield


@contextlib.contextmanager
def _numpy_seeded() -> Iterator[None]:
    """The legacy numbers of numpy, where somebody has imported it."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    before = numpy.random.get_state()
    try:
        numpy.random.seed(SEED)
        yield
    finally:
        numpy.random.set_state(before)


def _before(job: Job) -> None:
    job.making.append(reproducible)
    job.around.append(reproducible)
    random_device = "the card" if job.device.type == "cuda" else "the CPU"
    job.notes.append(f"Seeded {SEED} on {random_device}; operators without a deterministic form warn.")


TECHNIQUES = (
    Technique(
        name="reproducible_seeding",
        idea="All seeds (random, PYTHONHASHSEED, numpy, torch, CUDA) and all flags: the same run each time.",
        attacks=("none",),
        kind="practice",
        stage="build",
        equality=changes("other random numbers than without, and the same ones in each run"),
        price="Seeds: nothing. On a card :4096:8 takes 32 MiB for forward and for backward (else 8.1 each). Operators: time.",
        not_when="Bits need not agree: then a seed is enough. Other cards, versions and batch sizes give other bits anyway.",
        code="import os, random\nimport numpy, torch\n\n"
        "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'      # before the first use of CUDA; PYTHONHASHSEED in the shell\n"
        "random.seed(0)\nnumpy.random.seed(0)\ntorch.manual_seed(0)                                    # CPU and every card\n"
        "torch.backends.cudnn.benchmark = False\ntorch.use_deterministic_algorithms(True)",
        references=("PyTorch docs, Reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html",),
        tips=("E6",),
        before=_before,
    ),
)
