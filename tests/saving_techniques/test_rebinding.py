"""Names rebound or deleted in forward: what is rewritten, what is not, what it saves with and without gradients."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest
import torch
from job_runs import one_inference, prepared, tried
from torch.nn import functional

from memlab import workloads
from memlab.errors import DoesNotApply
from memlab.saving_techniques.rebinding import NamedUNet, named_unet, with_deletions
from memlab.workloads.job import Parts


def rewritten(a: int, b: int = 2, *rest: int, c: int = 3, **more: int) -> tuple[int, list[str]]:
    first = a + b
    second = first * c
    if second > 100:
        branch = second
        second = branch - 1
    one, two = second, first
    total = one + two - two + len(rest) + len(more)
    alive = [*locals_of()]
    return total, alive


def locals_of() -> list[str]:
    """The caller's names; the function itself must not say `locals`, which stops the rewriting."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return sorted(frame.f_back.f_locals)


def test_names_go_after_their_last_use() -> None:
    new = with_deletions(rewritten)
    assert new is not None
    assert new(5)[0] == rewritten(5)[0] and new(99, 3, 4, c=2, d=1)[0] == rewritten(99, 3, 4, c=2, d=1)[0]
    gone = set(rewritten(5)[1]) - set(new(5)[1])
    assert gone == {"first", "second", "one", "two"}
    assert "branch" in new(99)[1]  # bound in a branch only: never deleted


def with_closure(x: int) -> Any:
    y = x + 1
    return lambda: y


def with_locals(x: int) -> Any:
    y = x + 1
    z = y + 1
    return z, locals()


def tidy_already(x: int) -> int:
    y = x + 1
    z = y * 2
    del y
    return z


def failing(x: int) -> int:
    y = x + 1
    z = y * 2
    w = z // (z - z)
    return w + 1


def test_what_is_left_alone() -> None:
    for one in (with_closure, with_locals, tidy_already, NamedUNet.__init__):
        assert with_deletions(one) is None


def test_errors_show_the_same_lines() -> None:
    new = with_deletions(failing)
    assert new is not None
    places = []
    for one in (failing, new):
        with pytest.raises(ZeroDivisionError) as caught:
            one(1)
        places.append([(at.filename, at.lineno, at.line, at.name) for at in traceback.extract_tb(caught.tb)][1:])
    assert places[0] == places[1]


def training() -> Parts:
    model, _, batch, _ = named_unet()
    model.requires_grad_(True)
    return model, torch.optim.SGD(model.parameters(), 0.1), (*batch, torch.randn(4, 2, 64, 64)), functional.mse_loss


def test_with_gradients_autograd_keeps_it_all_the_same() -> None:
    shares = {}
    for make in (named_unet, training):
        plain, changed = tried(make), tried(make, "rebinding")
        assert plain.same(changed)
        shares[make] = plain.share(changed)
    assert shares[named_unet] > 0.5 > 0.15 > shares[training] >= 0


def test_the_unet_of_the_workloads() -> None:
    make = workloads["unet"].sized("tiny", side=32)
    plain, changed = tried(make), tried(make, "rebinding")
    assert plain.same(changed) and plain.share(changed) < 0.15


def test_the_users_class_is_left_alone() -> None:
    forward, code = NamedUNet.forward, NamedUNet.forward.__code__
    job = prepared(named_unet, "rebinding")
    job.run()
    assert "forward" in vars(job.model)
    assert NamedUNet.forward is forward and forward.__code__ is code


def test_nothing_to_delete() -> None:
    with pytest.raises(DoesNotApply, match="no forward of Sequential holds a name"):
        prepared(one_inference, "rebinding")
