"""In-place activations: where they are safe, and where they would break or silently change something."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from job_runs import prepared, training, tried
from torch import Tensor, nn
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques import techniques
from memlab.saving_techniques.in_place import changeable, leaky_stack
from memlab.workloads.job import Parts


class Net(nn.Module):
    """One ReLU for each way in which its input can be needed; `safe` names those that may write over theirs."""

    safe = ("after_conv", "after_sum", "after_iadd", "in_chain.1", "twice_safe")

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(3)
        unsafe = ("twice", "pre", "after_sigmoid", "of_input", "after_view", "unused")
        for name in ("after_conv", "after_sum", "after_iadd", "twice_safe", *unsafe):
            setattr(self, name, nn.LeakyReLU(0.1))
        self.in_chain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.LeakyReLU(0.2))
        self.first_in_chain = nn.Sequential(nn.LeakyReLU(0.3), nn.Conv2d(3, 3, 1))
        self.negative = nn.LeakyReLU(-0.5)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.of_input(x)
        x = self.after_conv(self.norm(self.conv1(x)))
        x = self.after_sum(self.conv2(x) + x)
        y = self.conv3(x)
        x = x + self.pre(y) * y  # y is read again
        y = self.norm(self.conv2(x))
        y += x
        x = self.after_iadd(y)
        x = self.after_sigmoid(torch.sigmoid(self.conv1(x)))
        x = self.first_in_chain(self.in_chain(x))
        x = self.twice_safe(self.conv3(self.twice_safe(self.conv3(x))))
        x = self.twice(self.conv1(x)) + self.twice(x)
        x = self.negative(self.conv1(x))
        wide = self.conv2(x)
        x = self.after_view(wide.view(wide.shape)) + wide
        return self.head(x.mean((2, 3)))


class Undrawable(nn.Module):
    """Its forward depends on values, which no graph can be drawn of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.loose, self.conv = Net(), nn.LeakyReLU(0.1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > -1e9:
            x = self.loose(self.conv(x))
        return self.inner(x)


def trained(kind: Callable[[], nn.Module]) -> Callable[[], Parts]:
    def make() -> Parts:
        batch = torch.randn(4, 3, 8, 8), torch.randint(0, 4, (4,))
        return training(kind(), *batch, loss=functional.cross_entropy)

    return make


def names_of(model: nn.Module) -> set[str]:
    found = changeable(model)
    return {name for name, one in model.named_modules() if one in found}


def test_only_the_safe_ones() -> None:
    assert names_of(Net()) == set(Net.safe)
    assert names_of(Undrawable()) == {f"inner.{name}" for name in Net.safe}


@pytest.mark.parametrize("kind", [Net, Undrawable])
def test_results_and_statistics_stay(kind: Callable[[], nn.Module]) -> None:
    assert tried(trained(kind)).same(tried(trained(kind), "in_place"))


def test_the_classic_apply_changes_results_without_a_word() -> None:
    """Why the technique looks first: a short cut that is taken before its activation."""

    class Before(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu, self.head = nn.Conv2d(3, 3, 1), nn.LeakyReLU(0.1), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.head((x + self.relu(x)).mean((2, 3)))

    def careless() -> Parts:
        parts = trained(Before)()
        parts[0].apply(lambda one: setattr(one, "inplace", True) if "ReLU" in type(one).__name__ else None)
        return parts

    assert tried(trained(Before)).off(tried(careless)) > 1e-3
    with pytest.raises(DoesNotApply, match="Before has no ReLU or LeakyReLU"):
        prepared(trained(Before), "in_place")


def test_a_hook_that_may_keep_an_output() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    assert names_of(model) == {"1"}
    hook = model[0].register_forward_hook(lambda module, args, output: None)
    assert names_of(model) == set()
    hook.remove()


def test_drawing_calls_no_hook_and_changes_nothing() -> None:
    model, calls = Net(), []
    for one in model.modules():
        one.register_forward_pre_hook(lambda module, args: calls.append(module))
    before = {key: one.clone() for key, one in model.state_dict().items()}
    changeable(model)
    assert not calls
    assert all(torch.equal(before[key], one) for key, one in model.state_dict().items())


def test_what_is_in_place_already_or_no_relu() -> None:
    for layer in (nn.ReLU(inplace=True), nn.GELU(), nn.Sigmoid(), nn.ELU(), nn.Identity()):
        with pytest.raises(DoesNotApply, match="no ReLU"):
            prepared(trained(lambda layer=layer: nn.Sequential(nn.Conv2d(3, 4, 1), layer)), "in_place")


def test_plain_relu_keeps_its_result_only() -> None:
    """The saving of ReLU is a moment's copy, that of LeakyReLU stays: what not_when says."""

    def with_relu() -> Parts:
        model, optimizer, batch, loss = leaky_stack()
        layers = (nn.ReLU() if isinstance(one, nn.LeakyReLU) else one for one in model)
        return nn.Sequential(*layers), optimizer, batch, loss

    saved = {make: tried(make).share(tried(make, "in_place")) for make in (leaky_stack, with_relu)}
    assert saved[leaky_stack] > 0.3 > 0.15 > saved[with_relu] >= 0
    resnet = workloads["resnet18"].sized("tiny")
    assert abs(tried(resnet).share(tried(resnet, "in_place"))) < 0.01


def test_a_forward_that_asks_whether_gradients_are_on_is_traced_as_training_runs_it():
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.r = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.c(x)
            return self.r(y) + y * y if torch.is_grad_enabled() else self.r(y)

    model = Asking()
    work = model, torch.optim.SGD(model.parameters(), 0.1), (torch.randn(2, 4), torch.randn(2, 4)), nn.MSELoss()
    with pytest.raises(DoesNotApply):
        prepared(lambda: work, "in_place")
    with pytest.raises(DoesNotApply), techniques["in_place"].patch():
        model(x=work[2][0])
    assert not model.r.inplace
