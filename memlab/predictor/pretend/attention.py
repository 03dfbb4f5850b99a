"""scaled_dot_product_attention as on a card: the kernel it would take, what that keeps and what it takes for the while.

Sizes as seen on the C++ allocator (2.12.1) and in ATen/native/transformers/cuda. Limits: what cuDNN's kernels take in backward
is cuDNN's own business and estimated as a gradient of the queries in single precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from memlab.predictor.pretend import backends
from memlab.predictor.pretend.kernels import bytes_of, copies, release
from memlab.predictor.pretend.rules import rule

aten = torch.ops.aten
FLOAT = torch.float32


def up(number: int, step: int) -> int:
    """The next multiple."""
    return -(-number // step) * step


# --- the choice -----------------------------------------------------------------------------------------------------------------


@rule("aten.scaled_dot_product_attention.default")
def attention(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """ATen/native/transformers/attention.cpp, scaled_dot_product_attention."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value, mask = (given.get(name) for name in names[:4])
    dropout, is_causal, scale = given.get("dropout_p", 0.0), given.get("is_causal", False), given.get("scale")
    groups = given.get("enable_gqa", False)
    tensors = (query, key, value)
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    call = backends.Call(*tensors, mask, dropout, is_causal, groups, needs_grad, tuple(run.card.compute_capability))
    backend = backends.choose(call)
    if mask is not None and mask.dtype == torch.bool:
        mask = as_bias(mask, query)
    if backend == backends.CUDNN:
        fused = aten._scaled_dot_product_cudnn_attention
        return fused(*tensors, mask, needs_grad, dropout, is_causal, False, scale=scale)[0]
    if backend == backends.FLASH:
        return _flash(query, key, value, dropout, is_causal, scale)
    if backend == backends.EFFICIENT:
        mask = None if mask is None else _expanded(mask, query, key)
        fused = aten._scaled_dot_product_efficient_attention
        return fused(*tensors, mask, needs_grad, dropout, is_causal, scale=scale)[0]
    return _math(query, key, value, mask, dropout, is_causal, scale, groups)


def as_bias(mask: Any, query: Any) -> Any:
    """Minus infinity where a mask says no (convert_boolean_attn_mask)."""
    yes = torch.zeros((), dtype=query.dtype, device=query.device)
    no = torch.full((), -math.inf, dtype=query.dtype, device=query.device)
    return torch.where(mask, yes, no)


def _flash(query: Any, key: Any, value: Any, dropout: float, is_causal: bool, scale: Any) -> Any:
    """Widths are padded to eights (pad_last_dim), the result is cut."""
    width = query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    if width % 8:
        query, key, value = (F.pad(one, (0, 8 - width % 8)) for one in (query, key, value))
    fused = aten._scaled_dot_product_flash_attention
    out = fused(query, key, value, dropout, is_causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _expanded(mask: Any, query: Any, key: Any) -> Any:
    """Rows padded to eights, one mask for all (preprocess_mask)."""
    columns = mask.shape[-1]
    if columns % 8 and columns > 1:
        mask = F.pad(mask, (0, 8 - columns % 8))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _math(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, scale: Any, groups: bool
) -> Any:
    """One operator after the other, in single precision (_scaled_dot_product_attention_math)."""
    dtype = query.dtype
    wide = (query, key, value)
    if dtype in backends.HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        wide = (query.float(), key.float(), value.float())
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    query, key, value = wide[0] * root, wide[1], wide[2]
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = as_bias(seen, query)
        del seen
    if groups:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], dim=-3) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    del scores
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    returned = weights.to(dtype)  # beside the result, and made first
    out = torch.matmul(weights, value).to(dtype)
    del returned
    return out


