"""`flex_attention`, compared with the simulated GPU (2.12.1): 2 samples, 8 heads, 512 queries and keys, width 64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

KIB = 1 << 10
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:return_lse is deprecated")


def inputs(dtype=torch.float32, heads=8):
    shapes = [(2, 8, 512, 64), (2, heads, 512, 64), (2, heads, 512, 64)]
    return [torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def peaks(function, *args, **kwargs):
    """KiB: what it leaves, its peak, the peak of its backward."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(*args, **kwargs)
    left, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    out.backward(torch.empty_like(out))
    assert all(one.grad.shape == one.shape for one in args)
    return [one / KIB for one in (left, peak, torch.cuda.max_memory_allocated() - before)]


@pytest.mark.parametrize(
    ("dtype", "heads", "given", "there"),
    [
        (torch.float32, 8, {}, (2114, 57429, 131252)),
        (torch.float32, 8, {"score_mod": lambda score, b, h, i, j: score + (i - j)}, (2114, 57429, 131252)),
        (torch.float32, 2, {"enable_gqa": True}, (2114, 57429, 128180)),
        (torch.bfloat16, 8, {}, (1090, 55381, 114867)),
    ],
)
def test_by_operators_it_peaks_as_on_cuda(fake, dtype, heads, given, there):
    found = peaks(flex_attention, *inputs(dtype, heads), **given)
    assert found == pytest.approx(there, rel=0.001)
    assert any("flex_attention: without torch.compile" in text for text in fake.assumptions)


def test_with_a_mask_of_blocks(fake):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device="cuda")
    assert peaks(flex_attention, *inputs(), block_mask=mask) == pytest.approx((2112, 57427, 131505), rel=0.001)


def test_compiled_it_is_one_kernel(fake):
    compiled = torch.compile(flex_attention)
    left, peak, backward = peaks(compiled, *inputs(torch.bfloat16))
    assert [left, peak] == pytest.approx([1024 + 32] * 2, rel=0.01), "the result, and a float per query"
    assert backward == pytest.approx(1024 * 5 + 64, rel=0.01), "with its gradient and those of the inputs"
    assert any("flex_attention: it was predicted as its fused kernel" in text for text in fake.assumptions)
    out, sums = compiled(*inputs(), return_lse=True)
    assert out.shape == (2, 8, 512, 64) and sums.shape == (2, 8, 512)
