"""DenseNets without their square of copies: concatenations, and the norms behind them, are made again in backward.

Each layer of a dense block reads all features before it, concatenated: kept as they are, these copies grow with the square
of the number of layers, while the features themselves grow with the number of layers only.
"""

from __future__ import annotations

import functools

from memlab.savings.activations.recomputed_norm import FORGOTTEN, recompute, recompute_outside
from memlab.savings.technique import EXACT, Shown, Technique

TECHNIQUES = (
    Technique(
        name="densenet",
        idea="Keep each feature once; make concatenations, and the BatchNorm and ReLU behind them, again in backward.",
        attacks=("activation",),
        kind="saving",
        stage="model",
        equality=EXACT,
        price="each concatenation, norm and ReLU once or twice more in backward: 15 to 20 % of time, says the paper.",
        slower=True,
        not_when="Features are concatenated once and not again and again: then the copies are few. Not with features that"
        " are changed in place after they were concatenated.",
        code="""\
import torch
from torch.utils.checkpoint import checkpoint

def bottleneck(*features):  # the first convolution is inside: it is the one who would keep the large result
    return conv1(relu1(norm1(torch.cat(features, 1))))

x = checkpoint(bottleneck, *features, use_reentrant=False)
""",
        references=(
            "Memory-Efficient Implementation of DenseNets, Pleiss et al. 2017, https://arxiv.org/abs/1707.06990",
        ),
        shown=Shown("densenet121", share=0.55),
        tips=("C7",),
        excludes={
            **dict.fromkeys(
                ("checkpoint", "selective_checkpoint", "checkpoint_sequential", "sqrt_segments"), FORGOTTEN
            ),
            "offload": FORGOTTEN,
            "recomputed_norm": "densenet recomputes the norms as well",
        },
        apply=functools.partial(recompute, concatenations=True),
        outside=lambda: recompute_outside(concatenations=True),
    ),
)
