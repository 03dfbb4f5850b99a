"""Fewer bits per number: autocast, everything in bfloat16, float32 instead of numpy's float64, half or int8 at inference.

Autocast halves what matrix products and convolutions read and compute. Weights, their gradients and the optimizer's state stay
in float32, and the 16-bit copies of the weights, kept until autocast ends, come on top. On the CPU
its lists differ from CUDA's. bfloat16 throughout halves those too, and loses an update smaller than the last bit of a weight.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from memlab.errors import DoesNotApply
from memlab.saving_techniques.demos import Serving, linear_stack
from memlab.saving_techniques.patching import must_happen, only_inference, outermost_calls, refusing_backward, to_model
from memlab.saving_techniques.technique import Demo, described
from memlab.torch_internals.objects import own_parameters
from memlab.workloads.job import Job, Parts
from memlab.workloads.nested import mapped

# --- autocast ---

NOTE = (
    "Autocast leaves weights, their gradients and the optimizer's state in float32, keeps a 16-bit copy of each weight until it"
    " ends, and computes sums, means, softmax, norms and losses in float32 on CUDA: in float16 a sum ends at 65,504."
)
SCALE = 2.0**12
"""The initial loss scale. With PyTorch's own 2**16 the first steps of many models overflow, and are skipped."""


def _autocast(job: Job, dtype: torch.dtype) -> None:
    """Autocast casts float32 only; half and double weights are unchanged."""
    floats = {one.dtype for one in job.model.parameters() if one.is_floating_point()}
    if torch.float32 not in floats:
        names = ", ".join(sorted(map(str, floats))) or "no floating point"
        raise DoesNotApply(f"autocast halves float32, and the weights of {type(job.model).__name__} are {names}.")
    job.contexts.append(lambda: torch.autocast(job.device.type, dtype))
    job.notes.append(NOTE)


class _Update:
    """The optimizer as the scaler needs it, whose step is the job's whole update, including what other techniques wrapped.

    A fused optimizer would unscale by itself, using attributes that the scaler sets on its argument: here there are none.
    """

    _step_supports_amp_scaling = False

    def __init__(self, job: Job, update: Any) -> None:
        self._job, self.step = job, update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job.optimizer, name)


def _float16(job: Job) -> None:
    if job.device.type == "cpu" and any(isinstance(one, nn.RNNBase) for one in job.model.modules()):
        raise DoesNotApply("PyTorch has no recurrent layers in float16 on the CPU: use autocast_bf16 there.")
    if job.trains and any(one.is_complex() for one in job.model.parameters()):
        raise DoesNotApply("gradients of complex weights cannot be scaled: use autocast_bf16, which needs no scaler.")
    _autocast(job, torch.float16)
    if not job.trains:
        return
    scaler = torch.amp.GradScaler(job.device.type, init_scale=SCALE)
    backward, update = job.backward, _Update(job, job.update)

    def scaled_backward(loss: Tensor) -> None:
        with torch.enable_grad():  # backward may be called with gradients off; this product is still part of forward
            scaled = scaler.scale(loss)
        backward(scaled)

    def scaled_update() -> None:
        scaler.step(update)  # type: ignore[arg-type]  # the part of an optimizer that it needs
        scaler.update()

    job.backward, job.update = scaled_backward, scaled_update
    job.notes.append("A step whose scaled gradients overflow is skipped; the scale then halves.")


@contextlib.contextmanager
def _patch_autocast() -> Iterator[None]:
    """Autocast around the outermost modules only: around whole steps its copies of weights would outlive the update.

    Around the whole call, as in the code to paste: PyTorch runs the module's hooks under autocast too.
    """

    def call(module: nn.Module, forward: Callable[[], Any]) -> Any:
        first = next((one for one in module.parameters() if one.is_floating_point()), None)
        if first is None or first.dtype != torch.float32:
            return forward()
        cast.append(True)
        with torch.autocast(first.device.type, torch.bfloat16):
            output = forward()
        return output.float() if isinstance(output, Tensor) and output.dtype == torch.bfloat16 else output

    otherwise = "no module with float32 weights was called: autocast has nothing to halve."
    with must_happen(otherwise) as cast, outermost_calls(call):
        yield


# --- another dtype throughout ---

FULL = (torch.float32, torch.float64)


def _converted(value: Any, dtype: torch.dtype, *of: torch.dtype) -> Any:
    """Cast the floats of a batch or an output to another dtype; with `of` only those of these dtypes."""

    def convert(one: Tensor) -> Tensor:
        is_wanted = one.dtype in of if of else one.is_floating_point()
        return one.to(dtype) if is_wanted else one

    return mapped(value, convert)


def _holds(model: nn.Module, *dtypes: torch.dtype) -> bool:
    return any(one.dtype in dtypes for one in (*model.parameters(), *model.buffers()))


