"""What a model has: its parameters, buffers and plain tensor attributes, each storage once, by the module that has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memlab.sizes.layers import Layers
from memlab.sizes.storages import is_tensor, storages

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"


@dataclass(frozen=True, slots=True, eq=False)
class Belonging:
    """One tensor of a model, by its first path; `nbytes` are those of its storages that no tensor before it has."""

    path: str
    layer: str
    kind: str
    tensor: Tensor
    nbytes: int
    also: tuple[str, ...] = ()


def belongings(layers: Layers) -> list[Belonging]:
    """Every tensor that the modules hold, parameters first, as they are met from the outermost module."""
    paths: dict[int, list[str]] = {}
    found: list[tuple[str, str, Tensor]] = []
    for kind in (PARAMETER, BUFFER, ATTRIBUTE):
        for module in layers.modules:
            layer = layers.first_path(module)
            for name, tensor in _tensors(module, kind):
                if id(tensor) not in paths:
                    found.append((layer, kind, tensor))
                paths.setdefault(id(tensor), []).append(f"{layer}.{name}" if layer else name)
    seen: set[int] = set()
    named = [(paths[id(tensor)], layer, kind, tensor) for layer, kind, tensor in found]
    return [
        Belonging(names[0], layer, kind, tensor, _new_bytes(tensor, seen), tuple(names[1:]))
        for names, layer, kind, tensor in named
    ]


def _tensors(module: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    places: dict[str, Any] = module.__dict__
    if kind != ATTRIBUTE:
        places = places.get("_parameters" if kind == PARAMETER else "_buffers", {})
    return [(name, tensor) for name, tensor in list(places.items()) if is_tensor(tensor)]


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    count = 0
    if not is_lazy(tensor):
        for storage in storages(tensor):
            count += 0 if storage._cdata in seen else storage.nbytes()
            seen.add(storage._cdata)
    return count


def devices(tensors: list[Tensor]) -> list[torch.device]:
    """The devices they lie on, in order of meeting; those without data have none."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "meta"))
