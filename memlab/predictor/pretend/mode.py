"""The dispatch mode: operators on host tensors run for real, the others come to the desk; who makes what where."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.predictor.pretend import blanks
from memlab.predictor.pretend.run import Run
from memlab.predictor.pretend.tensors import PretendTensor, bare, with_index

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class PretendMode(TorchDispatchMode):
    """Sees every operator of its thread that no other mode kept for itself."""

    supports_higher_order_operators = True

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._kinds: dict[Any, str] = {(): "host"}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the handler, 1 microsecond per operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; an error leaves without the frames that hold its arguments, which on CUDA nobody holds."""
        try:
            return self._send(func, types, args, kwargs)
        except BaseException as problem:
            error = bare(problem)
        try:
            raise error
        finally:  # a frame that holds its own error keeps all frames alive until the garbage is collected
            del args, kwargs, error

    def _send(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Send an operator to where it belongs."""
        kind = self._kinds.get(types) or self._kind(types)
        if kind == "pretend":
            return self.run.dispatch(func, types, args, kwargs)
        if kind == "foreign":
            return NotImplemented
        kwargs = kwargs or {}
        if not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and self.run.facts(func).is_composite:
            return self.run.dispatch(func, types, args, kwargs)  # nothing has decomposed it yet
        device = kwargs.get("device")
        if device is not None and device.type != "cpu" and self._is_for_card(device, args):
            return self.run.dispatch(func, types, args, kwargs)
        return blanks.host(func, args, kwargs, self.run)

    def _kind(self, types: Any) -> str:
        """Of tensor classes: those of other libraries unwrap themselves first."""
        if any(one not in _PLAIN and not issubclass(one, PretendTensor) and _dispatches(one) for one in types):
            kind = "foreign"
        elif any(issubclass(one, PretendTensor) for one in types):
            kind = "pretend"
        else:
            kind = "host"
        self._kinds[types] = kind
        return kind

    def _is_for_card(self, device: Any, args: Any) -> bool:
        """Whether a tensor on "cuda" or "meta" is one of the card.

        C++ makes tensors "where this one is", and takes pretend tensors for meta ones; user code may mean it.
        """
        if device.type != "meta":
            return bool(device.type == "cuda")
        if torch._C._current_autograd_node() is not None:
            return True
        return not (Asked.for_meta or any(isinstance(one, torch.Tensor) for one in args))


def _dispatches(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


class Asked:
    """Whether the user's code is inside a call that names the meta device."""

    for_meta = 0


def asking(function: Any) -> Any:
    """A factory of PyTorch's that notes when it is asked for the meta device by name.

    "cuda" gets its index here: C++ would ask the driver for it (`torch.tensor`, ATen/native/TensorConversions.cpp).
    """

    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            return function(*args, **kwargs)
        kwargs["device"] = device = with_index(device)
        if device.type != "meta":
            return function(*args, **kwargs)
        Asked.for_meta += 1
        try:
            return function(*args, **kwargs)
        finally:
            Asked.for_meta -= 1

    factory.__name__, factory.__doc__ = function.__name__, function.__doc__
    return factory


def device_context() -> dict[str, Any]:
    """The same for `with torch.device(...)` and `torch.set_default_device`, which name the device to factories."""
    context = _device.DeviceContext
    begin, handle = context.__init__, context.__torch_function__

    def __init__(self: Any, device: Any) -> None:
        begin(self, with_index(device))

    def __torch_function__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type != "meta":
            return handle(self, func, types, args, kwargs)
        Asked.for_meta += 1
        try:
            return handle(self, func, types, args, kwargs)
        finally:
            Asked.for_meta -= 1

    return {"__init__": __init__, "__torch_function__": __torch_function__}


def factories() -> dict[str, Any]:
    """The factories of the module torch, by name."""
    found = {}
    for function in _device._device_constructors():
        name = getattr(function, "__name__", "")
        if vars(torch).get(name) is function:
            found[name] = asking(function)
    return found
