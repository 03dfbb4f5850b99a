"""Compute the sizes of a model in a child process: its tensors, what one forward keeps, and what an optimizer adds."""

from __future__ import annotations

import dataclasses
import functools
import json
import linecache
import os
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memlab.analysis.step_size import SAVED, SUMS, Layer, Sizes, classic
from memlab.errors import MemlabError
from memlab.prediction.child import Channel, Child
from memlab.prediction.dry_run import prepare
from memlab.prediction.fake_model import (
    ATTRIBUTE,
    PARAMETER,
    FakeCopies,
    FakeTensors,
    ModulePaths,
    storage_bytes,
    tensors_in,
)
from memlab.prediction.fake_step import ForwardFailed, Gradient, Graph, OptimizerState, run_forward, run_step
from memlab.torch_internals.fakes import claim_cuda, fake_mode_is_on
from memlab.torch_internals.frames import OWN_FILES
from memlab.torch_internals.objects import written_model
from memlab.units import format_bytes, listed, number_of

_NAMED = 3
_ELSEWHERE = "Take the model and its inputs to the CPU, or to meta."


def measure(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: Any = None, has_saved: bool = True
) -> dict[str, Any]:
    """The fields of `Sizes` for a model and these inputs, as plain values; nothing is computed, the model does not change.

    With `has_saved` hooks tell what is saved for backward, unless the forward forbids them.
    """
    if not issubclass(type(model), nn.Module):
        raise MemlabError(f"size takes a torch.nn.Module and inputs for it, got {type(model).__name__}.")
    if fake_mode_is_on():
        raise MemlabError("size creates tensors without data itself. Leave the FakeTensorMode before asking for it.")
    prepare()
    child = Child(what="the forward")
    if not child.forks:
        held = [one.tensor for one in ModulePaths(written_model(model)).tensors()]
        if any(tensor.is_cuda for tensor in held + tensors_in(args, kwargs)):
            # A new process would allocate them on the real device.
            raise MemlabError(f"sizes for CUDA need a forked process (Linux). {_ELSEWHERE}")
    outcome = child.run(functools.partial(_sized, model, args, kwargs, optimizer, has_saved, _modes()))
    if outcome.result is None:
        raised = outcome.error
        if raised is not None and raised.name == MemlabError.__name__:
            raise MemlabError(raised.text)
        raise MemlabError(outcome.ended or str(raised))
    facts: dict[str, Any] = json.loads(outcome.result)
    return facts or measure(model, args, kwargs, optimizer, has_saved=False)


def _modes() -> tuple[bool, dict[str, torch.dtype], torch.device, torch.dtype]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds}
    return torch.is_grad_enabled(), autocast, torch.get_default_device(), torch.get_default_dtype()


def _sized(
    model: nn.Module, args: Any, kwargs: Any, optimizer: Any, has_saved: bool, modes: Any, channel: Channel
) -> bytes:
    """In the child: the facts as JSON; empty if hooks for saved tensors are forbidden."""
    has_grad, autocast, device, floats = modes
    if modes != _modes():  # a spawned process has the defaults
        torch.set_default_device(device)
        torch.set_default_dtype(floats)
        for kind, dtype in autocast.items():
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
    with torch.set_grad_enabled(has_grad):
        try:
            sizes = _Step(model, args, kwargs, optimizer, has_saved).sizes()
        except ForwardFailed as failed:
            # PyTorch's message if a function forbids them, as those of torch.func do.
            if has_saved and "saved tensor hooks" in str(failed.args[0]):
                return b"{}"
            with_shapes = any(_is_shape(value) for value in (*args, *kwargs.values()))
            raise MemlabError(_refusal(failed.args[0], written_model(model), with_shapes)) from None
    return json.dumps(dataclasses.asdict(sizes)).encode()


def _is_shape(value: Any) -> bool:
    """A tuple of whole numbers stands for a float32 tensor of that shape."""
    return type(value) in (tuple, torch.Size) and all(type(size) is int for size in value)


def _shaped(value: Any) -> Any:
    if not _is_shape(value):
        return value
    if any(size < 0 for size in value):
        raise MemlabError(f"a shape has no negative sizes, got {tuple(value)}.")
    return torch.empty(value, dtype=torch.float32, device="meta")


