"""Whether pretend CUDA works with this PyTorch: asked once per process, before the first prediction.

It rests on private names of PyTorch (`pretend.patches.PRIVATE`). Where one is gone, or a small program comes out with other
figures than it must, a prediction is refused with the reason. The checks are ordered so that none can abort the process: what
could (backward with a device that C++ takes for CUDA) runs only after it is certain that C++ takes it for meta.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from memlab.errors import PredictionError
from memlab.predictor.pretend import PretendCuda, patches
from memlab.seams.dispatch import TensorBase

_MIB = 1 << 20


def require() -> None:
    """Raise PredictionError if pretend CUDA does not work here."""
    found = problems()
    if found:
        raise PredictionError(
            f"PyTorch {torch.__version__} cannot be predicted by this version of memlab: {found[0]}. "
            "Use a PyTorch from 2.11 to 2.15, or a newer memlab."
        )


@functools.cache
def problems() -> tuple[str, ...]:
    """What does not work, the first thing only; nothing if all is well."""
    missing = patches.missing()
    if missing:
        return (f"it lacks {missing[0]}",)
    card = SimpleNamespace(
        name="self-test", total_bytes=1 << 30, usable_bytes=1 << 30, compute_capability=(8, 0), context_bytes=(0, 0),
        multiprocessors=100,
    )  # fmt: skip
    what = "pretend CUDA could not be switched on"
    try:
        with PretendCuda(card) as pretend:
            for name, check in checks():
                what = name
                check(pretend)
    except Exception as error:
        return (f"{what} ({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no text'})",)
    return ()


def checks() -> Iterator[tuple[str, Callable[[PretendCuda], None]]]:
    """(what it is about, the check), in an order in which none can do harm."""
    yield "tensors on the card are not what C++ must take them for", _tensors
    yield "births and deaths are not seen", _books
    yield "a module does not move", _moves
    yield "backward does not run", _backward
    yield "gradients do not accumulate in place", _accumulation
    yield "an optimizer does not step as on CUDA", _steps
    yield "a full card does not raise OutOfMemoryError", _full
    yield "values are not answered", _answers
    yield "operators that are decomposed have no rules", _rules


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def _bytes(pretend: PretendCuda) -> int:
    pretend.log.settle_deaths()
    return int(pretend.log.allocator.requested_bytes)


def _tensors(pretend: PretendCuda) -> None:
    x = torch.empty(4, device="cuda")
    _check(x.device.type == "cuda" and x.is_cuda, "Python does not see cuda:0")
    _check(not TensorBase.is_cuda.__get__(x) and TensorBase.is_meta.__get__(x), "C++ sees a CUDA device")
    _check(torch._C._dispatch_keys(x).has(torch._C.DispatchKey.CUDA), "the dispatch keys are not those of CUDA")


def _books(pretend: PretendCuda) -> None:
    x = torch.empty(_MIB, dtype=torch.uint8, device="cuda")
    y = (x + 1)[5:].view(-1)
    _check(_bytes(pretend) == 2 * _MIB, f"two tensors of 1 MiB are {_bytes(pretend)} bytes")
    del x, y
    _check(_bytes(pretend) == 0, f"{_bytes(pretend)} bytes stay")


def _moves(pretend: PretendCuda) -> None:
    model = torch.nn.Linear(16, 16)
    weight = model.weight
    model.to("cuda")
    _check(model.weight is weight and weight.is_cuda and weight.is_leaf, "a parameter is another object")
    _check(_bytes(pretend) == (256 + 16) * 4, f"a layer of 1088 bytes is {_bytes(pretend)}")
    model.half().cpu()
    _check(model.weight is weight and _bytes(pretend) == 0, "it does not come back")


def _backward(pretend: PretendCuda) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
    resting = _bytes(pretend)
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    _check(
        all(one.grad is not None and one.grad.is_cuda for one in model.parameters()), "gradients are not on the card"
    )
    _check(_bytes(pretend) == 2 * resting, f"gradients of {resting} bytes are {_bytes(pretend) - resting}")


def _accumulation(pretend: PretendCuda) -> None:
    x = torch.ones(_MIB, device="cuda", requires_grad=True)
    h = x * 1
    out = (h.relu() + h.sigmoid()).sum()
    before = len(pretend.log.born_as)
    out.backward()
    made = len(pretend.log.born_as) - before
    _check(made == 4, f"two ways back to one tensor make {made} gradients instead of 4 (`engine.TENSOR_HELD`)")


def _steps(pretend: PretendCuda) -> None:
    weight = torch.nn.Parameter(torch.zeros(64, device="cuda"))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    _check(optimizer.state[weight]["exp_avg"].is_cuda, "the state is not on the card")
    seen = {str(one) for one in pretend.run.seen}
    _check(any("_foreach_" in one for one in seen), "AdamW does not take the foreach path")


def _full(pretend: PretendCuda) -> None:
    try:
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return
    _check(False, "2 GiB fit on a card of 1 GiB")


def _answers(pretend: PretendCuda) -> None:
    x = torch.randn(4, device="cuda")
    _check(x.sum().item() == 1.0 and x.cpu().tolist() == [1.0] * 4, "unknown values do not read as 1")
    _check(bool(torch.isfinite(x).all()), "tests for infinities fail")
    _check(torch.tensor([3, 4], device="cuda").tolist() == [3, 4], "known values are not known")


def _rules(pretend: PretendCuda) -> None:
    torch.nn.functional.dropout(torch.ones(8, device="cuda", requires_grad=True), 0.5).sum().backward()
    _check(any("native_dropout" in str(one) for one in pretend.run.seen), "dropout is not that of CUDA")
