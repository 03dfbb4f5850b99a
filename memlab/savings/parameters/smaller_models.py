"""Smaller models made of larger ones, by name and bytes: pruning, which zeroes weights, and distillation, which teaches a student.

Pruned weights are zeros, and zeros take the bytes of any other number; while a mask is on, a pruned layer takes three times its
own.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import prune

from memlab.errors import DoesNotApply
from memlab.savings.technique import Technique, changes
from memlab.units import format_bytes
from memlab.workloads.job import Job

AMOUNT = 0.5


def _prune(job: Job) -> None:
    found = [
        one
        for one in job.model.modules()
        if isinstance(one, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        and not isinstance(one, NonDynamicallyQuantizableLinear)  # nn.MultiheadAttention's own, which is never called
        and "weight" in dict(one.named_parameters(recurse=False))
    ]
    if not found:
        raise DoesNotApply("there is no convolution or linear layer to prune.")
    masked = 0
    for one in {id(one.weight): one for one in found}.values():
        masked += one.weight.nbytes
        prune.l1_unstructured(one, "weight", amount=AMOUNT)
    job.notes.append(
        f"half of {format_bytes(masked)} of weights is zero; with masks and products they take {format_bytes(3 * masked)}"
    )


TECHNIQUES = (
    Technique(
        name="pruning",
        idea="Zero the smallest weights: the bytes stay, unless whole rows, channels or layers are cut out.",
        attacks=("none",),
        kind="practice",
        stage="model",
        equality=changes("half of the weights are zero"),
        price="while masks are on, three times the pruned weights; afterwards the same bytes as before",
        not_when="bytes are what is wanted: structured pruning makes smaller matrices, and then the model has to be trained again",
        code="""
from torch.nn.utils import prune

prune.l1_unstructured(layer, "weight", amount=0.5)        # weight_orig and weight_mask: larger, not smaller
prune.remove(layer, "weight")                             # as large as before, half of it zeros
""",
        references=(
            "Han et al., Learning both Weights and Connections for Efficient Neural Networks, 2015, "
            "https://arxiv.org/abs/1506.02626",
            "PyTorch tutorial, Pruning, 2026, https://docs.pytorch.org/tutorials/intermediate/pruning_tutorial.html",
        ),
        tips=("G5",),
        excludes={
            "weight_tying": "the mask of the output layer would not fit the embedding.",
            "low_rank": "its weights rest; what is pruned should go on learning.",
        },
        apply=_prune,
    ),
    Technique(
        name="distillation",
        idea="Teach a small student what the large model answers: the student is what is small; while it learns both are there.",
        attacks=("parameter", "activation"),
        kind="practice",
        stage="model",
        equality=changes("the student is another model"),
        price="training with the teacher's weights beside the student, and the teacher's forward, under no_grad",
        not_when="the training is what does not fit: it needs more, not less",
        code="""
with torch.no_grad():                     # the teacher's activations are not kept
    wanted = (teacher(x) / temperature).softmax(-1)
said = (student(x) / temperature).log_softmax(-1)
loss = torch.nn.functional.kl_div(said, wanted, reduction="batchmean") * temperature**2
loss.backward()
""",
        references=(
            "Hinton et al., Distilling the Knowledge in a Neural Network, 2015, https://arxiv.org/abs/1503.02531",
        ),
        tips=("G5",),
    ),
)
