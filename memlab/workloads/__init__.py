"""Small plain models with their training step, as lessons, tests and benchmarks use them.

Each function builds everything and returns `step`, a callable without arguments. Nothing here measures anything.
"""

from __future__ import annotations

from memlab.workloads.language import gpt2, transformer
from memlab.workloads.vision import resnet, unet, vgg

__all__ = ["gpt2", "resnet", "transformer", "unet", "vgg"]
