"""Parameters that get their shape from the first input (`nn.LazyLinear`): they remember that they were moved."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import parameter

from memlab.predictor.pretend.patches import Patches
from memlab.predictor.pretend.tensors import CUDA0, set_data, with_index

UninitializedTensorMixin: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_materialize = UninitializedTensorMixin.materialize


def put(patches: Patches) -> None:
    """Have nothing to move until there is a shape; then the memory is taken where it was to go."""
    patches.put(UninitializedTensorMixin, to=_to, cuda=_cuda, materialize=_made)


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device", args[0] if args else None)
    if isinstance(device, str | int | torch.device):
        self.__dict__["pretend_device"] = with_index(device)
    return self


def _cuda(self: Any, device: Any = None, **kwargs: Any) -> Any:
    return _to(self, CUDA0 if device is None else device)


def _made(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """As PyTorch's, on the host; then on the card if it was moved there (torch/nn/parameter.py, 2.11 to 2.15)."""
    target = self.__dict__.pop("pretend_device", None) if device is None else with_index(device)
    if target is None or target.type != "cuda":
        _materialize(self, shape, target, dtype)
        return
    _materialize(self, shape, torch.device("cpu"), dtype)
    set_data(self, torch.empty(shape, device=CUDA0, dtype=self.dtype))
