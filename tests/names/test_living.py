"""The search for living tensors: it finds them, keeps nothing, and harms no thread beside it."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import torch

from memlab.names.living import living_tensors


def test_tensors_gradients_and_storages_are_found():
    leaf = torch.ones(3, requires_grad=True)
    leaf.sum().backward()
    found = {id(thing) for thing in living_tensors()}
    assert {id(leaf), id(leaf.grad)} <= found


def test_nothing_is_kept():
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    assert list(living_tensors())
    del tensor
    gc.collect()
    assert gone() is None


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
            for _ in living_tensors():
                pass
    finally:
        stop.set()
        thread.join()
    assert rounds
    assert not failures