class _Step:
    """A training step of a model on fake tensors, before it is turned into figures."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], optimizer: Any, has_saved: bool
    ) -> None:
        self.paths = ModulePaths(written_model(model))
        modules = self.paths.modules
        if any(issubclass(type(module), torch.jit.ScriptModule) for module in modules):
            what = "TorchScript keeps its tensors out of reach"
            raise MemlabError(f"{what}. Ask for the size of the module it was made from.")
        self.is_compiled = any(type(module).__name__ == "OptimizedModule" for module in (model, *modules))
        self.is_compiled |= any(module.__dict__.get("_compiled_call_impl") is not None for module in modules)
        self.is_training = modules[0].training
        self.mine = self.paths.tensors()
        self.fakes = FakeTensors([one.tensor for one in self.mine], tensors_in(args, kwargs))
        if self.fakes.home.type == "cuda":
            if not torch.backends.cuda.is_built():
                raise MemlabError(f"sizes for CUDA need PyTorch's CUDA build. {_ELSEWHERE}")
            claim_cuda()
        copies = FakeCopies(self.fakes, self.fakes.home if self.fakes.moves_inputs else None)
        args, kwargs = (
            copies.of(tuple(map(_shaped, args))),
            copies.of({name: _shaped(one) for name, one in kwargs.items()}),
        )
        self.forward = run_forward(self.paths, self.fakes, args, kwargs, has_saved)
        self.taken = {key for one in self.mine for key in storage_bytes(one.tensor)}
        of_model = {id(self.fakes.of(one.tensor)) for one in self.mine}
        self.inputs = [tensor for tensor in tensors_in(args, kwargs) if id(tensor) not in of_model]
        self.graph = Graph(self.forward)
        self.gradients = [self.graph.gradient(self.fakes.of(one.tensor), one.tensor) for one in self.mine]
        self.parameters = [one for one in self.mine if one.kind == PARAMETER]
        self.state: OptimizerState | None = None
        if optimizer is not None:
            known = self._fake_gradients()
            self.state = run_step(optimizer, [one.tensor for one in self.parameters], self.fakes, known)
        self.elsewhere_bytes = self.forward.elsewhere_bytes + (self.state.elsewhere_bytes if self.state else 0)
        recurrent = any(name in one for one in self.forward.operators for name in _RNN)
        self.is_lower_bound = recurrent and torch.is_grad_enabled()

    def _fake_gradients(self) -> dict[int, Tensor | None]:
        made: dict[int, Tensor | None] = {}
        with self.fakes.mode:
            for one, grad in zip(self.mine, self.gradients, strict=True):
                leaf = self.fakes.of(one.tensor)
                made[id(leaf)] = torch.empty_like(leaf) if grad is not None else None
                if grad is not None and grad.rows:
                    indices = torch.empty(1, grad.rows, dtype=torch.int64, device=leaf.device)
                    values = torch.empty(grad.rows, *leaf.shape[1:], dtype=leaf.dtype, device=leaf.device)
                    made[id(leaf)] = torch.sparse_coo_tensor(indices, values, leaf.shape, check_invariants=False)
        return made

    def sizes(self) -> Sizes:
        """The figures of the step."""
        forward, state, parameters = self.forward, self.state, self.parameters
        of_inputs = [self.graph.gradient(tensor, tensor) for tensor in self.inputs]
        count = sum(one.tensor.numel() for one in parameters)
        behind = storage_bytes(*self.fakes.originals(self.inputs))
        return Sizes(
            model=type(self.paths.modules[0]).__name__,
            device=str(self.fakes.home),
            inputs=tuple(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in self.inputs),
            is_training=self.is_training,
            optimizer=state.name if state else "",
            parameter_count=count,
            trainable_count=sum(one.tensor.numel() for one in parameters if one.tensor.requires_grad),
            parameter_bytes=sum(one.nbytes for one in parameters),
            buffer_bytes=sum(one.nbytes for one in self.mine if one.kind != PARAMETER),
            gradient_bytes=sum(grad.nbytes for grad in [*self.gradients, *of_inputs] if grad),
            optimizer_bytes=sum(state.here.values()) if state else 0,
            input_bytes=sum(nbytes for key, nbytes in behind.items() if key not in self.taken),
            kept=tuple(forward.kept.values()),
            elsewhere_bytes=self.elsewhere_bytes,
            layers=tuple(self._layers()),
            classic=classic(count, forward.layer_outputs, forward.kept),
            is_lower_bound=self.is_lower_bound,
            notes=(*self._about_autograd(), *self._about_parameters(), *self._about_places()),
        )

    def _layers(self) -> Iterator[Layer]:
        sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        layer_of: dict[int | None, str] = {}
        for one, grad in zip(self.mine, self.gradients, strict=True):
            layer_of[id(self.fakes.of(one.tensor))] = one.layer
            row = sums[one.layer]
            row["parameter_bytes" if one.kind == PARAMETER else "buffer_bytes"] += one.nbytes
            row["gradient_bytes"] += grad.nbytes if grad else 0
            row["parameter_count"] += one.tensor.numel() if one.kind == PARAMETER else 0
        for owner, nbytes in self.state.here.items() if self.state else ():
            if owner in layer_of:
                sums[layer_of[owner]]["optimizer_bytes"] += nbytes
        for kept in self.forward.kept.values():
            sums[kept.layer]["activation_bytes"] += kept.nbytes if kept.why == SAVED else 0
        for output in self.forward.layer_outputs:
            sums[output.path]["classic_bytes"] += output.nbytes
        for path, module in self.paths.every:
            if path in sums and any(sums[path][name] for name in SUMS):
                calls, shape = self.forward.calls[path], self.forward.shapes.get(path)
                yield Layer(path, type(module).__name__, calls, shape, **sums[path])

    # --- remarks on the figures, the most important first ---

    def _about_autograd(self) -> Iterator[str]:
        if not torch.is_grad_enabled():
            yield "Gradients are off here (torch.no_grad): autograd keeps nothing, and there are no gradients."
        elif not any(self.gradients):
            yield "No parameter gets a gradient from the outputs of this forward."
        if self.is_lower_bound:
            why = "recurrent layers keep a workspace for backward whose size only oneDNN or cuDNN knows"
            yield f"Activations are a lower bound: {why}."
        if not self.forward.has_saved:
            what = "A function in the forward forbids hooks for saved tensors"
            yield f"{what}: all that the forward leaves counts as activations."
        if self.graph.recomputes:
            yield "Reentrant checkpoints hide what runs inside: parameters that are used there are taken to get a gradient."
        operators = self.forward.operators
        others = [what for name, what in _OTHERWISE_ON_CUDA.items() if any(name in one for one in operators)]
        others += ["RMSNorm"] if any(isinstance(module, nn.RMSNorm) for module in self.paths.modules) else []
        if self.fakes.home.type == "cpu" and others and torch.is_grad_enabled():
            yield f"The activations are those of the CPU. CUDA's kernels keep other tensors for {listed(others, _NAMED)}."
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            yield "Autocast is on: its casts of weights are among the activations, or held otherwise by its cache."

    def _about_parameters(self) -> Iterator[str]:
        tied = [f"{also} is {one.path}" for one in self.mine for also in one.also]
        if tied:
            yield f"Counted once: {listed(tied, _NAMED)}."
        trained: list[tuple[str, Gradient | None]] = []
        for one, grad in zip(self.mine, self.gradients, strict=True):
            if grad and grad.rows:
                rows = f"{grad.rows:,} rows for this input, of {one.tensor.shape[0]:,}"
                size = format_bytes(grad.nbytes)
                yield f"The gradient of {one.path} is sparse: {rows} ({size}), padding included."
            if one.kind == PARAMETER and one.tensor.requires_grad:
                trained.append((one.path, grad))
        unused = [path for path, grad in trained if grad is None]
        if unused and len(unused) < len(trained):
            yield f"The outputs do not depend on {listed(unused, _NAMED)}: no gradient, and no optimizer state."
        plain = [one for one in self.mine if one.kind == ATTRIBUTE and one.nbytes]
        if plain:
            size, names = format_bytes(sum(one.nbytes for one in plain)), listed([one.path for one in plain], _NAMED)
            yield f"Counted with the buffers, though not registered: {names} ({size})."

    def _about_places(self) -> Iterator[str]:
        home, inputs = self.fakes.home, self.inputs
        given = (tensor.device for tensor in self.fakes.originals(inputs) if tensor.dim())
        elsewhere = sorted({str(device) for device in given if device.type not in ("meta", home.type)})
        if elsewhere and self.fakes.moves_inputs:
            where = f"Inputs lie on {listed(elsewhere, _NAMED)} and the model on {home}"
            yield f"{where}: sized as if they were there, a real call has to move them."
        outside = storage_bytes(*self.forward.outside.values())
        if strange := [nbytes for key, nbytes in outside.items() if key not in self.taken]:
            size, count = format_bytes(sum(strange)), number_of(len(strange), "tensor")
            yield f"The forward uses {count} from outside the model and its inputs ({size}), not counted."
        dense = [tensor for tensor in inputs if tensor.layout == torch.strided]
        wide = sum(one.untyped_storage().nbytes() > 2 * one.numel() * one.itemsize for one in dense)
        if wide:
            counts = "counts" if wide == 1 else "count"
            yield f"{number_of(wide, 'input')} of a larger storage {counts} with all of it."
        if len(dense) < len(inputs) or any(one.tensor.layout != torch.strided for one in self.mine):
            yield "Sparse tensors take part without their elements: what operators make of those is not counted."
        homes = sorted({str(one.tensor.device) for one in self.mine if one.tensor.device.type != "meta"})
        if len(homes) > 1:
            yield f"The model lies on {listed(homes, _NAMED)}; the figures are of all of them together."
        if self.elsewhere_bytes:
            size = format_bytes(self.elsewhere_bytes)
            yield f"{size} more lie on another device than the model and are not counted."
        if self.state and self.state.was_asked:
            yield f"{self.state.name} asks tensors for numbers in its step; each was taken to be 1."
        if self.is_compiled:
            yield "Compiled modules are sized as they are written; compiled code keeps other tensors."


_RNN = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
# CPU operator -> a module whose CUDA kernel is known to keep other bytes.
_OTHERWISE_ON_CUDA = {
    "scaled_dot_product": "attention",
    "aten.bernoulli_": "dropout (a mask of one byte an element)",
    "mkldnn_rnn_layer": "recurrent layers",
    "_embedding_bag": "embedding bags",
}


# --- why a forward could not be run without data ---

_THEIRS = (str(Path(torch.__file__).parent) + os.sep, OWN_FILES, "<string", "<frozen")
_MEASURE = "measure a real step with memlab.track()"
_CALL: Any = nn.Module.__call__
_TYPES = " A shape stands for float32; for another type give torch.empty(shape, dtype=..., device='meta')."
_FAILURES = {
    "DataDependentOutputException": ("it asks for a tensor's value ({asks})", f"Take that out of the forward, or {_MEASURE}"),
    "DynamicOutputShapeException":
        ("the size of {operator}'s result depends on values", f"Use a fixed size there, or {_MEASURE}"),
    "UnsupportedOperatorException":
        ("PyTorch knows no sizes for {known}", f"Register a fake kernel for it, or {_MEASURE}"),
    "UnsupportedFakeTensorException":
        ("PyTorch knows no sizes for {known}", f"Register a fake kernel for it, or {_MEASURE}"),
}  # fmt: skip
"""Errors that do not depend on the inputs' dtype: what failed, and what to do about it."""


