"""What one has to know beside the figures of a model: a sentence for each thing that applies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from memlab.sizes.belongings import ATTRIBUTE, PARAMETER
from memlab.sizes.found import Found
from memlab.sizes.layers import Layers
from memlab.sizes.storages import storages
from memlab.units import format_bytes

_RNN = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
# Operator of the CPU -> what CUDA does in another way, as far as it was seen to keep other bytes.
_OTHERWISE_ON_CUDA = {
    "scaled_dot_product": "attention",
    "aten.bernoulli_": "dropout (a mask of one byte an element)",
    "mkldnn_rnn_layer": "recurrent layers",
    "_embedding_bag": "embedding bags",
}
_NAMED = 3


def is_lower_bound(found: Found) -> bool:
    """Whether an operator keeps something whose size only its library knows."""
    return torch.is_grad_enabled() and any(name in one for one in found.rehearsed.watch.seen.operators for name in _RNN)


def notes(found: Found) -> tuple[str, ...]:
    """All that applies, the gravest first."""
    return (*_about_autograd(found), *_about_parameters(found), *_about_places(found), *_about_optimizer(found))


def left_behind(holders: list[str]) -> tuple[str, ...]:
    """The sentence about stand-ins that objects outside the model hold on to."""
    if not holders:
        return ()
    return (f"The forward put tensors outside of the model, and some without data stay there, in: {_list(holders)}.",)


def compiled(model: nn.Module, layers: Layers) -> tuple[str, ...]:
    """The sentence about modules that torch.compile works on."""
    wrapped = any(type(module).__name__ == "OptimizedModule" for module in (model, *layers.modules))
    if wrapped or any(module.__dict__.get("_compiled_call_impl") for module in layers.modules):
        return ("Compiled modules are sized as they are written; compiled code keeps other tensors.",)
    return ()


def _about_autograd(found: Found) -> Iterator[str]:
    seen = found.rehearsed.watch.seen
    if not torch.is_grad_enabled():
        yield "Gradients are off here (torch.no_grad): autograd keeps nothing, and there are no gradients."
    elif not any(found.gradients):
        yield "No parameter gets a gradient from the outputs of this forward."
    if is_lower_bound(found):
        yield "Activations are a lower bound: recurrent layers keep a workspace for backward whose size only oneDNN or cuDNN knows."
    if not found.rehearsed.tells_saved:
        yield "A function in the forward forbids hooks for saved tensors: all that the forward leaves counts as activations."
    if found.rehearsed.graph.recomputes:
        yield "Reentrant checkpoints hide what runs inside: parameters that are used there are taken to get a gradient."
    others = [what for name, what in _OTHERWISE_ON_CUDA.items() if any(name in one for one in seen.operators)]
    others += ["RMSNorm"] if any(isinstance(module, nn.RMSNorm) for module in found.layers.modules) else []
    if found.standins.home.type == "cpu" and others and torch.is_grad_enabled():
        yield f"The activations are those of the CPU. CUDA's kernels keep other tensors for {_list(others)}."
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        yield "Autocast is on: its casts of weights are among the activations, or held otherwise by its cache."


def _about_parameters(found: Found) -> Iterator[str]:
    tied = [f"{also} is {one.path}" for one in found.mine for also in one.also]
    if tied:
        yield f"Counted once: {_list(tied)}."
    pairs = list(zip(found.mine, found.gradients, strict=True))
    for one, grad in pairs:
        if grad and grad.is_sparse:
            rows = f"{grad.rows:,} rows for this input, of {one.tensor.shape[0]:,}"
            yield f"The gradient of {one.path} is sparse: {rows} ({format_bytes(grad.nbytes)}), padding included."
    trained = [(one, grad) for one, grad in pairs if one.kind == PARAMETER and one.tensor.requires_grad]
    unused = [one.path for one, grad in trained if grad is None]
    if unused and len(unused) < len(trained):
        yield f"The outputs do not depend on {_list(unused)}: no gradient, and no optimizer state."
    plain = [one for one in found.mine if one.kind == ATTRIBUTE and one.nbytes]
    if plain:
        size = format_bytes(sum(one.nbytes for one in plain))
        yield f"Counted with the buffers, though not registered: {_list([one.path for one in plain])} ({size})."


def _about_places(found: Found) -> Iterator[str]:
    home = found.standins.home
    given = (tensor.device for tensor in found.standins.originals(found.inputs) if tensor.dim())
    elsewhere = sorted({str(device) for device in given if device.type not in ("meta", home.type)})
    if elsewhere and found.standins.moves_inputs:
        where = f"Inputs lie on {_list(elsewhere)} and the model on {home}"
        yield f"{where}: sized as if they were there, a real call has to move them."
    of_model = {storage._cdata for one in found.mine for storage in storages(one.tensor)}
    outside = {s._cdata: s.nbytes() for tensor in found.rehearsed.watch.seen.outside.values() for s in storages(tensor)}
    strange = {key: nbytes for key, nbytes in outside.items() if key not in of_model}
    if strange:
        size = format_bytes(sum(strange.values()))
        yield f"The forward uses {_count(len(strange), 'tensor')} from outside the model and its inputs ({size}), not counted."
    dense = [tensor for tensor in found.inputs if tensor.layout == torch.strided]
    wide = [tensor for tensor in dense if tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.itemsize]
    if wide:
        yield f"{_count(len(wide), 'input')} of a larger storage count{'s' if len(wide) == 1 else ''} with all of it."
    if len(dense) < len(found.inputs) or any(one.tensor.layout != torch.strided for one in found.mine):
        yield "Sparse tensors take part without their elements: what operators make of those is not counted."
    homes = sorted({str(one.tensor.device) for one in found.mine if one.tensor.device.type != "meta"})
    if len(homes) > 1:
        yield f"The model lies on {_list(homes)}; the figures are of all of them together."


def _about_optimizer(found: Found) -> Iterator[str]:
    elsewhere = found.rehearsed.elsewhere_bytes
    elsewhere += found.states.elsewhere_bytes(found.standins.device_types) if found.states else 0
    if elsewhere:
        yield f"{format_bytes(elsewhere)} more lie on another device than the model and are not counted."
    if found.states and found.states.invented_numbers:
        yield f"{found.states.name} asks tensors for numbers in its step; it was told 1."


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")
