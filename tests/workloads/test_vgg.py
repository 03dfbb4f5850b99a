from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memlab import workloads


@pytest.mark.parametrize(
    ("make", "count", "convolutions"), [(workloads.vgg16, 138_357_544, 13), (workloads.vgg19, 143_667_240, 16)]
)
def test_the_published_models(make: Callable[[], nn.Module], count: int, convolutions: int) -> None:
    with torch.device("meta"):
        model = make()
        scores = model(torch.empty(2, 3, 224, 224))
    assert isinstance(model, nn.Module)
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == convolutions
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == 3
    assert scores.shape == (2, 1000)


def test_fewer_classes_and_other_pictures() -> None:
    with torch.device("meta"):
        model = workloads.vgg16(classes=10)
        assert model(torch.empty(1, 3, 64, 96)).shape == (1, 10)


def test_they_compute() -> None:
    from memlab.workloads.vision import ClassicVgg

    torch.manual_seed(0)
    model = ClassicVgg((8, 0, 16, 0), classes=3).eval()
    x = torch.randn(2, 3, 16, 16)
    assert torch.isfinite(model(x)).all()
    assert not torch.equal(model(x)[0], model(x)[1])
