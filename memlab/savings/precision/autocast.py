"""Mixed precision: matrix products and convolutions in 16 bits, weights and reductions in 32.

What is halved is what products read and make. Weights, their gradients and the optimizer's state stay in float32, and the
16-bit copies of the weights, kept until autocast ends, come on top. On the CPU other operators are on autocast's lists than on
CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memlab.errors import DoesNotApply
from memlab.savings.outside import backwards
from memlab.savings.technique import Shown, Technique, close
from memlab.workloads.job import Job, Parts

KEPT = (
    "Autocast leaves weights, their gradients and the optimizer's state in float32, keeps a 16-bit copy of each weight until it"
    " ends, and computes sums, means, softmax, norms and losses in float32 on CUDA: in float16 a sum ends at 65,504."
)


def _refuse_other_dtypes(job: Job) -> None:
    """Autocast casts float32 only; what is half or double already stays as it is."""
    floats = {one.dtype for one in job.model.parameters() if one.is_floating_point()}
    if torch.float32 not in floats:
        found = ", ".join(sorted(map(str, floats))) or "no floating point"
        raise DoesNotApply(f"autocast halves float32, and the weights of {type(job.model).__name__} are {found}.")


def _cast(job: Job, dtype: torch.dtype) -> None:
    _refuse_other_dtypes(job)
    job.contexts.append(lambda: torch.autocast(job.device.type, dtype))
    job.notes.append(KEPT)


def _bfloat16(job: Job) -> None:
    _cast(job, torch.bfloat16)


class _Update:
    """The optimizer as the scaler needs it, whose step is the job's whole update, whatever others wrapped around it.

    A fused optimizer would unscale by itself, told by attributes that the scaler sets on what it is given: here it finds none.
    """

    _step_supports_amp_scaling = False

    def __init__(self, job: Job, update: Any) -> None:
        self._job, self._update = job, update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job.optimizer, name)

    def step(self) -> None:
        """Called unless a gradient is infinite or no number."""
        self._update()


def _float16(job: Job) -> None:
    if job.device.type == "cpu" and any(isinstance(one, nn.RNNBase) for one in job.model.modules()):
        raise DoesNotApply("PyTorch has no recurrent layers in float16 on the CPU: use autocast_bf16 there.")
    if job.trains and any(one.is_complex() for one in job.model.parameters()):
        raise DoesNotApply("gradients of complex weights cannot be scaled: use autocast_bf16, which needs no scaler.")
    _cast(job, torch.float16)
    if not job.trains:
        return
    scaler = torch.amp.GradScaler(job.device.type, init_scale=SCALE)
    backward, update = job.backward, _Update(job, job.update)

    def scaled_update() -> None:
        scaler.step(update)  # type: ignore[arg-type]  # what it needs of an optimizer
        scaler.update()

    def scaled_backward(loss: Tensor) -> None:
        with torch.enable_grad():  # a backward may be called where gradients are off; this product is forward still
            scaled = scaler.scale(loss)
        backward(scaled)

    job.backward = scaled_backward
    job.update = scaled_update
    job.notes.append("A step whose scaled gradients overflow is skipped; the scale then halves.")


SCALE = 2.0**12
"""Where the scale begins. PyTorch's own 2**16 makes the first steps of many models overflow, and those are skipped."""


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Autocast around the outermost modules only: around whole steps its copies of weights would outlive the update."""
    depth, cast, entered = 0, 0, contextlib.ExitStack()

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal depth, cast
        depth += 1
        weights = (one for one in module.parameters() if one.is_floating_point())
        first = next(weights, None) if depth == 1 and not is_backward() else None
        if first is not None and first.dtype == torch.float32:
            cast += 1
            entered.enter_context(torch.autocast(first.device.type, torch.bfloat16))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal depth
        depth -= 1
        if depth or is_backward():
            return None
        entered.close()
        return output.float() if isinstance(output, Tensor) and output.dtype == torch.bfloat16 else None

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        with backwards() as is_backward:
            yield
    finally:
        for hook in hooks:
            hook.remove()
        entered.close()
    if not cast:
        raise DoesNotApply("no module with float32 weights was called: autocast has nothing to halve.")


def wide_stack(layers: int = 6, width: int = 64, rows: int = 4096) -> Parts:
    """Linear layers and ReLU with far more activations than weights."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(layers):
        model.extend([nn.Linear(width, width), nn.ReLU()])
    model.append(nn.Linear(width, 4))
    batch = torch.randn(rows, width), torch.randint(0, 4, (rows,))
    return model, torch.optim.SGD(model.parameters(), 0.1), batch, functional.cross_entropy


_PAPER = "Mixed Precision Training, Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740"
_DOCS = "Automatic Mixed Precision, PyTorch documentation, https://docs.pytorch.org/docs/stable/amp.html"
_NOT_WHEN = (
    " Weights, gradients and optimizer state make most of the peak: they stay in 32 bits, and the 16-bit copies of the weights"
    " come on top. Write `mean` and `sum` of your own on `.float()`: autocast knows torch's functions, not your kernels."
)
_ONE_DTYPE = "a product is computed in one of the two"
_ALL_HALF = "there are no 32-bit weights left to cast from"

TECHNIQUES = (
    Technique(
        name="autocast_fp16",
        idea="Compute products in float16 under autocast, and scale the loss so that small gradients do not become zero.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=close(0.05, "products are rounded to 11 significant bits; BatchNorm over few values makes more of it"),
        price="rounding; a step is skipped whenever a scaled gradient overflows. Faster on cards with tensor cores.",
        not_when="Cards without fast half precision; bf16 needs no scaler where the card has it (capability 8.0 on)."
        + _NOT_WHEN,
        code="""\
scaler = torch.amp.GradScaler("cuda")
for images, labels in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_of(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # skips the step where a gradient is infinite
    scaler.update()
""",
        references=(_PAPER, _DOCS),
        shown=Shown(wide_stack, share=0.25),
        tips=("C4",),
        excludes={
            "autocast_bf16": _ONE_DTYPE,
            "pure_bf16": _ALL_HALF,
            "pure_fp16": _ALL_HALF,
            "step_in_backward": "the scaler looks at all gradients before a step, and there they are gone by then",
        },
        apply=_float16,
    ),
    Technique(
        name="autocast_bf16",
        idea="Compute products in bfloat16 under autocast: half the bytes, the range of float32, and no scaler.",
        attacks=("activation",),
        kind="saving",
        stage="step",
        equality=close(0.05, "products are rounded to 8 significant bits; BatchNorm over few values makes more of it"),
        price="rounding, three bits coarser than float16. Faster on cards from capability 8.0 on.",
        not_when="The card is older than that and only emulates it." + _NOT_WHEN,
        code="""\
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = loss_of(model(images), labels)
loss.backward()  # outside: backward takes the types of the forward by itself
optimizer.step()
""",
        references=(
            "A Study of BFLOAT16 for Deep Learning Training, Kalamkar et al. 2019, https://arxiv.org/abs/1905.12322",
            _DOCS,
        ),
        shown=Shown(wide_stack, share=0.25),
        tips=("C4",),
        excludes={"pure_bf16": _ALL_HALF, "pure_fp16": _ALL_HALF},
        apply=_bfloat16,
        outside=_outside,
    ),
)