def _refusal(error: Exception, model: nn.Module, with_shapes: bool) -> str:
    """One line: what, where, and what to do about it; `with_shapes` if inputs were given as shapes."""
    kind = type(error).__name__
    how, hint = "cannot be run without data", _TYPES if with_shapes and kind not in _FAILURES else ""
    operator, message = str(getattr(error, "func", "")), str(error).strip()
    message = message.splitlines()[0].rstrip(".")[:240] if message else "no message"
    what, advice = _FAILURES.get(kind, ("{kind}: {message}", f"Does it run on real inputs? Then {_MEASURE}"))
    if kind == "WrongIndices":
        how, what = "would fail", "{message}"
        advice = "Give it indices: torch.zeros(shape, dtype=torch.long)"
    asks = "item(), bool(), int() or float()" if "_local_scalar_dense" in operator else operator
    what = what.format(asks=asks, operator=operator, known=operator or message, kind=kind, message=message)
    paths, path, place = ModulePaths(model), "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if frame.f_code is _CALL.__code__ and id(module := frame.f_locals["self"]) in paths.paths:
            path = paths.of(module, path)
        elif not file.startswith(_THEIRS):
            is_cell = "ipykernel_" in file or file.startswith("<ipython-input")
            place = f" at line {line} of a cell" if is_cell else f" at {Path(file).name}:{line}"
            place += f" ({source[:80]})" if (source := linecache.getline(file, line).strip()) else ""
    inside = f" in {path}" if path else ""
    return f"the forward of {type(model).__name__} {how}: {what}{inside}{place}. {advice}.{hint}"
