"""What values read as, and shapes that depend on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memlab.errors import PredictionError
from memlab.fake_cuda import data_dependent
from memlab.fake_cuda.data_dependent import CHECKED


def test_values_that_came_from_the_host_are_known(fake):
    lengths = torch.tensor([3, 5, 2]).to("cuda")
    assert lengths.max().item() == 5 and (lengths * 2).tolist() == [6, 10, 4] and lengths[1].item() == 5
    assert int(lengths.sum()) == 10 and lengths.cpu().tolist() == [3, 5, 2]
    assert torch.repeat_interleave(lengths, lengths).shape == (10,)
    assert (lengths > 2).nonzero().shape == (2, 1)
    assert torch.ones(3, device="cuda")[lengths > 2].shape == (2,)
    assert not fake.assumptions


def test_what_is_known_is_forgotten_when_it_changes(fake):
    x = torch.tensor([7.0]).cuda()
    assert x.item() == 7
    x.add_(torch.randn(1, device="cuda"))
    assert x.item() == 1
    y = torch.tensor([7.0, 8.0]).cuda()
    y[0].fill_(1)
    assert y.tolist() == [1.0, 8.0]
    y[0] = torch.randn((), device="cuda")
    assert y.tolist() == [1.0, 1.0]


def test_unknown_values_read_as_one(fake):
    x = torch.randn(4, device="cuda")
    loss = x.sum()
    assert loss.item() == 1.0 and not bool(x.sum() > 3) and x.tolist() == [1.0] * 4
    assert x.argmax().item() == 1 and float(loss) == 1.0 and x.cpu().numpy().sum() == 4
    assert f"{loss.item():.2f}" == "1.00" and x.half().cpu().dtype == torch.float16
    assert {key.partition(" ")[2] for key in fake.assumed} == {"item", "tolist", "copy to the host"}


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (lambda x: torch.isnan(x).any(), False),
        (lambda x: torch.isinf(x).any(), False),
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: torch.isnan(x.sum()) | torch.isinf(x.sum()), False),
        (lambda x: ~torch.isfinite(x.sum()), False),
        (lambda x: (x != x).any(), False),
        (lambda x: x.isnan().logical_not().all(), True),
    ],
)
def test_everything_is_finite(fake, asked, answer):
    assert bool(asked(torch.randn(4, device="cuda"))) is answer
    assert any("nan" in text for text in fake.assumptions)


def test_shapes_that_depend_on_values_are_the_largest(fake):
    x = torch.randn(6, 4, device="cuda")
    mask = x > 0
    assert x[mask].shape == (24,) and mask.nonzero().shape == (24, 2) and torch.masked_select(x, mask).shape == (24,)
    assert x[mask[:, 0]].shape == (6, 4) and len(torch.where(mask)) == 2
    ids = torch.randint(9, (12,), device="cuda")
    assert torch.unique(ids).shape == (12,) and torch.unique(ids, return_counts=True)[1].shape == (12,)
    assert torch.unique_consecutive(ids).shape == (12,) and torch.bincount(ids, minlength=9).shape == (9,)
    x[mask] = 0
    x[mask] = torch.ones(24, device="cuda")
    x.masked_fill_(mask, 0)
    assert torch.equal(x, x.clone()) and torch.allclose(x, x)
    assert any("mask: assumed 24, at most 24" in text for text in fake.assumptions)


def test_indices_of_the_host_are_copied_to_the_card(fake):
    x = torch.randn(6, 4, device="cuda")
    assert x[torch.tensor([0, 2])].shape == (2, 4) and x[torch.tensor([0, 2]).cuda()].shape == (2, 4)
    assert x[[1, 2]].shape == (2, 4) and x[:, torch.tensor([True, False, True, False])].shape == (6, 2)


def test_what_has_no_shape_function_is_refused_by_name(fake):
    torch.library.define("memlab_test::unknown", "(Tensor x) -> Tensor")
    with pytest.raises((PredictionError, NotImplementedError), match=r"unknown"):
        torch.ops.memlab_test.unknown(torch.ones(2, device="cuda"))


def test_nested_and_quantized_tensors_are_refused_by_name(fake):
    x = torch.randn(4, 4, device="cuda")
    with pytest.raises(PredictionError, match="this kind of sparse"):
        x.to_sparse_bsr((2, 2))
    with pytest.raises(PredictionError, match="quantized"):
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    with pytest.raises(PredictionError, match="nested"):
        torch.nested.nested_tensor([x[0], x[1]])


def test_a_loop_that_waits_for_a_value_ends(fake, monkeypatch):
    monkeypatch.setattr(data_dependent, "MOST_ROUNDS", 100)
    rounds = 0
    while (torch.randn((), device="cuda") > 0).item():
        rounds += 1
    assert 99 <= rounds <= 101 and any("so that a loop ends" in text for text in fake.assumptions)


@pytest.mark.parametrize("goes_on", [lambda x: x > 0.5, lambda x: x < 5], ids=["falls", "rises"])
def test_a_loop_whose_condition_is_a_number_ends(fake, monkeypatch, goes_on):
    monkeypatch.setattr("memlab.fake_cuda.assumed.MOST_TURNS", 50)
    rounds = 0
    while goes_on(torch.randn((), device="cuda").item()):
        rounds += 1
        (torch.randn((), device="cuda") > 0).item()  # another read in between
    assert rounds in (49, 99) and any("item: assumed 0 to " in text for text in fake.assumptions)


def test_a_mask_has_as_many_elements_as_indices_wrote(fake):
    """As the samplers of detection make them."""
    likely = torch.where(torch.randn(1000, device="cuda") > 0)[0]
    chosen = likely[torch.randperm(len(likely), device="cuda")[:20]]
    first, second = (torch.zeros(1000, dtype=torch.uint8, device="cuda") for _ in range(2))
    first[chosen], second[chosen[:5]] = 1, 1
    assert [len(one.nonzero()) for one in (first, first | second, torch.cat([first, second]), first[:10])] == [
        20,
        25,
        25,
        10,
    ]
    first[chosen] = 2
    assert len(first.nonzero()) == 40 and fake.assumed.popitem()[1].most == 40
    second.fill_(1)
    assert len((first | second).nonzero()) == 1000
    first.add_(1)
    assert len(first.nonzero()) == 1000


def refuses(x):
    if (x < 0).any():
        raise ValueError("negative")


def refuses_twice(x):
    if x.dim() == 0 or not bool((x > 0).all()) or (x > 5).any().item():
        raise ValueError("out of range")


def stops(x):
    for _ in range(3):
        if (x > 5).any():
            raise StopIteration


@pytest.mark.parametrize("check", [refuses, refuses_twice])
def test_a_check_that_raises_is_passed(fake, check):
    check(torch.randn(8, device="cuda"))
    assert all(one.why == CHECKED for one in fake.assumed.values()) and fake.assumed


def test_an_assertion_holds(fake, tmp_path):
    source = "def asserts(x):\n    assert not (x > 5).any(), 'too large'\n    assert (x < 7).all()\n"
    file, there = tmp_path / "asserts.py", {}  # pytest writes the assertions of this file anew
    file.write_text(source)
    exec(compile(source, file, "exec"), there)
    there["asserts"](torch.randn(8, device="cuda"))


def test_an_error_that_ends_a_loop_is_no_check(fake):
    with pytest.raises(StopIteration):
        stops(torch.randn(8, device="cuda"))


def test_functions_of_pytorch_check_too(fake):
    x = torch.randn(8, device="cuda")
    assert nn.functional.gaussian_nll_loss(x, x, x * 2).shape == ()
