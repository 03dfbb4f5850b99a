"""The search for living tensors: it finds them, keeps nothing, and harms no thread beside it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import torch

from memlab.references.live_tensors import live_tensors
from memlab.references.named_models import modules_and_optimizers


def test_tensors_gradients_and_storages_are_found_and_not_kept():
    leaf = torch.ones(3, requires_grad=True)
    leaf.sum().backward()
    storage, gone = leaf.untyped_storage(), weakref.ref(leaf)
    found = {id(thing) for thing in live_tensors()}
    assert {id(leaf), id(leaf.grad), id(storage)} <= found
    del leaf, storage
    gc.collect()
    assert gone() is None


FIRST_PARAMETERS = """
import torch
from memlab.references.live_tensors import live_tensors

others = [torch.nn.Parameter] * 2
assert not any(isinstance(thing, torch.nn.Parameter) for thing in live_tensors())
del others
layer = torch.nn.Linear(2, 3)
assert {id(layer.weight), id(layer.bias)} <= {id(thing) for thing in live_tensors()}
"""


def test_the_first_parameters_are_found_where_as_many_other_references_went_away():
    """The reference count of a class does not tell that it has no instances."""
    subprocess.run([sys.executable, "-c", FIRST_PARAMETERS], check=True)


def test_a_thread_that_builds_tuples_is_not_harmed():
    """`tuple(generator)` in another thread fails where somebody holds the half-built tuple when it goes on."""
    failures, rounds, stop = [], [], threading.Event()

    def slowly():
        for number in range(30):
            time.sleep(0)  # another thread may run now
            yield number

    def build() -> None:
        while not stop.is_set():
            try:
                rounds.append(len(tuple(slowly())))
            except SystemError as error:
                failures.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(60):
            for _ in live_tensors():
                pass
    finally:
        stop.set()
        thread.join()
    assert rounds
    assert not failures


class Engine:
    def __init__(self, model):
        self._model = model


class Trainer:
    def __init__(self, model):
        self._engine = Engine(model)


def test_a_module_deep_in_what_a_library_keeps_to_itself_is_called_after_its_class(monkeypatch):
    main = sys.modules["__main__"]
    deep, near = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    monkeypatch.setattr(main, "trainer_of_test", Trainer(deep), raising=False)
    monkeypatch.setattr(main, "engine_of_test", Engine(near), raising=False)
    found = {id(thing): path for path, thing in modules_and_optimizers()}
    assert (found[id(deep)], found[id(near)]) == ("Linear", "engine_of_test._model")
