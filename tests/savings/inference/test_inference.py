"""Inference without a graph, in fewer bits, with layers folded: values against plain references, and refusals."""

from __future__ import annotations

import io
import itertools
import warnings

import pytest
import torch
from jobbing import tried
from torch import Tensor, nn

from memlab.errors import DoesNotApply, MemlabError
from memlab.savings import techniques
from memlab.savings.inference.branches import AcBlock, Branches, RepVggBlock, merge
from memlab.savings.inference.fusion import fuse, pairs
from memlab.savings.inference.grad import layers_that_train, pictures
from memlab.savings.inference.half import Served
from memlab.savings.inference.int8 import Int8Linear, quantized
from memlab.workloads.job import Job, seeded

INFERENCE_ALONE = (
    *("no_grad", "inference_mode", "half_inference", "int8_weights", "dynamic_quantization"),
    *("conv_bn_fusion", "repvgg_merge", "acnet_merge", "eval_mode"),
)


def served():
    return Served(64, 4), None, (torch.randn(32, 64),), None


def job_of(make, names=(), habits=(), steps: int = 2) -> Job:
    with seeded():
        job = Job("cpu", steps)
        techniques.prepare(job, make, names, habits)
        job.run()
    return job


def off(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().float(), expected.detach().float()
    return float((got - expected).abs().max() / expected.abs().max())


def settled(model: nn.Module) -> nn.Module:
    """With statistics and weights in its BatchNorms that are not those of the start."""
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            for values in (one.running_mean, one.bias):
                values.data.normal_()
            for values in (one.running_var, one.weight):
                values.data.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize("name", INFERENCE_ALONE)
def test_what_is_for_inference_refuses_training(name: str) -> None:
    with pytest.raises(DoesNotApply, match="goes backward"):
        job_of(layers_that_train, [name])


# --- without a graph --------------------------------------------------------------------------------------------------


def test_modes() -> None:
    plain = job_of(pictures).output
    assert plain.grad_fn is not None
    without, inferred = job_of(pictures, ["no_grad"]).output, job_of(pictures, ["inference_mode"]).output
    assert without.grad_fn is None and not without.is_inference() and inferred.is_inference()
    assert torch.equal(plain, without) and torch.equal(plain, inferred)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_two_modes_are_one_too_many() -> None:
    with pytest.raises(MemlabError, match="inference_mode is no_grad and more"):
        job_of(pictures, ["no_grad", "inference_mode"])


def test_eval_keeps_the_graph() -> None:
    before, after = job_of(pictures, habits=["eval_mode"]), job_of(pictures, ["eval_mode"])
    assert before.model.training and not after.model.training
    assert before.output.grad_fn is not None and after.output.grad_fn is not None


def test_volatile_changes_nothing_and_warns_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = job_of(pictures, ["volatile"])
    assert torch.equal(job.output, job_of(pictures).output) and job.output.grad_fn is not None


def test_backward_works_under_no_grad() -> None:
    plain, wrapped = job_of(layers_that_train), job_of(layers_that_train, ["no_grad_backward"])
    assert plain.outcome()["digest"] == wrapped.outcome()["digest"]
    with pytest.raises(DoesNotApply, match="has no backward"):
        job_of(pictures, ["no_grad_backward"])


@pytest.mark.parametrize("name", ["no_grad", "inference_mode"])
def test_modes_from_outside(name: str) -> None:
    model, _, (x,), _ = pictures()
    with techniques[name].outside():
        assert model(x).grad_fn is None
    with pytest.raises(DoesNotApply, match="calls backward"), techniques[name].outside():
        model(x).sum().backward()
    model(x).sum().backward()  # as before


# --- fewer bits -------------------------------------------------------------------------------------------------------


def test_half_is_half_throughout() -> None:
    job = job_of(served, ["half_inference"])
    assert {one.dtype for one in job.model.parameters()} == {torch.bfloat16} == {job.batch[0].dtype, job.output.dtype}
    assert 0 < off(job.output, job_of(served).output) < 0.05
    with pytest.raises(DoesNotApply, match="float32"):
        job_of(lambda: (nn.ReLU(), None, (torch.ones(1),), None), ["half_inference"])


class Tokens(nn.Module):
    """Numbers of words go in, a mask with them; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.first = self.again = nn.Linear(32, 32)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, mask: dict[str, Tensor]) -> Tensor:
        return self.head(self.again(self.first(self.embedding(words) * mask["keep"])))


def tokens():
    return Tokens(), None, (torch.randint(50, (2, 5)), {"keep": torch.ones(2, 5, 1)}), None


def test_half_leaves_whole_numbers_alone() -> None:
    job = job_of(tokens, ["half_inference"])
    assert job.batch[0].dtype == torch.int64 and job.batch[1]["keep"].dtype == torch.bfloat16


def test_int8_keeps_what_is_shared_and_what_is_tied() -> None:
    job = job_of(tokens, ["int8_weights"])
    assert isinstance(job.model.first, Int8Linear) and job.model.first is job.model.again
    assert type(job.model.head) is nn.Linear and job.model.head.weight is job.model.embedding.weight
    assert off(job.output, job_of(tokens).output) < 0.02


@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_within_half_a_step_of_each_weight(bias: bool) -> None:
    linear = nn.Linear(64, 32, bias=bias)
    linear.weight.data[0] = 0
    made = quantized(linear)
    unfolded = made.weight * made.scale
    step = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    assert made.weight.dtype == torch.int8
    assert ((unfolded - linear.weight).abs() <= step * 0.501 + 1e-12).all() and not unfolded[0].any()
    assert torch.allclose(made(torch.eye(64)), nn.functional.linear(torch.eye(64), unfolded, linear.bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_of_half_weights_does_not_wrap(dtype: torch.dtype) -> None:
    """In bfloat16 the largest weight of a row divided by its rounded scale can be 128."""
    linear = nn.Linear(64, 64).to(dtype)
    linear.weight.data[3] = 0
    made = quantized(linear)
    assert made.scale.dtype == dtype
    assert off(made.weight * made.scale.float(), linear.weight) < 0.02 and not made.weight[3].any()


def test_int8_holds_a_quarter() -> None:
    model = served()[0]
    before = sum(one.nbytes for one in model.state_dict().values())
    after = sum(one.nbytes for one in quantized(model).state_dict().values())
    assert after < 0.29 * before
    with pytest.raises(DoesNotApply, match=r"no nn\.Linear"):
        quantized(nn.Sequential(nn.Conv2d(1, 1, 1)))


def saved_bytes(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def test_dynamic_quantization_is_seen_in_the_file() -> None:
    """The claim that no tally of tensors can check: packed weights take a quarter."""
    plain, packed = job_of(served), job_of(served, ["dynamic_quantization"])
    assert saved_bytes(packed.model) < 0.5 * saved_bytes(plain.model)
    assert off(packed.output, plain.output) < 0.1
    assert "does not see" in packed.notes[0]


def test_int8_from_outside() -> None:
    model, _, (x,), _ = served()
    expected = model(x)
    with techniques["int8_weights"].outside():
        got = model(x)
    assert isinstance(model[0][0], Int8Linear) and off(got, expected) < 0.05
    with pytest.raises(DoesNotApply, match="replaced from outside"), techniques["int8_weights"].outside():
        nn.Linear(2, 2)(torch.ones(1, 2))


def test_half_from_outside() -> None:
    model, _, (x,), _ = served()
    with techniques["half_inference"].outside():
        assert model(x).dtype == torch.bfloat16 == model(x).dtype
    with pytest.raises(DoesNotApply, match="no module"), techniques["half_inference"].outside():
        torch.ones(2).sum()


# --- folded -----------------------------------------------------------------------------------------------------------


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

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if x.sum() > 1e9 else self.body(x) * 2


def test_only_what_follows_alone_is_folded() -> None:
    model, x = settled(Residual()), torch.randn(2, 3, 8, 8)
    expected = model(x)
    assert pairs(model) == [("conv1", "norm1")]
    fuse(model)
    assert isinstance(model.norm1, nn.Identity) and isinstance(model.norm2, nn.BatchNorm2d)
    assert off(model(x), expected) < 1e-5


def test_neighbours_where_nothing_can_be_traced() -> None:
    body = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.ReLU(), nn.BatchNorm2d(8))
    model, x = settled(Branching(body)), torch.randn(2, 3, 8, 8)
    expected = model(x)
    assert pairs(model) == [("body.0.0", "body.0.1")]
    fuse(model)
    assert off(model(x), expected) < 1e-5


def test_what_is_used_twice_stays() -> None:
    conv, norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    assert pairs(nn.Sequential(conv, norm, conv, nn.BatchNorm2d(4)).eval()) == []
    assert pairs(nn.Sequential(nn.Conv2d(4, 4, 1), norm, nn.Conv2d(4, 4, 1), norm).eval()) == []
    assert pairs(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()) == []


def test_fusion_says_why_not() -> None:
    with pytest.raises(DoesNotApply, match="training mode"):
        fuse(pictures()[0].train())
    with pytest.raises(DoesNotApply, match="no BatchNorm that follows"):
        fuse(nn.Linear(2, 2).eval())


def test_fusion_saves_no_peak_under_no_grad() -> None:
    """What `not_when` says."""
    assert abs(tried(pictures, "no_grad").share(tried(pictures, "no_grad", "conv_bn_fusion"))) < 0.02


@pytest.mark.parametrize("block", [RepVggBlock, AcBlock])
@pytest.mark.parametrize("width", [4, 8])
def test_merged_branches_give_the_same(block: type[Branches], width: int) -> None:
    model, x = settled(block(width, 8)).double(), torch.randn(2, width, 9, 7, dtype=torch.double)
    assert len(model.branches) == (3 if block is AcBlock or width == 8 else 2)
    assert off(merge(model, block)(x), model(x)) < 1e-6
    whole = nn.Sequential(model, nn.Sequential(model) if width == 8 else nn.ReLU())
    expected = whole.eval()(x)
    assert off(merge(whole, block)(x), expected) < 1e-6
    assert isinstance(whole[0], nn.Conv2d) and (width == 4 or whole[1][0] is whole[0])


def test_branches_of_others_merge_themselves() -> None:
    class Theirs(nn.Module):
        deployed = 0

        def switch_to_deploy(self) -> None:
            self.deployed += 1

    model = nn.Sequential(Theirs(), nn.ReLU()).eval()
    assert merge(model, RepVggBlock) is model and model[0].deployed == 1
    with pytest.raises(DoesNotApply, match="switch_to_deploy"):
        merge(nn.Sequential(nn.ReLU()).eval(), AcBlock)
    with pytest.raises(DoesNotApply, match="training mode"):
        merge(RepVggBlock(2, 2), RepVggBlock)


def test_branches_from_outside() -> None:
    model, x = settled(nn.Sequential(AcBlock(3, 8), nn.ReLU())), torch.randn(1, 3, 8, 8)
    expected = model(x)
    with techniques["acnet_merge"].outside():
        got = model(x)
    assert isinstance(model[0], nn.Conv2d) and off(got, expected) < 1e-5


# --- in pairs ---------------------------------------------------------------------------------------------------------


def everything():
    """Something for each technique of this room."""
    model = nn.Sequential(
        *(RepVggBlock(3, 8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), AcBlock(8, 8)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16)),
    )
    return settled(model), None, (torch.randn(4, 3, 10, 10),), None


PAIRS = [
    (one, other)
    for one, other in itertools.combinations([name for name in INFERENCE_ALONE if name != "eval_mode"], 2)
    if not techniques.conflict([one, other])
]


def test_all_that_go_together_do() -> None:
    expected = job_of(everything).output
    assert len(PAIRS) > 20
    for pair in PAIRS:
        assert off(job_of(everything, pair).output, expected) < 0.1, pair


@pytest.mark.parametrize("pair", [("int8_weights", "dynamic_quantization"), ("half_inference", "dynamic_quantization")])
def test_what_does_not_go_together_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(MemlabError, match="exclude each other"):
        job_of(served, pair)
