"""Small plain models with their training step, as lessons, tests and benchmarks use them.

Each function builds everything and returns `step`, a callable without arguments; `vgg16` and `vgg19` return the model alone.
Nothing here measures anything.
"""

from __future__ import annotations

from memlab.workloads.language import gpt2, transformer
from memlab.workloads.vision import resnet, unet, vgg, vgg16, vgg19

__all__ = ["gpt2", "resnet", "transformer", "unet", "vgg", "vgg16", "vgg19"]
