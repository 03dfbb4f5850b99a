"""The fast path of `nn.TransformerEncoderLayer` in evaluation: one operator, which PyTorch's shape functions know no inside of.

The order of calls is that of ATen/native/transformers/transformer.cpp and attention.cu, the order of frees was read off the
allocator's history on 2.12.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from memlab.errors import PredictionError
from memlab.predictor.pretend.rules import rule


@rule("aten._transformer_encoder_layer_fwd.default")
def encoder_layer(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Attention and the two linear layers with the sums in place, before or after the norms."""
    source, width, heads, qkv, qkv_bias, out, out_bias, gelu, norm_first, eps, *rest = args
    first, second, linear = rest[0:2], rest[2:4], rest[4:8]
    _check_mask(*rest[8:9], **kwargs)

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        return F.layer_norm(x, (width,), weight, bias, eps)

    x = norm(source, *first) if norm_first else source
    x = _attended(x, heads, (qkv, qkv_bias), (out, out_bias)).add_(source)
    if not norm_first:
        x = norm(x, *first)
    y = _fed_forward(norm(x, *second) if norm_first else x, linear, gelu).add_(x)
    return y if norm_first else norm(y, *second)


@rule("aten._native_multi_head_attention.default")
def attention(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`nn.MultiheadAttention` in evaluation, of one tensor with itself."""
    query, key, value, _, heads, qkv, qkv_bias, out, out_bias, *rest = args
    _check_mask(*rest[:1], **kwargs)
    weights = rest[1] if len(rest) > 1 else kwargs.get("need_weights", True)
    if query is not key or query is not value or weights:
        raise PredictionError(
            "attention's fast path with weights or several inputs cannot be predicted: pass need_weights=False, or train()."
        )
    return _attended(query, heads, (qkv, qkv_bias), (out, out_bias)), None


def _attended(x: Any, heads: int, projection: Any, out: Any) -> Any:
    batch, length, width = x.shape
    together = F.linear(x, *projection)
    parts = together.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    found = F.scaled_dot_product_attention(parts[0], parts[1], parts[2]).transpose(1, 2).reshape(batch, length, width)
    projected = F.linear(found, *out)
    del found  # before `together`, as there
    return projected


def _fed_forward(x: Any, linear: Any, gelu: bool) -> Any:
    weight, bias, weight_2, bias_2 = linear
    flat = x.view(-1, x.shape[-1])
    inner = torch._addmm_activation(bias, flat, weight.t(), use_gelu=gelu)
    found = torch.addmm(bias_2, inner, weight_2.t()).view(*x.shape[:-1], weight_2.shape[0])
    del inner  # before what went in, as there
    return found


def _check_mask(mask: Any = None, mask_type: Any = None, **_: Any) -> None:
    if mask is not None:
        raise PredictionError(
            "a mask in the fast path of nn.TransformerEncoderLayer cannot be predicted: "
            "torch.backends.mha.set_fastpath_enabled(False) takes the other path, on the card as well."
        )