def _to_bfloat16(job: Job) -> None:
    if not any(one.dtype == torch.float32 for one in job.model.parameters()):
        raise DoesNotApply(f"{type(job.model).__name__} has no float32 weights to halve.")
    job.model.to(torch.bfloat16)  # each parameter stays the same object: the optimizer keeps using it
    job.batch = _converted(job.batch, torch.bfloat16)
    if (loss := job.loss) is not None:
        job.loss = lambda output, target: loss(_converted(output, torch.float32), _converted(target, torch.float32))
        job.notes.append("The loss is computed in float32: in 16 bits a mean over many positions would stop growing.")


def _to_double(job: Job) -> None:
    """A batch from numpy, whose default is float64, and a model to match."""
    job.batch = _converted(job.batch, torch.float64)
    job.model.double()
    if isinstance(job.loss, nn.Module):  # it may have class weights
        job.loss.double()


def _to_single(job: Job) -> None:
    """Cast float64 to float32; a job without float64 is fine already."""
    for part in (job.model, job.loss):
        if isinstance(part, nn.Module) and _holds(part, torch.float64):
            part.float()
    job.batch = _converted(job.batch, torch.float32, torch.float64)


def _half_of(device: torch.device) -> torch.dtype:
    """The half precision that is fast on the device: bfloat16 has float32's range, float16 three more bits, up to 65504."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def _halve(job: Job) -> None:
    only_inference(job)
    if not _holds(job.model, *FULL):
        raise DoesNotApply("no parameter of the model is float32 or float64.")
    dtype = _half_of(job.device)
    job.model.to(dtype)
    job.batch = _converted(job.batch, dtype, *FULL)


@contextlib.contextmanager
def _patch_halves() -> Iterator[None]:
    seen: set[int] = set()

    def before(module: nn.Module, args: Any) -> Any:
        first = next(module.parameters(), None)
        dtype = _half_of(first.device if first is not None else torch.device("cpu"))
        if id(module) not in seen:
            changed.append(_holds(module, *FULL))
            module.to(dtype)
            seen.update(map(id, module.modules()))
        return _converted(args, dtype, *FULL)

    with must_happen("no module with parameters in float32 was called.") as changed, refusing_backward():
        hook = register_module_forward_pre_hook(before)
        try:
            yield
        finally:
            hook.remove()


# --- int8 ---


class Int8Linear(nn.Module):
    """A linear layer for inference whose weight is int8 with a scale for each row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        largest = torch.maximum(weight.amax(1, keepdim=True), -weight.amin(1, keepdim=True)).float()
        scale = largest.clamp_(min=1e-12).div_(127)  # in float32, as 1e-12 is 0 in float16, and 128 steps would wrap
        self.register_buffer("weight", (weight.float() / scale).round_().to(torch.int8))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the dequantized weight, which is freed at once."""
        return functional.linear(x, self.weight.to(x.dtype).mul_(self.scale), self.bias)


def quantized(model: nn.Module) -> nn.Module:
    """The model with every linear layer in int8, one after another; shared layers stay shared, tied weights are skipped.

    Only linear layers, which hold nearly all weights of a language model.
    """
    uses = Counter(id(one) for module in model.modules() for one in own_parameters(module).values() if one is not None)
    if type(model) is nn.Linear:
        return Int8Linear(model).requires_grad_(False)
    made: dict[int, nn.Module] = {}  # by id, not a list of layers: a reference to one here would keep its weight alive
    for parent in [one for one in model.modules() if type(one) is not nn.Linear]:
        for name in list(parent._modules):
            child = parent._modules[name]
            if type(child) is nn.Linear and uses[id(child.weight)] == 1:
                made[id(child)] = made.get(id(child)) or Int8Linear(child)
                setattr(parent, name, made[id(child)])
    if not made:
        raise DoesNotApply("the model has no nn.Linear with a weight of its own.")
    return model.requires_grad_(False)


# --- the techniques ---


wide_stack = functools.partial(linear_stack, 6, 64, 4096, classes=4)
"""Linear layers and ReLU with far more activations than weights."""


def served() -> Parts:
    """Sixteen wide linear layers that serve a batch under no_grad: weights of 16 MiB, 5 MiB before and after each."""
    layers = (nn.Sequential(nn.Linear(512, 512), nn.ReLU(inplace=True)) for _ in range(16))
    return Serving(*layers, nn.Linear(512, 16)), None, (torch.randn(2560, 512),), None


TECHNIQUES = (
    described("autocast_fp16", Demo(wide_stack), _float16),
    described("autocast_bf16", Demo(wide_stack), lambda job: _autocast(job, torch.bfloat16), patch=_patch_autocast),
    described("float32", Demo("mlp", share=0.45), _to_single, baseline_pattern=_to_double),
    described("pure_bf16", Demo("mlp", share=0.45), _to_bfloat16),
    described("half_inference", Demo(served), _halve, patch=_patch_halves),
    described("int8_weights", Demo(served), **to_model(quantized, only_inference, refusing_backward)),
)
