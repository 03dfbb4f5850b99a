"""Inference without a graph, with layers folded and branches merged: values against plain references, and refusals."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from job_runs import prepared, ran, tried
from torch import Tensor, nn

from memlab.errors import DoesNotApply
from memlab.saving_techniques.inference import (
    AcBlock,
    Branches,
    RepVggBlock,
    fuse,
    layers_of,
    layers_that_train,
    merge,
    pairs,
    plain_inference,
    vgg_features,
)
from memlab.saving_techniques.patching import refusing_backward


def off(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


def settled(model: nn.Module) -> nn.Module:
    """With statistics and weights in its BatchNorms that are not those of the start."""
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            for values in (one.running_mean, one.bias):
                values.data.normal_()
            for values in (one.running_var, one.weight):
                values.data.uniform_(0.5, 2)
    return model.eval()


# --- without a graph ---


def test_modes() -> None:
    plain = ran(plain_inference).output
    assert plain.grad_fn is not None
    without, inferred = ran(plain_inference, ["no_grad"]).output, ran(plain_inference, ["inference_mode"]).output
    assert without.grad_fn is None and not without.is_inference() and inferred.is_inference()
    assert torch.equal(plain, without) and torch.equal(plain, inferred)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_eval_keeps_the_graph() -> None:
    before, after = ran(plain_inference, habits=["eval_mode"]), ran(plain_inference, ["eval_mode"])
    assert before.model.training and not after.model.training
    assert before.output.grad_fn is not None and after.output.grad_fn is not None


def test_volatile_changes_nothing_and_warns_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = ran(plain_inference, ["volatile"])
    assert torch.equal(job.output, ran(plain_inference).output) and job.output.grad_fn is not None


def test_backward_works_under_no_grad() -> None:
    plain, wrapped = ran(layers_that_train), ran(layers_that_train, ["no_grad_backward"])
    assert plain.outcome()["digest"] == wrapped.outcome()["digest"]
    with pytest.raises(DoesNotApply, match="has no backward"):
        prepared(plain_inference, "no_grad_backward")


def test_the_same_features_with_a_graph_and_without() -> None:
    habit, job = ran(vgg_features, (), ["feature_lists"]), ran(vgg_features, ["feature_lists"])
    with_graph, without = habit.held[0], job.held[0]
    assert len(with_graph) == len(without) == 4, "the list is that of the last step alone"
    assert all(torch.equal(a, b) for a, b in zip(with_graph, without, strict=True))
    assert all(one.grad_fn is not None for one in with_graph)
    assert all(one.grad_fn is None for one in without)
    assert not any(one._forward_hooks for one in job.model.modules())


def test_layers_are_spread_over_the_model() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(6)))
    found = layers_of(model)
    assert len(found) == 4 and len({id(one) for one in found}) == 4
    assert layers_of(nn.Linear(2, 2)), "a single layer is one to look at"


# --- folded ---


class Residual(nn.Module):
    """One pair can be folded; the other convolution is read by somebody else too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        y = self.conv2(x)
        return self.norm2(y) + y


class Branching(nn.Module):
    """A forward that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.ReLU(), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 1e9 else self.body(x) * 2


@pytest.mark.parametrize(("kind", "pair"), [(Residual, ("conv1", "norm1")), (Branching, ("body.0.0", "body.0.1"))])
def test_only_what_follows_alone_is_folded(kind: type[nn.Module], pair: tuple[str, str]) -> None:
    model, x = settled(kind()), torch.randn(2, 3, 8, 8)
    expected = model(x)
    assert pairs(model) == [pair]
    fuse(model)
    norms = [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)]
    assert isinstance(model.get_submodule(pair[1]), nn.Identity) and len(norms) == 1
    assert off(model(x), expected) < 1e-5


def test_what_is_used_twice_stays() -> None:
    conv, norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    assert pairs(nn.Sequential(conv, norm, conv, nn.BatchNorm2d(4)).eval()) == []
    assert pairs(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 4, 1), norm).eval()) == []
    assert pairs(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()) == []


def test_fusion_says_why_not() -> None:
    with pytest.raises(DoesNotApply, match="training mode"):
        fuse(plain_inference()[0].train())
    with pytest.raises(DoesNotApply, match="no BatchNorm that follows"):
        fuse(nn.Linear(2, 2).eval())


def test_fusion_saves_no_peak_under_no_grad() -> None:
    """What `not_when` says."""
    assert abs(tried(plain_inference, "no_grad").share(tried(plain_inference, "no_grad", "conv_bn_fusion"))) < 0.02


@pytest.mark.parametrize("block", [RepVggBlock, AcBlock])
@pytest.mark.parametrize("width", [4, 8])
def test_merged_branches_give_the_same(block: type[Branches], width: int) -> None:
    model, x = settled(block(width, 8)).double(), torch.randn(2, width, 9, 7, dtype=torch.double)
    assert len(model.branches) == (3 if block is AcBlock or width == 8 else 2)
    assert off(merge(block, model)(x), model(x)) < 1e-6
    whole = nn.Sequential(model, nn.Sequential(model) if width == 8 else nn.ReLU())
    expected = whole.eval()(x)
    assert off(merge(block, whole)(x), expected) < 1e-6
    assert isinstance(whole[0], nn.Conv2d) and (width == 4 or whole[1][0] is whole[0])


def test_branches_of_others_merge_themselves() -> None:
    class Theirs(nn.Module):
        deployed = 0

        def switch_to_deploy(self) -> None:
            self.deployed += 1

    model = nn.Sequential(Theirs(), nn.ReLU()).eval()
    assert merge(RepVggBlock, model) is model and model[0].deployed == 1
    with pytest.raises(DoesNotApply, match="switch_to_deploy"):
        merge(AcBlock, nn.Sequential(nn.ReLU()).eval())
    with pytest.raises(DoesNotApply, match="training mode"):
        merge(RepVggBlock, RepVggBlock(2, 2))


def test_modules_merge_themselves_only_where_there_is_no_block_of_the_kind():
    class Own(nn.Identity):
        calls = 0

        def switch_to_deploy(self) -> None:
            self.calls += 1

    alone, beside = Own(), Own()
    merge(RepVggBlock, nn.Sequential(alone).eval())
    merge(RepVggBlock, nn.Sequential(RepVggBlock(3, 3), beside).eval())
    assert (alone.calls, beside.calls) == (1, 0)


def test_an_emptied_place_in_a_model_that_cannot_be_traced_has_no_pair():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
            self.s.register_module("2", None)

        def forward(self, x: Tensor) -> Tensor:
            return self.s[0](x) if x.sum() > 0 else x

    assert pairs(Branching().eval()) == [("s.0", "s.1")]


def test_a_refused_backward_keeps_nothing_alive():
    def refused() -> weakref.ref[Tensor]:
        y = torch.ones(3, requires_grad=True).exp()
        with pytest.raises(DoesNotApply):
            y.sum().backward()
        return weakref.ref(y)

    with refusing_backward():
        left = refused()
        assert left() is None
