"""The kernel that attention takes, and what it keeps: by card, dtype, mask and width."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fake_gpus import card, logged
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memlab.errors import PredictionError
from memlab.fake_cuda import FakeCuda
from memlab.fake_cuda.attention import CUDNN, EFFICIENT, FLASH, MATH, Call, choose, num_splits

AMPERE = {"capability": (8, 0), "multiprocessors": 108}


def call(
    capability=(8, 0), dtype=torch.float16, width=64, mask=None, dropout=0.0, heads=(8, 8), rows=(128, 128), **more
):
    mask, release = torch.empty(1) if mask else None, more.pop("release", (2, 12))
    enable_gqa = more.pop("enable_gqa", heads[0] != heads[1])
    query = torch.empty(2, heads[0], rows[0], width, dtype=dtype, device="meta")
    key = torch.empty(2, heads[1], rows[1], width, dtype=dtype, device="meta")
    value = torch.empty(2, heads[1], rows[1], more.pop("value_width", width), dtype=dtype, device="meta")
    return Call(query, key, value, mask, dropout, more.get("is_causal", False), enable_gqa, True, capability, release)


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        ({}, FLASH),
        ({"dtype": torch.float32}, EFFICIENT),
        ({"dtype": torch.float64}, MATH),
        ({"mask": "one"}, EFFICIENT),
        ({"width": 33}, FLASH),
        ({"width": 33, "dtype": torch.float32}, MATH),
        ({"width": 264}, EFFICIENT),
        ({"value_width": 32}, EFFICIENT),
        ({"heads": (8, 2)}, FLASH),
        ({"heads": (8, 2), "dtype": torch.float32}, MATH),
        ({"heads": (8, 2), "dtype": torch.float32, "release": (2, 13)}, MATH),
        ({"heads": (8, 2), "dtype": torch.float32, "release": (2, 14)}, EFFICIENT),
        ({"heads": (8, 3), "dtype": torch.float32, "release": (2, 14)}, MATH),
        ({"enable_gqa": True, "dtype": torch.float32}, EFFICIENT),  # the numbers of heads are equal
        ({"is_causal": True, "rows": (64, 128)}, EFFICIENT),
        ({"capability": (7, 5)}, EFFICIENT),
        ({"capability": (7, 5), "dtype": torch.bfloat16}, MATH),
        ({"capability": (9, 0)}, CUDNN),
        ({"capability": (9, 0), "dropout": 0.1}, FLASH),
        ({"capability": (9, 0), "mask": "one"}, CUDNN),
        ({"capability": (9, 0), "width": 192}, CUDNN),
        ({"capability": (10, 0), "width": 192}, FLASH),
        ({"capability": (12, 0)}, FLASH),
    ],
)
def test_the_backend_is_the_cards(asked, backend):
    assert choose(call(**asked)) == backend


def test_the_user_chooses_backends():
    with sdpa_kernel([SDPBackend.MATH]):
        assert choose(call()) == MATH
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(RuntimeError, match="No available kernel"):
        choose(call(dtype=torch.float32))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose(call()) == EFFICIENT


def test_hopper_can_be_told_to_leave_cudnn_last(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(call(capability=(9, 0))) == FLASH


def events(body, **gpu):
    with FakeCuda(card(**(AMPERE | gpu))) as fake:
        return logged(fake, body)[1]


def step(dtype, mask=None):
    tensors = [torch.empty(2, 4, 128, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    F.scaled_dot_product_attention(*tensors, attn_mask=None if mask is None else mask()).sum().backward()


def test_flash_keeps_no_scores():
    # As on the C++ allocator at capability 8.0: log-sum-exp, random state; in backward row sums and a single-precision dq.
    found = events(lambda: step(torch.float16))
    for size in (2 * 4 * 128 * 4, 16, 8, 2 * 128 * 4 * 64 * 4):
        assert size in found
    assert max(found) < 2 * 4 * 128 * 128 * 2 * 2


def test_math_keeps_all_scores():
    with sdpa_kernel([SDPBackend.MATH]):
        found = events(lambda: step(torch.float32))
    assert found.count(2 * 4 * 128 * 128 * 4) >= 3


def test_a_mask_is_made_a_bias():
    found = events(lambda: step(torch.float16, lambda: torch.ones(2, 1, 128, 128, dtype=torch.bool, device="cuda")))
    assert 2 * 128 * 128 * 2 in found


def test_keys_are_split_where_the_card_would_be_idle():
    # flash_api.cpp's num_splits_heuristic, as seen for 1000 rows on the simulated GPU: 4, 1 and 2 parts.
    assert [num_splits(card(**(AMPERE | {"multiprocessors": n})), 8, 1000, 1000, 64) for n in (108, 82)] == [4, 1]
    assert num_splits(card(**(AMPERE | {"multiprocessors": 170})), 8, 1000, 1000, 64) == 2


OUT, SUMS, WORKSPACE = 2 * 8 * 512 * 64 * 4, 2 * 8 * 512 * 4, 2099200
KEYS = OUT // 4


def test_since_2_14_heads_of_queries_share_keys_in_the_efficient_kernel():
    """Forward and backward as in the allocator's history of 2.14.1: 2 samples, 8 heads of queries, 2 of keys."""
    with FakeCuda(card(80 << 30, **AMPERE), torch_version="2.14.1") as fake:
        query, key, value = (torch.rand(2, n, 512, 64, device="cuda", requires_grad=True) for n in (8, 2, 2))
        result, forward = logged(fake, lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
        given = torch.empty_like(result)
        _, backward = logged(fake, lambda: torch.autograd.grad(result, (query, key, value), given))
        _, with_dropout = logged(
            fake, lambda: F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, enable_gqa=True)
        )
    assert forward == [8, 8, OUT, SUMS] and with_dropout == [OUT, SUMS]
    grads, for_each_head, product = [OUT, KEYS, KEYS], [OUT, OUT], [OUT, SUMS, SUMS, -SUMS, -OUT]
    assert backward[:11] == [*grads, *for_each_head, *product, WORKSPACE]
    assert sorted(backward[11:15]) == sorted([-SUMS, -WORKSPACE, -OUT, -OUT])


