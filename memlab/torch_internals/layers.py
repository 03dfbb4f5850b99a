"""Layers of any dimension, to which PyTorch gives no public base class."""

from __future__ import annotations

from typing import Any

from memlab.torch_internals.private_names import private

BatchNorm: Any = private("torch.nn.modules.batchnorm._BatchNorm")
NormWithStatistics: Any = private("torch.nn.modules.batchnorm._NormBase")
Convolution: Any = private("torch.nn.modules.conv._ConvNd")
