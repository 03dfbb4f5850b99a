"""cuDNN's switches: `benchmark` and `deterministic`. Both are about time; what they cost is workspace.

Limits: workspaces of cuDNN are asked of a real card only: neither a prediction nor a pretend device shows them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memlab.errors import DoesNotApply
from memlab.savings.technique import Technique, close
from memlab.workloads.job import Job

_OF_CUDNN = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.RNNBase)
_DOCS = "PyTorch docs, Reproducibility, https://docs.pytorch.org/docs/stable/notes/randomness.html"


@contextlib.contextmanager
def cudnn(**flags: bool) -> Iterator[None]:
    """These flags of torch.backends.cudnn, and afterwards those of before."""
    before = {name: getattr(torch.backends.cudnn, name) for name in flags}
    try:
        for name, value in flags.items():
            setattr(torch.backends.cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(torch.backends.cudnn, name, value)


def _switch(name: str, **flags: bool) -> Callable[[Job], None]:
    def apply(job: Job) -> None:
        if job.device.type != "cuda":
            raise DoesNotApply("cuDNN is of CUDA, and this job runs on the CPU.")
        if not any(isinstance(one, _OF_CUDNN) for one in job.model.modules()):
            raise DoesNotApply("the model has no convolution and no recurrent layer, which are what cuDNN works on.")
        job.around.append(functools.partial(cudnn, **flags))
        job.notes.append(f"Workspaces that {name} takes or saves are seen on a real card only.")

    return apply


TECHNIQUES = (
    Technique(
        name="cudnn_benchmark",
        idea="cuDNN tries its algorithms at each new input size and keeps the fastest, whatever workspace it takes.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=close(1e-3, "other algorithms add in another order"),
        price="Workspace: the trials ask for as much as is free, and the fastest may keep some; the first step is slow.",
        not_when="Input sizes change from step to step: each new size is tried anew. On the CPU it does nothing.",
        code="torch.backends.cudnn.benchmark = True      # once, before training on inputs of one size",
        references=(
            _DOCS,
            "PyTorch Performance Tuning Guide, https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        ),
        tips=("E2",),
        excludes={"cudnn_deterministic": "what was fastest in one run need not be so in the next"},
        apply=_switch("cudnn_benchmark", benchmark=True),
        outside=lambda: cudnn(benchmark=True),
    ),
    Technique(
        name="cudnn_deterministic",
        idea="cuDNN takes only algorithms that give the same bits each time.",
        attacks=("none",),
        kind="practice",
        stage="step",
        equality=close(1e-3, "other algorithms add in another order; from then on always in the same"),
        price="Time, where the deterministic algorithm is the slower one; its workspace may be larger or smaller.",
        slower=True,
        not_when="You want speed; other operators stay free: use_deterministic_algorithms covers them.",
        code="torch.backends.cudnn.deterministic = True\ntorch.backends.cudnn.benchmark = False",
        references=(_DOCS,),
        tips=("E3",),
        excludes={"cudnn_benchmark": "what was fastest in one run need not be so in the next"},
        apply=_switch("cudnn_deterministic", deterministic=True, benchmark=False),
        outside=lambda: cudnn(deterministic=True, benchmark=False),
    ),
)
