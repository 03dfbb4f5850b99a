"""Claims: which storages are parameters, buffers, gradients, optimizer state or inputs, told from the objects themselves.

Modules are asked when they are met, gradients when a backward ends, state when an optimizer has stepped, inputs when an
outermost module was called, and everything that can be found at the start and at the end of a track. No tensor is kept alive:
what is kept are the identities of storages (addresses on accelerators, ids of storages on the CPU) at moments.

Limits: gradients of tensors that belong to no module and no optimizer are found only if they are alive at the start or end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memlab.names.living import grad_of, living_tensors
from memlab.names.roots import modules_and_optimizers
from memlab.probes.claim_log import ClaimLog, storage_key
from memlab.probes.marks import marker
from memlab.trace.columns import Category
from memlab.trace.trace import Gap

LEAVE_ALONE = 8
"""An optimizer's state that seems unchanged is gone through at every eighth step."""

Parameter = torch.nn.Parameter
_Pairs = list[tuple[Any, int]]


class _Known:
    """A module that was met: a weak reference, its path, and the labels of its parameters and of their gradients."""

    __slots__ = ("labels", "path", "ref")

    def __init__(self, module: Any, path: str) -> None:
        self.ref, self.path = weakref.ref(module), path
        self.labels: dict[str, tuple[int, int]] = {}


class _Stepper:
    """An optimizer that was met: a weak reference, the labels of its state, and whether it has tensors of no module.

    `seen` is what its state looked like when it was last gone through, `skips` how often that was not needed since.
    """

    __slots__ = ("has_foreign", "labels", "ref", "seen", "skips")

    def __init__(self, optimizer: Any, has_foreign: bool) -> None:
        self.ref, self.has_foreign = weakref.ref(optimizer), has_foreign
        self.labels: dict[tuple[int, Any], int] = {}
        self.seen: tuple[Any, ...] = ()
        self.skips = 0

    def may_have_changed(self, optimizer: Any) -> bool:
        """Whether the state has to be gone through: its ends are others, or it was left alone for a while."""
        looks = _looks_of(optimizer.state)
        self.skips = self.skips + 1 if looks == self.seen else 0
        self.seen = looks
        return self.skips % LEAVE_ALONE == 0


