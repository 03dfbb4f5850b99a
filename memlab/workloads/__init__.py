"""Small plain models in training, sized by a knob, as lessons, tests, benchmarks and the Lab use them.

`memlab.workloads["gpt"]` is a Workload, `.sized("laptop", batch=4)` what makes its model, optimizer, batch and loss, and a `Job` is
what runs them. The package is a mapping, name -> Workload. Its functions are older and plainer: each builds everything and
returns `step`, a callable without arguments; `vgg16` and `vgg19` return the model alone. Nothing here measures anything.

What techniques may count on: equal layers in `blocks` (`nn.Sequential`); ReLU and GELU as modules, not in place; `conv1`, `bn1`,
`relu1`, or conv, norm, ReLU in a row of an `nn.Sequential`; `attend(q, k, v, is_causal)` on every module that mixes positions;
`head`, a linear layer, with `features(...)`, which gives what goes into it (of language models without bias, and tied to the
embedding `token` by the setting `tied`). A model with `job_step(job)` has steps of its own: `gan`.
"""

from __future__ import annotations

import sys
from typing import cast

from memlab.workloads.language import gpt2, transformer
from memlab.workloads.registry import Workloads
from memlab.workloads.vision import resnet, unet, vgg, vgg16, vgg19
from memlab.workloads.workload import SIZES, Workload

__all__ = [
    "SIZES",
    "Workload",
    "Workloads",
    "gpt2",
    "resnet",
    "transformer",
    "unet",
    "vgg",
    "vgg16",
    "vgg19",
    "workloads",
]

sys.modules[__name__].__class__ = Workloads
workloads = cast(Workloads, sys.modules[__name__])
"""The package itself, for type checkers, which do not know that it is a mapping."""