@pytest.mark.parametrize(("version", "is_fused"), [("2.13.0", False), ("2.14.1", True)])
def test_since_2_14_three_dimensions_are_one_batch(version, is_fused):
    """4 heads of 128 rows and 96 keys, by the allocator's history of 2.14.1: random state, result, sums."""
    with FakeCuda(card(80 << 30, **AMPERE), torch_version=version) as fake:
        tensors = [torch.rand(4, rows, 64, device="cuda", requires_grad=True) for rows in (128, 96, 96)]
        result, found = logged(fake, lambda: F.scaled_dot_product_attention(*tensors))
    assert result.shape == (4, 128, 64)
    assert (found == [8, 8, 131072, 2048]) == is_fused


# --- the fast path of nn.TransformerEncoderLayer: the requests in order, as the CUDA build makes them ------------------------

SRC, QKV, INNER, STATS = 64 * 197 * 512 * 4, 64 * 197 * 1536 * 4, 64 * 197 * 2048 * 4, 64 * 197 * 4
NORM = [SRC, STATS, STATS, -STATS, -STATS]
# Read off the allocator's history of torch 2.12.1 at capability 8.0, without the workspace of cuBLAS.
NORM_LAST = [QKV, SRC, SRC, -SRC, -QKV, *NORM, -SRC, INNER, SRC, -INNER, *NORM, -SRC, -SRC]
NORM_FIRST = [*NORM, QKV, SRC, SRC, -SRC, -QKV, -SRC, *NORM, INNER, SRC, -INNER, -SRC, -SRC]


def layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=norm_first).cuda().eval()


@pytest.mark.parametrize(("norm_first", "wanted"), [(False, NORM_LAST), (True, NORM_FIRST)])
def test_the_requests_are_those_of_the_cuda_build(norm_first, wanted):
    with FakeCuda(card(80 << 30, **AMPERE)) as fake, torch.inference_mode():
        model, x = layer(norm_first), torch.rand(64, 197, 512).cuda()
        y, found = logged(fake, lambda: model(x))
    assert y.shape == x.shape and found == wanted


def test_with_gradients_the_path_is_the_usual_one(fake):
    layer(False)(torch.rand(2, 8, 512).cuda()).sum().backward()
    assert not any("_transformer_encoder_layer_fwd" in str(one) for one in fake.dispatcher.seen)


def test_a_mask_is_refused_with_what_to_do(fake):
    with torch.no_grad(), pytest.raises(PredictionError, match="set_fastpath_enabled"):
        layer(False)(torch.rand(2, 8, 512).cuda(), src_mask=torch.zeros(8, 8, dtype=torch.bool).cuda())
