"""Random notebooks: every path is an expression for its tensor, and when all of them are cut the tensor is gone."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from notebook import Notebook, notebook  # noqa: F401

from memlab.references.live_storages import live_storages, paths


class Plain:
    """An object with a dict."""


class Slotted:
    __slots__ = ("a", "b", "c")


class World:
    """Fills a notebook with things in things; tensors stand in many places."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tensors: list[torch.Tensor] = []

    def thing(self, depth: int) -> Any:
        if depth == 0 or self.random.random() < 0.3:
            return self.tensor()
        inside = [self.thing(depth - 1) for _ in range(self.random.randint(1, 3))]
        return self.random.choice((list, deque, self.dict, self.ordered, self.plain, self.slotted, self.module))(inside)

    def tensor(self) -> torch.Tensor:
        if self.tensors and self.random.random() < 0.5:
            known = self.random.choice(self.tensors)
            made = known if self.random.random() < 0.7 else known.detach()[1:]
        else:
            size = self.random.randint(3, 50)
            made = self.random.choice((torch.ones, lambda n: torch.nn.Parameter(torch.ones(n))))(size)
        self.tensors.append(made)
        return made

    def dict(self, inside: list[Any]) -> dict[Any, Any]:
        return {self.random.choice((f"k{i}", i, (i, "x"), i + 0.5, None, "we ird\n")): v for i, v in enumerate(inside)}

    def ordered(self, inside: list[Any]) -> OrderedDict[str, Any]:
        return OrderedDict((f"o{i}", value) for i, value in enumerate(inside))

    def plain(self, inside: list[Any]) -> Plain:
        return self.filled(Plain(), inside)

    def slotted(self, inside: list[Any]) -> Slotted:
        return self.filled(Slotted(), inside)

    def module(self, inside: list[Any]) -> torch.nn.Module:
        return self.filled(torch.nn.Module(), inside)

    @staticmethod
    def filled(thing: Any, inside: list[Any]) -> Any:
        for name, value in zip("abc", inside, strict=False):
            setattr(thing, name, value)
        return thing


def fill(notebook: Notebook, seed: int) -> set[int]:
    """Three variables of things; the keys of all tensors in them."""
    world = World(seed)
    for name in ("one", "two", "three"):
        notebook.names[name] = world.thing(4)
    return {tensor.untyped_storage()._cdata for tensor in world.tensors}


@pytest.mark.sample(3)
# Each looks through the whole heap of this process twice.
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_every_name_is_an_expression_and_cutting_every_path_frees_the_tensor(notebook, seed):
    keys = fill(notebook, seed)
    found = {one.key: one.path for one in live_storages().storages if one.key in keys and one.path}
    assert found
    for key, path in found.items():
        assert notebook.key(path) == key
    name = max((path for path in found.values() if path.startswith(("one", "two", "three"))), key=len)
    gone = weakref.ref(notebook.value(f"{name}.untyped_storage()"))
    every = paths(notebook.value(name))
    for path in every:
        notebook.run(f"{path} = None")
    assert gone() is None, every
