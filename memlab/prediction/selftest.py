"""Check that fake CUDA works with this PyTorch, once per process, before the first prediction.

Predictions run in children: once one of them has passed, those that are forked later inherit that and check nothing.

If a private name of PyTorch is missing, or a small program has wrong figures, predictions are refused with the reason.
What could abort the process (backward with a device that C++ takes for CUDA) runs only after a check that C++ takes it for
meta.
"""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace

import torch
from torch import nn

from memlab.errors import PredictionError
from memlab.fake_cuda import FakeCuda
from memlab.torch_internals import cuda_names, private_names
from memlab.torch_internals.dispatch import TensorBase

_MIB = 1 << 20
PASSED = threading.Event()
"""Set once a child of this process has passed."""


def require() -> None:
    """Raise PredictionError if fake CUDA does not work here."""
    found = () if PASSED.is_set() else problems()
    if found:
        raise PredictionError(
            f"PyTorch {torch.__version__} cannot be predicted by this version of memlab: {found[0]}. "
            "Use a PyTorch from 2.11 to 2.15, or a newer memlab."
        )


def passed() -> None:
    """Note that a child of this process has passed."""
    PASSED.set()


@functools.cache
def problems() -> tuple[str, ...]:
    """The first failing check, if any."""
    missing = private_names.missing(private_names.FAKE_CUDA)
    if missing:
        return (f"it lacks {missing[0]}",)
    card = SimpleNamespace(
        name="self-test", total_bytes=1 << 30, usable_bytes=1 << 30, compute_capability=(8, 0), context_bytes=(0, 0),
        multiprocessors=100,
    )  # fmt: skip
    what = "fake CUDA could not be switched on"
    try:
        with FakeCuda(card) as fake:
            for what, check in _CHECKS.items():  # noqa: B007 (said where one fails)
                check(fake)
    except Exception as error:
        text = str(error).splitlines()[0][:200] if str(error) else "no text"
        return (f"{what} ({type(error).__name__}: {text})",)
    return ()


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def _bytes(fake: FakeCuda) -> int:
    fake.log.record_frees()
    return int(fake.log.allocator.requested_bytes)


def _tensors(fake: FakeCuda) -> None:
    x = torch.empty(4, device="cuda")
    _check(x.device.type == "cuda" and x.is_cuda, "Python does not see cuda:0")
    _check(not TensorBase.is_cuda.__get__(x) and TensorBase.is_meta.__get__(x), "C++ sees a CUDA device")
    _check(cuda_names.dispatches_to_cuda(x), "the dispatch keys are not those of CUDA")


def _books(fake: FakeCuda) -> None:
    x = torch.empty(_MIB, dtype=torch.uint8, device="cuda")
    y = (x + 1)[5:].view(-1)
    _check(_bytes(fake) == 2 * _MIB, f"two tensors of 1 MiB are {_bytes(fake)} bytes")
    del x, y
    _check(_bytes(fake) == 0, f"{_bytes(fake)} bytes stay")


def _moves(fake: FakeCuda) -> None:
    model = nn.Linear(16, 16)
    weight = model.weight
    model.to("cuda")
    _check(model.weight is weight and weight.is_cuda and weight.is_leaf, "a parameter is another object")
    _check(_bytes(fake) == (256 + 16) * 4, f"a layer of 1088 bytes is {_bytes(fake)}")
    model.half().cpu()
    _check(model.weight is weight and _bytes(fake) == 0, "it does not come back")


def _backward(fake: FakeCuda) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    resting = _bytes(fake)
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    are_there = all(one.grad is not None and one.grad.is_cuda for one in model.parameters())
    _check(are_there, "gradients are not on the card")
    _check(_bytes(fake) == 2 * resting, f"gradients of {resting} bytes are {_bytes(fake) - resting}")


def _accumulation(fake: FakeCuda) -> None:
    x = torch.ones(_MIB, device="cuda", requires_grad=True)
    h = x * 1
    out = (h.relu() + h.sigmoid()).sum()
    before = len(fake.log.born_as)
    out.backward()
    made = len(fake.log.born_as) - before
    text = f"two ways back to one tensor make {made} gradients instead of 4 (`gradient_accumulation.TENSOR_HELD`)"
    _check(made == 4, text)


def _steps(fake: FakeCuda) -> None:
    weight = nn.Parameter(torch.zeros(64, device="cuda"))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    _check(optimizer.state[weight]["exp_avg"].is_cuda, "the state is not on the card")
    _check(any("_foreach_" in str(one) for one in fake.dispatcher.seen), "AdamW does not take the foreach path")


def _full(fake: FakeCuda) -> None:
    try:
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return
    _check(False, "2 GiB fit on a card of 1 GiB")


def _answers(fake: FakeCuda) -> None:
    x = torch.randn(4, device="cuda")
    _check(x.sum().item() == 1.0 and x.cpu().tolist() == [1.0] * 4, "unknown values do not read as 1")
    _check(bool(torch.isfinite(x).all()), "tests for infinities fail")
    _check(torch.tensor([3, 4], device="cuda").tolist() == [3, 4], "known values are not known")


def _rules(fake: FakeCuda) -> None:
    nn.functional.dropout(torch.ones(8, device="cuda", requires_grad=True), 0.5).sum().backward()
    _check(any("native_dropout" in str(one) for one in fake.dispatcher.seen), "dropout is not that of CUDA")


_CHECKS = {
    "tensors on the card are not what C++ must take them for": _tensors,
    "births and deaths are not seen": _books,
    "a module does not move": _moves,
    "backward does not run": _backward,
    "gradients do not accumulate in place": _accumulation,
    "an optimizer does not step as on CUDA": _steps,
    "a full card does not raise OutOfMemoryError": _full,
    "values are not answered": _answers,
    "operators that are decomposed have no rules": _rules,
}
"""Failure -> check, in an order that is safe."""