@rule("aten._safe_softmax.default")
def safe_softmax(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Rows that are masked as a whole are looked for (ATen/native/SoftMax.cpp, _safe_softmax)."""
    out = run.op(func, *args, **kwargs)
    run.scratch(out.numel(), out.numel() // max(out.shape[args[1]], 1), out.element_size(), op=func)
    return out


# --- flash ------------------------------------------------------------------------------------------------------------------------


def like_transposed(run: Any, func: Any, tensor: Any, width: int | None = None) -> Any:
    """`empty_like(tensor.transpose(1, 2)).transpose(1, 2)`."""
    swapped = run.op(aten.transpose.int, tensor, 1, 2)
    made = run.op(aten.empty_like.default, swapped)
    return run.op(aten.transpose.int, made, 1, 2)


@rule("aten._scaled_dot_product_flash_attention.default")
def flash_forward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Result, log-sum-exp, state of random numbers; partial results where the keys are split (flash_api.cpp, mha_fwd)."""
    query, key, dropout = args[0], args[1], args[3] if len(args) > 3 else 0.0
    batch, heads, rows, width = query.shape
    out = like_transposed(run, func, query)
    sums = run.empty((batch, heads, rows), FLOAT, op=func)
    splits = _splits(run.card, batch * heads, rows, key.shape[2], width) if not dropout else 1
    held = []
    if splits > 1:
        held.append(run.hold(splits * batch * heads * rows * 4, func))
        held.append(run.hold(splits * batch * heads * rows * _rounded(width) * 4, func))
    state, unused = run.empty((2,), torch.uint64, op=func), run.empty((), torch.uint64, op=func)
    if dropout:
        run.scratch(16, op=func)
    for block in held:
        run.release(block)
    return out, sums, None, None, rows, key.shape[2], state, unused, run.empty((0,), query.dtype)


def _rounded(width: int) -> int:
    return up(width, 32) if width <= 192 else 256


def _splits(card: Any, heads: int, rows: int, columns: int, width: int) -> int:
    """Into how many parts the keys are split to fill the card (flash_api.cpp, num_splits_heuristic)."""
    blocks = -(-columns // (256 if width <= 64 else 128 if width <= 128 else 64))
    work, places = heads * -(-rows // 64), card.multiprocessors * 2
    if work >= 0.8 * places:
        return 1
    counts = [n for n in range(1, min(128, places, blocks) + 1) if n == 1 or -(-blocks // n) != -(-blocks // (n - 1))]
    waves = {n: work * n / places for n in counts}
    used = {n: wave / math.ceil(wave) for n, wave in waves.items()}
    return next(n for n in counts if used[n] >= 0.85 * max(used.values()))


@rule("aten._scaled_dot_product_flash_attention_backward.default")
def flash_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Gradients, row sums and the queries' gradient in single precision (flash_api.cpp, mha_bwd)."""
    grad, query, key, value, out = args[:5]
    batch, heads, rows, width = query.shape
    held = copies(run, *(run.op(aten.transpose.int, one, 1, 2) for one in (grad, out)))
    grads = [like_transposed(run, func, one) for one in (query, key, value)]
    scratch = [batch * heads * up(rows, 128) * 4, batch * up(rows, 128) * heads * _rounded(width) * 4]
    if key.shape[1] != heads:
        scratch += [batch * key.shape[2] * heads * width * key.element_size()] * 2
    run.scratch(*scratch, op=func)
    release(run, held)
    return tuple(grads)


# --- memory-efficient -------------------------------------------------------------------------------------------------------------


@rule("aten._scaled_dot_product_efficient_attention.default")
def efficient_forward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Result by rows, log-sum-exp in multiples of 32 (attention.cu, _efficient_attention_forward)."""
    query, value, keeps = args[0], args[2], args[4]
    batch, heads, rows, _ = query.shape
    made = run.empty((batch, rows, heads, value.shape[-1]), query.dtype, op=func)
    sums = run.empty((batch, heads, up(rows, 32) if keeps else 0), FLOAT, op=func)
    nothing = (run.empty((0,), torch.int64), run.empty((0,), torch.int64))
    return run.op(aten.transpose.int, made, 1, 2), sums, *nothing


@rule("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Gradients, row sums, a workspace for the queries' gradient (attention_backward.cu)."""
    grad, query, key, value, bias = args[:5]
    batch, heads, rows, width = query.shape
    held = copies(run, run.op(aten.transpose.int, grad, 1, 2))
    grads = [_by_rows(run, func, one) for one in (query, key, value)]
    bias_grad = None
    if bias is not None and args[10][3]:
        full = run.empty((*bias.shape[:-1], up(bias.shape[-1], 16)), bias.dtype, op=func)
        bias_grad = run.op(aten.slice.Tensor, full, -1, 0, bias.shape[-1])
    sums = batch * heads * rows * 4
    if query.dtype == FLOAT:
        product, total = run.hold(grad.numel() * 4, func), run.hold(sums, func)
        delta = total if 1 in (rows, heads) else run.hold(sums, func)
        release(run, [product] if delta is total else [product, total])
    else:
        delta = run.hold(sums, func)
    run.scratch(batch * heads * _workspace(run.card, query.dtype, rows, max(width, value.shape[-1])), op=func)
    run.release(delta)
    release(run, held)
    return *grads, bias_grad


def _by_rows(run: Any, func: Any, tensor: Any) -> Any:
    batch, heads, rows, width = tensor.shape
    made = run.empty((batch, rows, heads, width), tensor.dtype, op=func)
    return run.op(aten.transpose.int, made, 1, 2)


def _workspace(card: Any, dtype: Any, rows: int, width: int) -> int:
    """Bytes per head: blocks of the queries' gradient in single precision, each with its lock (GradQTempStorage)."""
    large = tuple(card.compute_capability) in ((8, 0), (9, 0), (10, 0))
    block = 128 if width > 64 and (large or dtype != FLOAT) else 64
    return -(-rows // block) * -(-width // 64) * (block * 64 * 4 + 16)


# --- cuDNN ----------------------------------------------------------------------------------------------------------


@rule("aten._scaled_dot_product_cudnn_attention.default")
def cudnn_forward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Seed and offset, result, log-sum-exp if it is kept (ATen/native/cudnn/MHA.cpp)."""
    query, key, value, keeps = args[0], args[1], args[2], args[4]
    batch, heads, rows, _ = query.shape
    seed, offset = (run.empty((), torch.int64, op=func) for _ in range(2))
    out = _laid_out_like(run, func, query, value.shape[-1])
    sums = run.empty((batch, heads, rows, 1) if keeps else (0,), FLOAT, op=func)
    return out, sums, None, None, rows, key.shape[2], seed, offset, run.empty((0,), query.dtype)


def _laid_out_like(run: Any, func: Any, query: Any, width: int) -> Any:
    """Dimensions in the order they have in the queries (alloc_with_matching_layout)."""
    order = sorted(range(4), key=lambda dim: -query.stride(dim))
    shape = (*query.shape[:3], width)
    made = run.empty([shape[dim] for dim in order], query.dtype, op=func)
    return run.op(aten.permute.default, made, [order.index(dim) for dim in range(4)])


@rule("aten._scaled_dot_product_cudnn_attention_backward.default")
def cudnn_backward(func: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """Gradients, and a workspace that cuDNN asks for."""
    query = args[1]
    rows = bytes_of(query) // query.element_size() // query.shape[-1]
    grads = tuple(run.op(aten.empty_like.default, one) for one in args[1:4])
    run.scratch(rows * (query.shape[-1] + 1) * 4, op=func)
    return grads
