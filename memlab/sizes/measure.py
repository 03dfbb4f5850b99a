"""The sizes of a model: what it has, what one forward on stand-ins leaves, and what an optimizer adds."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from memlab.errors import MemlabError
from memlab.seams.fakes import fake_mode_is_on
from memlab.sizes.belongings import PARAMETER, Belonging, belongings, devices
from memlab.sizes.classic import classic
from memlab.sizes.eviction import evict
from memlab.sizes.found import Found
from memlab.sizes.gradients import Gradient, gradient
from memlab.sizes.layers import Layers
from memlab.sizes.notes import compiled, is_lower_bound, left_behind, notes
from memlab.sizes.rehearsal import rehearse
from memlab.sizes.rows import rows
from memlab.sizes.standins import Copies, StandIns
from memlab.sizes.states import States, states
from memlab.sizes.storages import storages, tensors_in
from memlab.sizes.value import Sizes


def measure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: Any = None) -> Sizes:
    """Size a model for these inputs; nothing is computed, and the model stays as it is."""
    if not issubclass(type(model), nn.Module):
        raise MemlabError(f"size takes a torch.nn.Module and inputs for it, got {type(model).__name__}.")
    if fake_mode_is_on():
        raise MemlabError("size has tensors without data of its own. Leave the FakeTensorMode before asking for it.")
    layers = Layers(dict(model.__dict__.get("_modules", {})).get("_orig_mod", model))  # what torch.compile wraps
    if any(issubclass(type(module), torch.jit.ScriptModule) for module in layers.modules):
        raise MemlabError(
            "TorchScript keeps its tensors out of reach. Ask for the size of the module it was made from."
        )
    mine = belongings(layers)
    standins = _standins([one.tensor for one in mine], tensors_in(args, kwargs))
    try:
        sizes = _sizes(_find(layers, mine, standins, args, kwargs, optimizer))
    finally:
        standins.drop()
        left = evict(standins.mode)
    extra = (*left_behind(left), *compiled(model, layers))
    return dataclasses.replace(sizes, notes=(*sizes.notes, *extra))


def _standins(of_model: list[Tensor], of_inputs: list[Tensor]) -> StandIns:
    """On the model's device; where it has none, on that of the inputs, else on PyTorch's default device."""
    known = devices(of_model) or devices(of_inputs) or [torch.get_default_device()]
    home = known[0] if known[0].type != "meta" else torch.device("cpu")
    if home.type == "cuda" and not torch.cuda.is_available():
        raise MemlabError(
            "sizes for CUDA need a machine with CUDA. Take the model and its inputs to the CPU, or to meta."
        )
    return StandIns(home, {home.type, *(device.type for device in known if device.type != "meta")}, len(known) == 1)


def _find(
    layers: Layers,
    mine: list[Belonging],
    standins: StandIns,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    choice: Any,
) -> Found:
    """Run the forward and the optimizer's step."""
    given_args = tuple(_input(value, standins) for value in args)
    given_kwargs = {name: _input(value, standins) for name, value in kwargs.items()}
    with_shapes = any(_is_shape(value) for value in (*args, *kwargs.values()))
    rehearsed = rehearse(layers, standins, given_args, given_kwargs, with_shapes)
    of_model = {id(standins.of(one.tensor)) for one in mine}
    inputs = [tensor for tensor in tensors_in(given_args, given_kwargs) if id(tensor) not in of_model]
    seen = rehearsed.watch.seen
    gradients = [gradient(standins.of(one.tensor), one.tensor, rehearsed.graph, seen) for one in mine]
    of_inputs = [gradient(tensor, tensor, rehearsed.graph, seen) for tensor in inputs]
    return Found(
        layers=layers,
        mine=mine,
        standins=standins,
        inputs=inputs,
        rehearsed=rehearsed,
        gradients=gradients,
        input_gradient_bytes=sum(grad.nbytes for grad in of_inputs if grad),
        states=None if choice is None else _states(choice, mine, standins, gradients),
    )


def _input(value: Any, standins: StandIns) -> Any:
    """An input as a stand-in: on the model's device, where it has one only."""
    if _is_shape(value):
        if any(size < 0 for size in value):
            raise MemlabError(f"a shape has no negative sizes, got {tuple(value)}.")
        return standins.new(tuple(value), standins.home)
    return Copies(standins, standins.home if standins.moves_inputs else None).of(value)


def _is_shape(value: Any) -> bool:
    """A tuple of whole numbers stands for a float32 tensor of that shape."""
    return type(value) in (tuple, torch.Size) and all(type(size) is int for size in value)


def _states(choice: Any, mine: list[Belonging], standins: StandIns, gradients: list[Gradient | None]) -> States:
    grads: dict[int, Tensor | None] = {}
    for one, grad in zip(mine, gradients, strict=True):
        fake = standins.of(one.tensor)
        grads[id(fake)] = None if grad is None else _fake_gradient(fake, grad, standins)
    return states(choice, [one.tensor for one in mine if one.kind == PARAMETER], standins, grads)


def _fake_gradient(leaf: Tensor, grad: Gradient, standins: StandIns) -> Tensor:
    if not grad.is_sparse:
        with standins.mode:
            return torch.empty_like(leaf)
    indices = standins.new((1, grad.rows), leaf.device, torch.int64)
    values = standins.new((grad.rows, *leaf.shape[1:]), leaf.device, leaf.dtype)
    with standins.mode:
        return torch.sparse_coo_tensor(indices, values, leaf.shape, check_invariants=False)


def _sizes(found: Found) -> Sizes:
    """Put into figures what was found."""
    parameters = [one for one in found.mine if one.kind == PARAMETER]
    count = sum(one.tensor.numel() for one in parameters)
    types, root, states = found.standins.device_types, found.layers.modules[0], found.states
    return Sizes(
        model=type(root).__name__,
        device=str(found.standins.home),
        inputs=tuple(_described(tensor) for tensor in found.inputs),
        is_training=root.training,
        optimizer=states.name if states else "",
        parameter_count=count,
        trainable_count=sum(one.tensor.numel() for one in parameters if one.tensor.requires_grad),
        parameter_bytes=sum(one.nbytes for one in parameters),
        buffer_bytes=sum(one.nbytes for one in found.mine if one.kind != PARAMETER),
        gradient_bytes=sum(grad.nbytes for grad in found.gradients if grad) + found.input_gradient_bytes,
        optimizer_bytes=sum(states.here(types).values()) if states else 0,
        input_bytes=_input_bytes(found),
        kept=tuple(found.rehearsed.kept.values()),
        elsewhere_bytes=found.rehearsed.elsewhere_bytes + (states.elsewhere_bytes(types) if states else 0),
        layers=rows(found),
        classic=classic(count, found.rehearsed.counted, found.rehearsed.kept),
        is_lower_bound=is_lower_bound(found),
        notes=notes(found),
    )


def _described(tensor: Tensor) -> str:
    shape = ", ".join(map(str, tensor.shape)) + ("," if tensor.dim() == 1 else "")
    return f"({shape}) {str(tensor.dtype).removeprefix('torch.')}"


def _input_bytes(found: Found) -> int:
    """The storages of the inputs, without those that the model has."""
    of_model = {s._cdata for one in found.mine for s in storages(one.tensor)}
    behind = {s._cdata: s.nbytes() for tensor in found.standins.originals(found.inputs) for s in storages(tensor)}
    return sum(nbytes for key, nbytes in behind.items() if key not in of_model)