class Claims:
    """Listens to the marker while somebody uses it; one per process, as the marker is."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.users = 0
        self.log = ClaimLog()
        self._reset()

    def _reset(self) -> None:
        self.log.clear()
        self._known: dict[int, _Known] = {}
        self._steppers: dict[int, _Stepper] = {}
        self._path_of: dict[int, tuple[str, str]] = {}  # id of a parameter -> path of its module, its own path

    def acquire(self) -> None:
        """Begin to listen, or join those who do."""
        with self._lock:
            self.users += 1
            marker.watch = self

    def release(self) -> None:
        """Stop with the last user."""
        with self._lock:
            self.users -= 1
            if not self.users:
                marker.watch = None
                self._reset()

    # --- what the marker tells: these run in the user's steps, and must never fail them ----------------------------------

    def met(self, root: Any) -> None:
        """A module was called for the first time, from outside of any that was known."""
        found = self._meet(root)
        self.log.note(("module", id(root)), found)

    def called(self, root: Any, args: Any, kwargs: Any) -> None:
        """An outermost module was called with these."""
        # What has a graph was computed: between two outermost modules it is an activation.
        given = [one for one in (*_tensors_in(args), *_tensors_in(kwargs)) if one.grad_fn is None]
        if given:
            path = marker.path_of(root)
            pairs = [(one, self.log.label(Category.INPUT, path, f"input of {path}", one)) for one in given]
            self.log.note(("input", id(root)), pairs)

    def backward_ended(self) -> None:
        """Autograd has finished: gradients are there, and nobody has cleared them."""
        self.log.note_keys("gradients", *self._gradients())

    def stepping(self, optimizer: Any) -> None:
        """An optimizer is about to step: its parameters are looked at once."""
        stepper = self._steppers.get(id(optimizer))
        if stepper is None or stepper.ref() is not optimizer:
            stepper = self._meet_optimizer(optimizer)
            pairs = [*self._parameters_of(optimizer), *self._foreign_gradients(optimizer, stepper)]
            self.log.note(("optimizer", id(optimizer)), pairs)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped: its state is there."""
        stepper = self._steppers.get(id(optimizer))
        if stepper is not None and stepper.may_have_changed(optimizer):
            self.log.note(("state", id(optimizer)), list(self._state_of(optimizer, stepper)))

    def look_around(self) -> None:
        """Note everything that is alive now; what fails there is counted."""
        marker.tell("everything_alive")

    def everything_alive(self) -> None:
        """Of modules and optimizers by name, then parameters and gradients of nobody."""
        self._path_of.clear()
        pairs: _Pairs = []
        found = list(modules_and_optimizers())
        for path, thing in found:
            if issubclass(type(thing), torch.nn.Module):
                marker.know(thing, path)
                self._meet(thing)
        for known in list(self._known.values()):
            module = known.ref()
            pairs += self._own_tensors(module, known) if module is not None else []
        for _, thing in found:
            if issubclass(type(thing), torch.optim.Optimizer) and id(thing) not in self._steppers:
                self._meet_optimizer(thing)
        for stepper in list(self._steppers.values()):
            optimizer = stepper.ref()
            if optimizer is not None:
                pairs += [*self._parameters_of(optimizer), *self._state_of(optimizer, stepper)]
        self.log.note_keys("gradients", *self._gradients())
        self.log.note("around", [*pairs, *self._strays()])

    # --- modules --------------------------------------------------------------------------------------------------------

    def _meet(self, root: Any) -> _Pairs:
        """Know a module and all below it; what they hold themselves."""
        found: _Pairs = []
        for module in torch.nn.Module.modules(root):
            known = self._known.get(id(module))
            if known is None or known.ref() is not module:
                known = self._known[id(module)] = _Known(module, marker.path_of(module))
            found += self._own_tensors(module, known)
        return found

    def _own_tensors(self, module: Any, known: _Known) -> _Pairs:
        """The parameters and buffers of one module, without its children's."""
        found: _Pairs = []
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                self._path_of.setdefault(id(parameter), (known.path, f"{known.path}.{name}"))
                found.append((parameter, self._labels_of(known, name, parameter)[0]))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                found.append((buffer, self.log.label(Category.BUFFER, known.path, f"{known.path}.{name}", buffer)))
        return found

    def _labels_of(self, known: _Known, name: str, parameter: Any) -> tuple[int, int]:
        """The labels of a parameter and of its gradient. A shared one is called after where it was met first."""
        labels = known.labels.get(name)
        if labels is None:
            module, path = self._path_of.get(id(parameter), (known.path, f"{known.path}.{name}"))
            own = self.log.label(Category.PARAMETER, module, path, parameter)
            labels = known.labels[name] = own, self.log.label(Category.GRADIENT, module, f"grad of {path}", parameter)
        return labels

    def _gradients(self) -> tuple[list[int], list[int]]:
        """Keys and labels of every gradient there is; runs after each backward, so it is written for speed."""
        keys: list[int] = []
        labels: list[int] = []
        for known in list(self._known.values()):
            module = known.ref()
            if module is None or not module._parameters:
                continue
            of = known.labels
            for name, parameter in module._parameters.items():
                grad = parameter.grad if type(parameter) is Parameter else grad_of(parameter)
                if grad is not None:
                    is_plain = grad.is_cuda and not grad.storage_offset()
                    keys.append(grad.data_ptr() if is_plain else storage_key(grad))
                    labels.append((of.get(name) or self._labels_of(known, name, parameter))[1])
        for stepper in list(self._steppers.values()):
            optimizer = stepper.ref()
            if stepper.has_foreign and optimizer is not None:
                for grad, label in self._foreign_gradients(optimizer, stepper):
                    keys.append(storage_key(grad))
                    labels.append(label)
        return keys, labels

    # --- optimizers -------------------------------------------------------------------------------------------------------

    def _meet_optimizer(self, optimizer: Any) -> _Stepper:
        mine = [id(parameter) for _, parameter in _listed(optimizer)]
        stepper = _Stepper(optimizer, any(one not in self._path_of for one in mine))
        self._steppers[id(optimizer)] = stepper
        return stepper

    def _path(self, optimizer: Any, place: str, parameter: Any) -> tuple[str, str]:
        """The module and the path of a parameter that an optimizer lists at `place`."""
        return self._path_of.get(id(parameter)) or ("", f"{type(optimizer).__name__} {place}")

    def _parameters_of(self, optimizer: Any) -> Iterator[tuple[Any, int]]:
        for place, parameter in _listed(optimizer):
            module, path = self._path(optimizer, place, parameter)
            yield parameter, self.log.label(Category.PARAMETER, module, path, parameter)

    def _foreign_gradients(self, optimizer: Any, stepper: _Stepper) -> Iterator[tuple[Any, int]]:
        for place, parameter in _listed(optimizer) if stepper.has_foreign else ():
            grad = grad_of(parameter)
            if grad is not None and id(parameter) not in self._path_of:
                _, path = self._path(optimizer, place, parameter)
                yield grad, self.log.label(Category.GRADIENT, "", f"grad of {path}", grad)

    def _state_of(self, optimizer: Any, stepper: _Stepper) -> Iterator[tuple[Any, int]]:
        """The tensors of an optimizer's state; runs after each step."""
        labels, places = stepper.labels, dict[int, str]()
        if len(labels) > 100_000:  # parameters that come and go: their ids are used again
            labels.clear()
        for parameter, values in list(optimizer.state.items()):
            if type(values) is not dict:
                values = {"": values}
            for key, value in values.items():
                for tensor in (value,) if type(value) is torch.Tensor else _tensors_in(value):
                    label = labels.get((id(parameter), key))
                    if label is None:
                        places = places or {id(one): place for place, one in _listed(optimizer)}
                        module, path = self._path(optimizer, places.get(id(parameter), "state"), parameter)
                        label = self.log.label(Category.OPTIMIZER, module, f"{key or 'state'} of {path}", tensor)
                        labels[id(parameter), key] = label
                    yield tensor, label

    # --- notes ------------------------------------------------------------------------------------------------------------

    def _strays(self) -> Iterator[tuple[Any, int]]:
        """Parameters, gradients and results of recorded operators, whoever they belong to; a label with a name wins."""
        for thing in living_tensors():
            kind = type(thing)
            if issubclass(kind, torch.UntypedStorage):
                continue
            if issubclass(kind, Parameter):
                yield thing, self.log.label(Category.PARAMETER, "", "", thing)
            elif thing.requires_grad and not thing.is_leaf:
                yield thing, self.log.label(Category.ACTIVATION, "", "", thing)
            grad = grad_of(thing)
            if grad is not None:
                yield grad, self.log.label(Category.GRADIENT, "", "", grad)

    def gaps(self) -> Iterator[Gap]:
        """What could not be asked of the user's objects."""
        for what, times in marker.watch_failures.items():
            yield Gap("objects not asked", f"what some blocks are for is unknown: {what} failed {times} times")


def _looks_of(state: Any) -> tuple[Any, ...]:
    """What tells cheaply whether an optimizer's state may have changed: its length, its first and its last tensors."""
    if not state:
        return ()
    first, last = next(iter(state.values())), state[next(reversed(state))]
    values = [value for one in (first, last) if type(one) is dict for value in one.values()]
    return (len(state), *map(id, values))


def _listed(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """(place, parameter) of everything in an optimizer's groups."""
    for group, content in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(content["params"]):
            yield f"param_groups[{group}]['params'][{index}]", parameter


def _tensors_in(thing: Any, depth: int = 2) -> Iterator[Any]:
    """The tensors in a value: itself, or in lists, tuples and dicts of it."""
    kind = type(thing)
    if issubclass(kind, torch.Tensor):
        yield thing
    elif depth and issubclass(kind, dict):
        for value in list(dict.values(thing)):
            yield from _tensors_in(value, depth - 1)
    elif depth and kind in (list, tuple):
        for value in thing:
            yield from _tensors_in(value, depth - 1)


claims = Claims()
"""The claims of this process."""
