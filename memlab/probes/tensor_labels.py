"""Labels of tensors: which storages are parameters, buffers, gradients, optimizer state or inputs.

Parameters are noted when a module gets them, modules are read when they are first called, gradients when a backward ends,
optimizer state after a step, inputs when an outermost module was called, and everything alive at the start and the end of a
track. No tensor is kept alive: a storage is identified by its address (on the CPU by its id) at a time.

Limits: gradients of tensors of no module and no optimizer are found only if they are alive at the start or end.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from time import time_ns
from typing import Any, NamedTuple

import numpy as np
import torch

from memlab.probes.marks import marker
from memlab.probes.sharded_labels import ShardedLabels
from memlab.references.live_tensors import grad_of, is_leaf, live_tensors
from memlab.references.named_models import modules_and_optimizers
from memlab.torch_internals import dispatch, sharded
from memlab.torch_internals.objects import own_parameters
from memlab.trace.columns import Array, Category
from memlab.trace.trace import Gap

MAX_KEPT = 4_000_000
"""How many (storage, time) pairs are kept; the older half of the snapshots is dropped first."""

LEAVE_ALONE = 8
"""Optimizer state that looks unchanged is read every eighth step."""

MAX_REGISTERED = 200_000
"""How many parameters of modules that were not called yet are kept, the newest."""

BUCKETS_READ = 3
"""In how many first calls of an outermost module the sizes of its buckets are read."""

Tensor, Parameter = torch.Tensor, torch.nn.Parameter
_Pairs = Iterable[tuple[Any, int]]
TensorBase = dispatch.TensorBase


class TensorLabel(NamedTuple):
    """What a storage is for: a category, the path of the module it belongs to, its name, dtype and shape ("" unknown)."""

    category: Category
    module: str = ""
    name: str = ""
    dtype: str = ""
    shape: str = ""


class LabelColumns(NamedTuple):
    """Labels in order of time: moment, storage key, number of the label in `labels`."""

    time_ns: Array
    key: Array
    label: Array
    labels: tuple[TensorLabel, ...]


class LiveTensors(NamedTuple):
    """The tensors and storages that were alive at a time of the Unix clock. It keeps them alive."""

    time_ns: int
    tensors: list[Any]


def storage_key(tensor: Any) -> int:
    """The address of a tensor's storage in the events of a trace, of a DTensor that of this rank; 0 if it has no memory."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        tensor = sharded.local_tensor(tensor)
    try:
        if tensor.is_cuda and not TensorBase.storage_offset(tensor) and (address := TensorBase.data_ptr(tensor)):
            return int(address)  # the storage needs no Python object then
        if tensor.is_cpu:
            return id(TensorBase.untyped_storage(tensor))
        storage = TensorBase.untyped_storage(tensor)
        return 0 if tensor.is_meta else int(storage.data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


class _Known:
    """A known module: a weak reference, its path, and the labels of its parameters and of their gradients."""

    __slots__ = ("labels", "path", "ref")

    def __init__(self, module: Any, path: str) -> None:
        self.ref, self.path = weakref.ref(module), path
        self.labels: dict[str, tuple[int, int]] = {}


class _Stepper:
    """A known optimizer: a weak reference, the labels of its state, and whether it has tensors of no module.

    `seen` is a fingerprint of its state, `skips` how often it was unchanged since.
    """

    __slots__ = ("has_foreign", "kind", "labels", "ref", "seen", "skips")

    def __init__(self, optimizer: Any, has_foreign: bool) -> None:
        self.ref, self.has_foreign, self.kind = weakref.ref(optimizer), has_foreign, type(optimizer).__name__
        self.labels: dict[tuple[int, Any], int] = {}
        self.seen: tuple[Any, ...] = ()
        self.skips = 0

    def may_have_changed(self, state: Any) -> bool:
        """Whether the state has to be read: its length or its ends differ, or it was not read for some steps."""
        looks: tuple[Any, ...] = ()
        if state:
            ends = (next(iter(state.values())), state[next(reversed(state))])
            looks = (len(state), *(id(value) for one in ends if type(one) is dict for value in one.values()))
        self.skips = self.skips + 1 if looks == self.seen else 0
        self.seen = looks
        return self.skips % LEAVE_ALONE == 0


class TensorLabels:
    """Listens to the marker while it has users; one per process, like the marker."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.users = 0
        self._sharded = ShardedLabels(self._label, self._note)
        self._reset()

    def _reset(self) -> None:
        self._labels: dict[TensorLabel, int] = {}
        # Storages, their labels, and the times at which they had them; and the last of these for each source.
        self.snapshots: list[tuple[list[int], list[int], array[int]]] = []
        self._latest: dict[Any, tuple[list[int], list[int], array[int]]] = {}
        self._registered: deque[tuple[int, int, int]] = deque(maxlen=MAX_REGISTERED)  # time, key, label
        self.known: dict[int, _Known] = {}
        self._calls: Counter[int] = Counter()
        self._steppers: dict[int, _Stepper] = {}
        self._buckets: dict[str, dict[int, int]] = {}  # path of a DistributedDataParallel -> sizes
        self._path_of: dict[int, tuple[str, str]] = {}  # id of a parameter -> path of its module, its own path

    def acquire(self) -> None:
        """Start marking and listening, or join the other users."""
        with self._lock:
            marker.acquire()
            self.users += 1
            marker.watch = self
            self._sharded.start()

    def release(self) -> None:
        """Stop with the last user."""
        with self._lock:
            self.users -= 1
            try:
                if not self.users:
                    marker.watch = None
                    self._sharded.stop()
                    self._reset()
            finally:
                marker.release()

    def label_everything(self) -> LiveTensors:
        """Label everything that is alive, by one walk over the heap (50 ms in a large process); failures are counted."""
        live = LiveTensors(time_ns(), list(live_tensors()))
        marker.tell("named_alive")
        marker.tell("strays_alive", live.tensors)
        return live

    def label_at_end(self) -> None:
        """Label everything at the end of a run, which must not be lost: a failing walk is counted as well."""
        marker.tell("named_alive")
        marker.tell("strays_alive", None)

    def label_keys(self, keys: set[int]) -> None:
        """Label these storages; the heap is walked only if no module and no optimizer holds some of them."""
        marker.tell("named_alive")
        named = (key for source in ("gradients", "around") if source in self._latest for key in self._latest[source][0])
        if keys.difference(named):
            marker.tell("strays_alive", None)

    def buckets(self) -> dict[str, tuple[int, ...]]:
        """The path of each DistributedDataParallel -> the sizes of the buckets with copies of its gradients."""
        for known in list(self.known.values()):
            module = known.ref()
            if module is not None:
                self._read_buckets(module, known.path)
        return {path: tuple(sizes) for path, sizes in self._buckets.items() if sizes}

    def optimizers_of_flat(self) -> tuple[str, ...]:
        """The classes of optimizers that step parameters of no module, as the flat ones of ZeRO."""
        return tuple(dict.fromkeys(one.kind for one in list(self._steppers.values()) if one.has_foreign))

    def _read_buckets(self, module: Any, path: str) -> None:
        """Note the sizes of a module's buckets while it is there; they are made once more after the first backward."""
        sizes = sharded.bucket_bytes(module)
        if sizes is not None:
            self._buckets.setdefault(path, {}).update(dict.fromkeys(sizes, 0))

    def gaps(self) -> Iterator[Gap]:
        """What could not be read from the user's objects."""
        for what, times in marker.watch_failures.items():
            yield Gap("objects not asked", f"what some blocks are for is unknown: {what} failed {times} times")

    # --- the log: any thread may write ---------------------------------------------------------------------------------

    def _label(self, category: Category, module: str, name: str, tensor: Any) -> int:
        """The number of a label; dtype and shape are those of the tensor, of a DTensor those on this rank."""
        tensor = sharded.local_tensor(tensor)
        try:
            shape = str(tuple(tensor.shape))
        except RuntimeError:  # a lazy parameter has none yet
            shape = ""
        label = TensorLabel(category, module, name, str(tensor.dtype).removeprefix("torch."), shape)
        return self._labels.setdefault(label, len(self._labels))

    def _note(self, source: Any, pairs: _Pairs) -> None:
        """Log that these tensors have these labels now."""
        known = [(key, label) for tensor, label in pairs if (key := storage_key(tensor))]
        self._note_keys(source, [key for key, _ in known], [label for _, label in known])

    def _note_keys(self, source: Any, keys: list[int], labels: list[int]) -> None:
        """The same with keys. If nothing has changed, only the time is logged."""
        now = time_ns()
        latest = self._latest.get(source)
        if latest is None or latest[0] != keys or latest[1] != labels:
            latest = self._latest[source] = keys, labels, array("q")
            with self._lock:
                self.snapshots.append(latest)
                count = len(self.snapshots)
                if count % 64 == 0 and sum(len(keys) for keys, _, _ in self.snapshots) > MAX_KEPT:
                    del self.snapshots[: count // 2]
                    self._latest.clear()
        latest[2].append(now)

    def columns(self, begin_ns: int, end_ns: int) -> LabelColumns:
        """The labels of a time range."""
        with self._lock:
            snapshots, labels = list(self.snapshots), tuple(self._labels)
        moments = [np.array(times, np.int64) for _, _, times in snapshots]
        moments = [times[(times >= begin_ns) & (times <= end_ns)] for times in moments]
        pairs = sum(len(keys) * len(times) for (keys, _, _), times in zip(snapshots, moments, strict=True))
        share = min(1.0, MAX_KEPT / max(pairs, 1))  # of a very long run, the newest times of each snapshot
        registered = np.array(self._registered.copy(), np.int64).reshape(-1, 3).T
        parts = [registered[:, (registered[0] >= begin_ns) & (registered[0] <= end_ns)]]
        for (keys, numbers, _), times in zip(snapshots, moments, strict=True):
            newest = times[-math.ceil(share * len(times)) :]
            labeled = np.tile(np.array([keys, numbers], np.int64), len(newest))
            parts.append(np.stack([np.repeat(newest, len(keys)), *labeled]))
        time, key, label = np.concatenate(parts, axis=1)
        order = np.argsort(time, kind="stable")
        return LabelColumns(time[order], key[order], label[order], labels)

    # --- callbacks of the marker: these run in the user's steps, and must never fail them--------------------------------

    def registered(self, parameter: Any) -> None:
        """A module got a parameter, which may be converted, and its bytes be freed, before the module is called."""
        if key := storage_key(parameter):
            self._registered.append((time_ns(), key, self._label(Category.PARAMETER, "", "", parameter)))

    def met(self, root: Any) -> None:
        """A module was called for the first time, and not by a known one."""
        self._sharded.start()  # FSDP may have been imported since
        self._note(("module", id(root)), self._meet(root))

    def called(self, root: Any, args: Any, kwargs: Any) -> None:
        """An outermost module was called with these."""
        if self._calls[id(root)] < BUCKETS_READ:
            self._calls[id(root)] += 1
            self._read_buckets(root, marker.path_of(root))
        # A tensor with a graph was computed: between two outermost modules it is an activation.
        given = [one for one in (*_tensors_in(args), *_tensors_in(kwargs)) if one.grad_fn is None]
        if given:
            path = marker.path_of(root)
            pairs = [(one, self._label(Category.INPUT, path, f"input of {path}", one)) for one in given]
            self._note(("input", id(root)), pairs)

    def sharding(self, when: str, name: str, subject: Any) -> None:
        """FSDP gathers parameters or reduces gradients."""
        self._sharded.note(when, name, subject)

    def collective_ended(self, buffer: Any) -> None:
        """A collective copies its result out of a buffer that it had made."""
        label = self._label(Category.TEMPORARY, "", "buffer of a collective", buffer)
        self._note("collective", [(buffer, label)])

    def backward_ended(self) -> None:
        """A backward has ended, and all gradients are there: every one is labeled, so this is written for speed."""
        keys: list[int] = []
        labels: list[int] = []
        for known in list(self.known.values()):
            module = known.ref()
            own = own_parameters(module) if module is not None else None
            if not own:
                continue
            of = known.labels
            for name, parameter in own.items():
                grad = parameter.grad if type(parameter) is Parameter else grad_of(parameter)
                if grad is not None:
                    is_plain = type(grad) is Tensor and grad.is_cuda and not grad.storage_offset()
                    keys.append(grad.data_ptr() if is_plain else storage_key(grad))
                    labels.append((of.get(name) or self._labels_of(known, name, parameter))[1])
        for stepper in list(self._steppers.values()):
            optimizer = stepper.ref()
            if stepper.has_foreign and optimizer is not None:
                for grad, label in self._foreign_gradients(optimizer, stepper):
                    keys.append(storage_key(grad))
                    labels.append(label)
        self._note_keys("gradients", keys, labels)

    def stepping(self, optimizer: Any) -> None:
        """An optimizer is about to step: its parameters are looked at once."""
        stepper = self._steppers.get(id(optimizer))
        if stepper is None or stepper.ref() is not optimizer:
            stepper = self._meet_optimizer(optimizer)
            pairs = [*self._parameters_of(optimizer), *self._foreign_gradients(optimizer, stepper)]
            self._note(("optimizer", id(optimizer)), pairs)
        elif stepper.has_foreign:  # flat ones are made between the backward and the step
            self._note(("foreign", id(optimizer)), self._foreign_gradients(optimizer, stepper))

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped: its state is there."""
        stepper = self._steppers.get(id(optimizer))
        if stepper is not None and stepper.may_have_changed(optimizer.state):
            self._note(("state", id(optimizer)), self._state_of(optimizer, stepper))

    def named_alive(self) -> None:
        """Label what modules and optimizers hold, those known and those that a variable leads to."""
        self._path_of.clear()
        pairs: list[tuple[Any, int]] = []
        found = list(modules_and_optimizers())
        for path, thing in found:
            if issubclass(type(thing), torch.nn.Module):
                marker.know(thing, path)
                self._meet(thing)
        for known in list(self.known.values()):
            module = known.ref()
            pairs += self._own_tensors(module, known) if module is not None else []
        for _, thing in found:
            if issubclass(type(thing), torch.optim.Optimizer) and id(thing) not in self._steppers:
                self._meet_optimizer(thing)
        for stepper in list(self._steppers.values()):
            optimizer = stepper.ref()
            if optimizer is not None:
                pairs += [*self._parameters_of(optimizer), *self._state_of(optimizer, stepper)]
        self.backward_ended()
        self._note("around", pairs)

    def strays_alive(self, tensors: list[Any] | None) -> None:
        """Label parameters, gradients and results of recorded operators among these (None: all alive), without a name."""
        pairs: list[tuple[Any, int]] = []
        for thing in live_tensors() if tensors is None else tensors:
            kind = type(thing)
            if issubclass(kind, torch.UntypedStorage):
                continue
            if issubclass(kind, Parameter) or (kind is not Tensor and sharded.is_parameter(thing)):
                pairs.append((thing, self._label(Category.PARAMETER, "", "", thing)))
            elif thing.requires_grad and not is_leaf(thing):
                pairs.append((thing, self._label(Category.ACTIVATION, "", "", thing)))
            grad = grad_of(thing)
            if grad is not None:
                pairs.append((grad, self._label(Category.GRADIENT, "", "", grad)))
        self._note("strays", pairs)

    def _meet(self, root: Any) -> list[tuple[Any, int]]:
        found: list[tuple[Any, int]] = []
        for module in torch.nn.Module.modules(root):
            known = self.known.get(id(module))
            if known is None or known.ref() is not module:
                known = self.known[id(module)] = _Known(module, marker.path_of(module))
            found += self._own_tensors(module, known)
        return found

    def _own_tensors(self, module: Any, known: _Known) -> Iterator[tuple[Any, int]]:
        for name, parameter in list(own_parameters(module).items()):
            if parameter is not None:
                self._path_of.setdefault(id(parameter), (known.path, f"{known.path}.{name}"))
                yield parameter, self._labels_of(known, name, parameter)[0]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield buffer, self._label(Category.BUFFER, known.path, f"{known.path}.{name}", buffer)

    def _labels_of(self, known: _Known, name: str, parameter: Any) -> tuple[int, int]:
        """The labels of a parameter and of its gradient. A shared one is named after the first module that has it."""
        labels = known.labels.get(name)
        if labels is None:
            module, path = self._path_of.get(id(parameter), (known.path, f"{known.path}.{name}"))
            own = self._label(Category.PARAMETER, module, path, parameter)
            labels = known.labels[name] = own, self._label(Category.GRADIENT, module, f"grad of {path}", parameter)
        return labels

    def _meet_optimizer(self, optimizer: Any) -> _Stepper:
        is_foreign = any(id(parameter) not in self._path_of for _, parameter in _listed(optimizer))
        stepper = self._steppers[id(optimizer)] = _Stepper(optimizer, is_foreign)
        return stepper

    def _path(self, optimizer: Any, place: str, parameter: Any) -> tuple[str, str]:
        return self._path_of.get(id(parameter)) or ("", f"{type(optimizer).__name__} {place}")

    def _parameters_of(self, optimizer: Any) -> Iterator[tuple[Any, int]]:
        for place, parameter in _listed(optimizer):
            yield parameter, self._label(Category.PARAMETER, *self._path(optimizer, place, parameter), parameter)

    def _foreign_gradients(self, optimizer: Any, stepper: _Stepper) -> Iterator[tuple[Any, int]]:
        for place, parameter in _listed(optimizer) if stepper.has_foreign else ():
            grad = grad_of(parameter)
            if grad is not None and id(parameter) not in self._path_of:
                _, path = self._path(optimizer, place, parameter)
                yield grad, self._label(Category.GRADIENT, "", f"grad of {path}", grad)

    def _state_of(self, optimizer: Any, stepper: _Stepper) -> Iterator[tuple[Any, int]]:
        """The tensors of an optimizer's state; runs after each step."""
        labels, places = stepper.labels, dict[int, str]()
        if len(labels) > 100_000:  # parameters come and go, and ids are reused
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
                        label = self._label(Category.OPTIMIZER, module, f"{key or 'state'} of {path}", tensor)
                        labels[id(parameter), key] = label
                    yield tensor, label


def _listed(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """(place, parameter) of everything in an optimizer's groups."""
    for group, content in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(content["params"]):
            yield f"param_groups[{group}]['params'][{index}]", parameter


def _tensors_in(thing: Any, depth: int = 2) -> Iterator[Any]:
    kind = type(thing)
    if issubclass(kind, torch.Tensor):
        yield thing
    elif depth and (issubclass(kind, dict) or kind in (list, tuple)):
        for value in list(dict.values(thing)) if issubclass(kind, dict) else thing:
            yield from _tensors_in(value, depth - 1)


tensor_labels = TensorLabels()
"""The labels of this process."""
