"""The fast path of `nn.TransformerEncoderLayer`: the requests in order, as the CUDA build makes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memlab
from memlab.errors import PredictionError
from memlab.predictor.cards import Card
from memlab.predictor.pretend import PretendCuda
from memlab.trace.columns import Kind
from memlab.units import GiB

CARD = Card("a card", 80 * GiB, (8, 0), 0, 80 * GiB, 80 * GiB, 108)
SRC, QKV, INNER, STATS = 64 * 197 * 512 * 4, 64 * 197 * 1536 * 4, 64 * 197 * 2048 * 4, 64 * 197 * 4
NORM = [SRC, STATS, STATS, -STATS, -STATS]
# Read off the allocator's history of torch 2.12.1 at capability 8.0, without the workspace of cuBLAS.
NORM_LAST = [QKV, SRC, SRC, -SRC, -QKV, *NORM, -SRC, INNER, SRC, -INNER, *NORM, -SRC, -SRC]
NORM_FIRST = [*NORM, QKV, SRC, SRC, -SRC, -QKV, -SRC, *NORM, INNER, SRC, -INNER, -SRC, -SRC]


def layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=norm_first).cuda().eval()


@pytest.mark.parametrize(("norm_first", "wanted"), [(False, NORM_LAST), (True, NORM_FIRST)])
def test_the_requests_are_those_of_the_cuda_build(norm_first, wanted):
    with PretendCuda(CARD) as pretend:
        model, x = layer(norm_first), torch.rand(64, 197, 512).cuda()
        first = len(pretend.log)
        with torch.inference_mode():
            y = model(x)
        columns = pretend.log.columns()
        assert y.shape == x.shape
    signs = [1 if kind == Kind.ALLOC else -1 for kind in columns["kind"][first:]]
    assert [sign * int(size) for sign, size in zip(signs, columns["nbytes"][first:], strict=True)] == wanted


def test_with_gradients_the_path_is_the_usual_one():
    with PretendCuda(CARD) as pretend:
        layer(False)(torch.rand(2, 8, 512).cuda()).sum().backward()
        assert not any("_transformer_encoder_layer_fwd" in str(one) for one in pretend.run.seen)


def test_a_mask_is_refused_with_what_to_do():
    def step() -> None:
        with torch.no_grad():
            layer(False)(torch.rand(2, 8, 512).cuda(), src_mask=torch.zeros(8, 8, dtype=torch.bool).cuda())

    with pytest.raises(PredictionError, match="set_fastpath_enabled"):
        memlab.predict(step, CARD)
