"""What an optimizer keeps: read from its state after one step on parameters and gradients without data."""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.errors import MemlabError
from memlab.seams.fakes import DataDependentOutputException
from memlab.sizes.standins import Copies, StandIns
from memlab.sizes.storages import storages, tensors_in

NAMES = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
_ITEM = torch.ops.aten._local_scalar_dense.default


Grads = Mapping[int, Tensor | None]
"""Stand-ins of the model's parameters, by identity -> their gradient, None where backward gives none."""


@dataclass(frozen=True, slots=True)
class States:
    """The optimizer's class, the bytes it keeps for each parameter (by identity, None: for none of them), and where."""

    name: str
    nbytes: Mapping[tuple[int | None, torch.device], int]
    invented_numbers: bool = False

    def here(self, device_types: set[str]) -> dict[int | None, int]:
        """What lies on the model's devices, by parameter."""
        found: Counter[int | None] = Counter()
        for (owner, device), nbytes in self.nbytes.items():
            found[owner] += nbytes if device.type in device_types else 0
        return dict(found)

    def elsewhere_bytes(self, device_types: set[str]) -> int:
        """What lies on others: Adam counts its steps on the CPU."""
        return sum(nbytes for (_, device), nbytes in self.nbytes.items() if device.type not in device_types)


class AnyNumber(TorchDispatchMode):
    """Answers when an optimizer asks a tensor for a number: sizes do not hang on which one it is."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One where a number is wanted, else what the operator gives."""
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not _ITEM:
                raise
        self.was_asked = True
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def states(choice: Any, parameters: list[Tensor], standins: StandIns, grads: Grads) -> States:
    """Run one step of the chosen optimizer. `parameters` are real, those of other models may be among an instance's."""
    make = _maker(choice, parameters, standins)
    ask = AnyNumber()
    name, reason = _name(choice), ""
    try:
        with standins.mode, ask, torch.no_grad():
            optimizer = make()
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter in mine:
                parameter.grad = _grad(parameter, grads)
            if any(parameter.grad is not None for parameter in mine):
                # Not through the wrapper that runs everybody's step hooks.
                inspect.unwrap(type(optimizer).step)(optimizer)
            return States(type(optimizer).__name__, _kept(optimizer, mine), ask.was_asked)
    except MemlabError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        for parameter in (standins.of(p) for p in parameters):
            parameter.grad = None
    advice = "Leave optimizer out, or measure a real step with memlab.track()."
    raise MemlabError(f"one step of {name} cannot be run without data ({reason[:200]}). {advice}")


def _maker(choice: Any, parameters: list[Tensor], standins: StandIns) -> Callable[[], Optimizer]:
    """How to make the optimizer on stand-ins."""
    if isinstance(choice, Optimizer):
        return lambda: _clone(choice, standins)
    if isinstance(choice, str):
        if choice.lower() not in NAMES:
            known = ", ".join(kind.__name__ for kind in NAMES.values())
            raise MemlabError(f"torch.optim has no optimizer {choice[:60]!r}. It has {known}.")
        choice = NAMES[choice.lower()]
    if not callable(choice):
        wanted = "a class or a name of torch.optim, an optimizer, or a function that makes one of parameters"
        raise MemlabError(f"optimizer is {wanted}; got {type(choice).__name__}.")
    fakes = [standins.of(parameter) for parameter in parameters]

    def make() -> Optimizer:
        made = choice(fakes)
        if not isinstance(made, Optimizer):
            raise MemlabError(
                f"optimizer must make a torch.optim.Optimizer of parameters, it made {type(made).__name__}."
            )
        return made

    return make


def _clone(optimizer: Optimizer, standins: StandIns) -> Optimizer:
    """A twin on stand-ins, before its first step and without the hooks of the original."""
    twin = object.__new__(type(optimizer))
    copies = Copies(standins)
    for name, value in optimizer.__dict__.items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = OrderedDict()
        elif name not in ("step", "state"):  # a scheduler puts a step of its own there
            twin.__dict__[name] = copies.of(value)
    twin.state = defaultdict(dict)
    return twin


def _name(choice: Any) -> str:
    if isinstance(choice, Optimizer):
        return type(choice).__name__
    return choice if isinstance(choice, str) else str(getattr(choice, "__name__", type(choice).__name__))


def _grad(parameter: Tensor, grads: Grads) -> Tensor | None:
    """The gradient of a parameter of the model; one of another model is taken to have one."""
    if id(parameter) in grads:
        return grads[id(parameter)]
    return torch.empty_like(parameter) if parameter.requires_grad else None


def _kept(optimizer: Optimizer, parameters: list[Tensor]) -> dict[tuple[int | None, torch.device], int]:
    """Bytes by parameter and device: the state, then what else the optimizer holds, each storage once."""
    seen = {s._cdata for p in parameters for t in (p, p.grad) if t is not None for s in storages(t)}
    found: defaultdict[tuple[int | None, torch.device], int] = defaultdict(int)
    holders: list[tuple[int | None, Any]] = [(id(key), value) for key, value in optimizer.state.items()]
    for owner, holder in [*holders, (None, optimizer.__dict__)]:
        for tensor in tensors_in(holder):
            for storage in storages(tensor):
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found[owner, tensor.device] += storage.nbytes()
    return dict(found)
