"""What a real forward keeps, by two authorities: PyTorch's hooks for saved tensors, and the level that memlab.track measures."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import memlab


class Function(nn.Module):
    """A model of any function of its parts and inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return self.function(self, *inputs, **more)


def linear(width: int = 8, out: int = 8) -> nn.Linear:
    return nn.Linear(width, out)


class Packed:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def saved_bytes(model: nn.Module, *inputs: Any, **more: Any) -> int:
    """The storages that autograd holds after a real forward, without those of parameters, buffers and inputs."""
    held: list[weakref.ref[Packed]] = []

    def pack(tensor: Tensor) -> Packed:
        packed = Packed(tensor)
        held.append(weakref.ref(packed))
        return packed

    given = [*model.parameters(), *model.buffers(), *tensors(inputs), *tensors(more)]
    known = {tensor.untyped_storage()._cdata for tensor in given}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        out = model(*inputs, **more)
    alive = (packed.tensor.untyped_storage() for ref in held if (packed := ref()) is not None)
    found = {storage._cdata: storage.nbytes() for storage in alive}
    del out
    return sum(nbytes for key, nbytes in found.items() if key not in known)


def left_bytes(model: nn.Module, *inputs: Any, **more: Any) -> int:
    """The level of CPU memory before backward minus the level before forward, as a tracked run tells it."""
    gc.collect()  # garbage of earlier tests that goes meanwhile would count as freed
    with memlab.track("forward", device="cpu", show=False) as run:
        out = model(*inputs, **more)
    left = run.devices[0].levels[0].left_bytes
    del out
    assert left is not None
    return left


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fails if a model is not what it was: tensors, versions, values, modes, attributes, hooks, random numbers."""
    before, values, random = state(model), [t.detach().clone() for t in of(model)], torch.get_rng_state()
    yield
    assert state(model) == before
    assert all(torch.equal(now, then) for now, then in zip(of(model), values, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def of(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"]


def state(model: nn.Module) -> list[Any]:
    tables = "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"
    found: list[Any] = []
    for module in model.modules():
        found.append((id(module.__dict__), module.training, {k: id(v) for k, v in vars(module).items()}))
        found += [(name, list(vars(module)[name]), list(map(id, vars(module)[name].values()))) for name in tables]
        found += [(id(t), t._version, t.grad, t.requires_grad) for t in module._parameters.values() if t is not None]
        found += [(id(t), t._version, type(t)) for t in module._buffers.values() if t is not None]
    return found
