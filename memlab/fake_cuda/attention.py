"""scaled_dot_product_attention as on a GPU: the kernel PyTorch would choose, and its results and workspaces.

The choice follows ATen/native/transformers/cuda/sdp_utils.cpp, checked against 2.12.1 for compute capability 7.5 to 12.0, and in
what changed since against 2.14.1; sizes were seen on the C++ allocator (2.12.1) and in ATen/native/transformers/cuda. Limits:
nested tensors are not considered; cuDNN is assumed to be newer than 9.15, as in PyTorch's own builds, and the workspace of its
backward is estimated as a gradient of the queries in single precision.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from memlab.allocator.rules import release
from memlab.errors import PredictionError
from memlab.fake_cuda.kernel_rules import FLOAT, HALVES, round_up, rule
from memlab.torch_internals.cuda_names import sdp_priority_order

aten = torch.ops.aten
MATH, FLASH, EFFICIENT, CUDNN = range(4)
"""at::SDPBackend."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the choice depends on."""

    query: Any
    key: Any
    value: Any
    mask: Any
    dropout: float
    is_causal: bool
    enable_gqa: bool
    needs_grad: bool
    capability: tuple[int, int]
    release: tuple[int, int]
    """The release of PyTorch whose choice it is."""

    def shapes_fit(self, takes_groups: bool) -> bool:
        """Four dimensions, one batch, heads that fit, nothing empty, last dimensions dense.

        (check_batch_size_and_num_heads_dense, check_nonzero_sequence_lengths_dense, check_last_dim_stride_equals_1_dense)
        """
        query, key, value = tensors = self.query, self.key, self.value
        if any(one.dim() != 4 for one in tensors) or len({one.shape[0] for one in tensors}) > 1:
            return False
        if self.enable_gqa and takes_groups:
            heads_fit = key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
        else:
            heads_fit = len({one.shape[1] for one in tensors}) == 1
        if not heads_fit or 0 in (query.shape[2], key.shape[2], query.numel()):
            return False
        return all(one.stride(-1) == 1 or one.shape[-1] == 1 for one in tensors)


def choose(call: Call) -> int:
    """The first of the enabled backends that can take it.

    cuDNN comes first on Hopper and Blackwell servers (priority_order), last elsewhere; the user may change that.
    """
    cuda, usual = torch.backends.cuda, [FLASH, EFFICIENT, MATH, CUDNN]
    order = [number for number in sdp_priority_order() if number in range(4)] or usual
    prefers = call.capability in ((9, 0), (10, 0)) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if order == usual and prefers:
        order = [CUDNN, FLASH, EFFICIENT, MATH]
    able = {
        FLASH: cuda.flash_sdp_enabled() and can_flash(call),
        EFFICIENT: cuda.mem_efficient_sdp_enabled() and can_efficient(call),
        CUDNN: cuda.cudnn_sdp_enabled() and torch.backends.cudnn.enabled and can_cudnn(call),
        MATH: cuda.math_sdp_enabled(),
    }
    for backend in order:
        if able[backend]:
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def can_flash(call: Call) -> bool:
    """Half precision on compute capability 8.0 and above, no mask, heads of one width up to 256."""
    width = call.query.shape[-1]
    if call.mask is not None or call.query.dtype not in HALVES or call.capability < (8, 0):
        return False
    if {call.key.shape[-1], call.value.shape[-1]} != {width} or width > 256:
        return False
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    has_less_memory = (8, 6) <= call.capability <= (8, 9) or call.capability >= (12, 0)
    if has_less_memory and width > 192 and call.needs_grad and (width <= 224 or call.dropout > 0):
        return False
    if not call.shapes_fit(takes_groups=True):
        return False
    return not call.is_causal or call.query.shape[2] == call.key.shape[2]


def can_efficient(call: Call) -> bool:
    """Widths that matrix units can read (minimum_gemm_alignment), before 2.14 as many heads of keys as of queries."""
    dtype, is_new = call.query.dtype, call.capability >= (8, 0)
    if dtype not in ((*HALVES, FLOAT) if is_new else (torch.float16, FLOAT)):
        return False
    step = 8 if dtype in HALVES else 4 if is_new else 1
    if any(one.shape[-1] % step or not one.shape[-1] for one in (call.query, call.value)):
        return False
    return call.shapes_fit(takes_groups=call.release >= (2, 14))


def can_cudnn(call: Call) -> bool:
    """Half precision, widths of eights up to 128 (256 on Hopper), no dropout, no gradient of the mask."""
    largest = 256 if call.capability == (9, 0) else 128
    if call.query.dtype not in HALVES or call.capability < (8, 0) or call.dropout > 0:
        return False
    if any(one.shape[-1] % 8 or one.shape[-1] > largest for one in (call.query, call.value)):
        return False
    if call.mask is not None and call.mask.requires_grad and call.needs_grad:
        return False
    return call.shapes_fit(takes_groups=True) and 1 not in (call.query.shape[2], call.key.shape[2])


@rule("scaled_dot_product_attention.default")
def attention(
    cuda, func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """ATen/native/transformers/attention.cpp, scaled_dot_product_attention: since 2.14 three dimensions are one batch."""
    if release(cuda.torch_version) >= (2, 14) and {one.dim() for one in (query, key, value)} == {3}:
        query, key, value = (one.unsqueeze(0) for one in (query, key, value))
        how = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **how).squeeze(0)
    tensors, mask, width = (query, key, value), attn_mask, query.shape[-1]
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    capability = tuple(cuda.gpu.compute_capability)
    call = Call(*tensors, mask, dropout_p, is_causal, enable_gqa, needs_grad, capability, release(cuda.torch_version))
    backend = choose(call)
    if mask is not None and mask.dtype == torch.bool:
        mask = as_bias(mask, query)
    if backend == CUDNN:
        fused = aten._scaled_dot_product_cudnn_attention
        return fused(*tensors, mask, needs_grad, dropout_p, is_causal, False, scale=scale)[0]
    if backend == FLASH:  # widths are padded to eights (pad_last_dim), the result is cut
        scale = 1 / math.sqrt(width) if scale is None else scale
        if width % 8:
            query, key, value = (F.pad(one, (0, 8 - width % 8)) for one in tensors)
        fused = aten._scaled_dot_product_flash_attention
        out = fused(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    if backend == EFFICIENT:
        if mask is not None:  # rows padded to eights, one mask for all (preprocess_mask)
            columns = mask.shape[-1]
            if columns % 8 and columns > 1:
                mask = F.pad(mask, (0, 8 - columns % 8))[..., :columns]
            mask = mask.expand(*query.shape[:3], key.shape[2])
        fused = aten._scaled_dot_product_efficient_attention
        return fused(*tensors, mask, needs_grad, dropout_p, is_causal, scale=scale)[0]
    return _math(*tensors, mask, call, scale)


def as_bias(mask, query):
    """Minus infinity where a mask is False (convert_boolean_attn_mask)."""
    yes = torch.zeros((), dtype=query.dtype, device=query.device)
    no = torch.full((), -math.inf, dtype=query.dtype, device=query.device)
    return torch.where(mask, yes, no)


def _math(query: Any, key: Any, value: Any, mask: Any, call: Call, scale: Any) -> Any:
    """One operator after the other, in single precision (_scaled_dot_product_attention_math).

    C++ would add the mask out of place, as it does for tensor subclasses.
    """
    dtype, wide = query.dtype, (query, key, value)
    if dtype in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        wide = (query.float(), key.float(), value.float())
    root = math.sqrt(1 / math.sqrt(wide[0].shape[-1]) if scale is None else abs(scale))
    query, key, value = wide[0] * root, wide[1], wide[2]
    if call.is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = as_bias(seen, query)
        del seen
    if call.enable_gqa and len({one.shape[-3] for one in wide}) > 1:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], dim=-3) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = aten._safe_softmax(scores, -1)
    del scores
    if call.dropout > 0:
        weights = torch.dropout(weights, call.dropout, True)
    returned = weights.to(dtype)  # made before the result, and returned with it
    out = torch.matmul(weights, value).to(dtype)
    del returned
    return out


def _like_transposed(cuda, tensor):
    """`empty_like(tensor.transpose(1, 2)).transpose(1, 2)`."""
    made = cuda.op(aten.empty_like.default, cuda.op(aten.transpose.int, tensor, 1, 2))
    return cuda.op(aten.transpose.int, made, 1, 2)


@rule("_scaled_dot_product_flash_attention.default")
def flash_forward(cuda, func, query, key, value, dropout=0.0, *args, **kwargs):
    """Result, log-sum-exp, state of random numbers; partial results where the keys are split (flash_api.cpp, mha_fwd)."""
    batch, heads, rows, width = query.shape
    out = _like_transposed(cuda, query)
    sums = cuda.empty((batch, heads, rows), FLOAT, op=func)
    splits = 1 if dropout else num_splits(cuda.gpu, batch * heads, rows, key.shape[2], width)
    partial = [splits * batch * heads * rows * 4 * columns for columns in (1, _rounded(width))] if splits > 1 else []
    with cuda.held(*partial, op=func, in_order=True):
        state, unused = cuda.empty((2,), torch.uint64, op=func), cuda.empty((), torch.uint64, op=func)
        if dropout:
            cuda.scratch(16, op=func)
    return out, sums, None, None, rows, key.shape[2], state, unused, cuda.empty((0,), query.dtype)


def _rounded(width: int) -> int:
    """The width that the kernels work with (flash_api.cpp, head_size_rounded)."""
    return round_up(width, 32 if width <= 128 else 64)


def num_splits(gpu: Any, heads: int, rows: int, columns: int, width: int) -> int:
    """Into how many parts the keys are split to fill the GPU (flash_api.cpp, num_splits_heuristic)."""
    blocks = -(-columns // (256 if width <= 64 else 128 if width <= 128 else 64))
    work, places = heads * -(-rows // 64), gpu.multiprocessors * 2
    if work >= 0.8 * places:
        return 1
    counts = [n for n in range(1, min(128, places, blocks) + 1) if n == 1 or -(-blocks // n) != -(-blocks // (n - 1))]
    waves = {n: work * n / places for n in counts}
    used = {n: wave / math.ceil(wave) for n, wave in waves.items()}
    return next(n for n in counts if used[n] >= 0.85 * max(used.values()))


@rule("_scaled_dot_product_flash_attention_backward.default")
def flash_backward(cuda, func, grad, query, key, value, out, *args, **kwargs):
    """Gradients, row sums and the queries' gradient in single precision (flash_api.cpp, mha_bwd)."""
    batch, heads, rows, width = query.shape
    with cuda.contiguous(*(cuda.op(aten.transpose.int, one, 1, 2) for one in (grad, out))):
        grads = tuple([_like_transposed(cuda, one) for one in (query, key, value)])
        sizes = [batch * heads * round_up(rows, 128) * 4 * columns for columns in (1, _rounded(width))]
        if key.shape[1] != heads:
            sizes += [batch * key.shape[2] * heads * width * key.element_size()] * 2
        cuda.scratch(*sizes, op=func)
    return grads


def _by_rows(cuda: Any, func: Any, query: Any, width: int) -> Any:
    batch, heads, rows, _ = query.shape
    return cuda.op(aten.transpose.int, cuda.empty((batch, rows, heads, width), query.dtype, op=func), 1, 2)


@rule("_scaled_dot_product_efficient_attention.default")
def efficient_forward(cuda, func, query, key, value, bias, keeps, dropout=0.0, *args, **kwargs):
    """Result by rows, log-sum-exp in multiples of 32 (attention.cu, _efficient_attention_forward).

    Without dropout the state of random numbers is on the GPU since 2.14, with it on the host (except in CUDA graphs).
    """
    batch, heads, rows, width = query.shape
    state = () if release(cuda.torch_version) >= (2, 14) and not dropout else (0,)
    seed, offset = (cuda.empty(state, torch.int64, op=func) for _ in range(2))
    out = _by_rows(cuda, func, query, value.shape[-1])
    sums = cuda.empty((batch, heads, round_up(rows, 32) if keeps else 0), FLOAT, op=func)
    if query.dtype in HALVES and max(width, value.shape[-1]) > 128:  # kNeedsOutputAccumulatorBuffer
        cuda.scratch(out.numel() * 4, op=func)
    return out, sums, seed, offset


def efficient_kernel(half: bool, width: int, has_dropout: bool, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """(rows and columns of its blocks, whether gradients of keys and values fit into its registers).

    The first that is wide enough and fits into the GPU's shared memory (mem_eff_attention/kernels/cutlassB.h; CUDA C++
    Programming Guide, "Technical Specifications per Compute Capability").
    """
    has_room = (8, 0) <= capability < (12, 0) and capability not in ((8, 6), (8, 9))
    if width <= 64:
        return 64, 64, True
    if not half:  # they are summed up in the results
        return 128 if has_room else 64, 64, True
    if width > 128:
        return 128, 64, False
    if capability < (8, 0) or (capability in ((8, 6), (8, 9)) and width <= 96 and not has_dropout):
        return 128, 64, True
    return (128, 128, True) if has_room else (64, 64, False)


def efficient_workspace(query: Any, key: Any, value: Any, has_dropout: bool, capability: tuple[int, int]) -> int:
    """Bytes in which gradients are summed up in single precision (mem_eff_attention/kernel_backward.h, workspace_size)."""
    batch, heads, rows, width = query.shape
    widths = width, value.shape[-1]
    height, across, in_registers = efficient_kernel(query.dtype in HALVES, max(widths), has_dropout, capability)
    # Blocks of the queries' gradient, each with its lock (GradQTempStorage), then the gradients of parts of keys and values.
    numbers = -(-rows // height) * -(-width // across) * (height * across + 4)
    if not in_registers:  # num_splits_key of attention_backward.cu
        blocks = -(-key.shape[2] // across)
        parts = 1 if batch * heads >= 256 and blocks <= 2 else max(min(blocks, 200 // (batch * heads)), 1)
        numbers += parts * across * sum(round_up(one, height) for one in widths)
    return int(batch * heads * numbers * 4)


@rule("_scaled_dot_product_efficient_attention_backward.default")
def efficient_backward(cuda, func, *args, **kwargs):
    """Gradients, row sums, a workspace for gradients in single precision (attention_backward.cu).

    Where several heads of queries share keys and values, their gradients are made for each head and then summed.
    """
    grad, query, key, value, bias = args[:5]
    batch, heads, rows, _ = query.shape
    bias_grad, sums = None, batch * heads * rows * 4
    workspace = efficient_workspace(query, key, value, args[9] > 0, tuple(cuda.gpu.compute_capability))
    with cuda.contiguous(cuda.op(aten.transpose.int, grad, 1, 2)):
        grads = [_by_rows(cuda, func, one, one.shape[-1]) for one in (query, key, value)]
        own = [batch * heads * one.shape[2] * one.shape[3] * one.element_size() for one in (key, value)]
        held = [cuda.hold(nbytes, func) for nbytes in own] if key.shape[1] != heads else []
        if bias is not None and args[10][3]:
            full = cuda.empty((*bias.shape[:-1], round_up(bias.shape[-1], 16)), bias.dtype, op=func)
            bias_grad = cuda.op(aten.slice.Tensor, full, -1, 0, bias.shape[-1])
        product = cuda.hold(grad.numel() * 4 if query.dtype == FLOAT else 0, func)
        delta = cuda.hold(sums, func)
        if query.dtype == FLOAT and 1 not in (rows, heads):
            total, delta = delta, cuda.hold(sums, func)
            cuda.release(total)
        cuda.release(product)
        cuda.scratch(workspace, op=func)
        for block in (*held, delta):
            cuda.release(block)
    return *grads, bias_grad


@rule("_scaled_dot_product_cudnn_attention.default")
def cudnn_forward(cuda, func, query, key, value, bias, keeps, *args, **kwargs):
    """Seed and offset, result, log-sum-exp if it is kept (ATen/native/cudnn/MHA.cpp)."""
    batch, heads, rows, _ = query.shape
    seed, offset = (cuda.empty((), torch.int64, op=func) for _ in range(2))
    # Dimensions in the order they have in the queries (alloc_with_matching_layout).
    order = sorted(range(4), key=lambda dim: -query.stride(dim))
    shape = (*query.shape[:3], value.shape[-1])
    out = cuda.empty([shape[dim] for dim in order], query.dtype, op=func)
    out = cuda.op(aten.permute.default, out, [order.index(dim) for dim in range(4)])
    sums = cuda.empty((batch, heads, rows, 1) if keeps else (0,), FLOAT, op=func)
    return out, sums, None, None, rows, key.shape[2], seed, offset, cuda.empty((0,), query.dtype)


@rule("_scaled_dot_product_cudnn_attention_backward.default")
def cudnn_backward(cuda, func, grad, *args, **kwargs):
    """Gradients, and a workspace that cuDNN asks for."""
    query = args[0]
    grads = tuple([cuda.op(aten.empty_like.default, one) for one in args[:3]])
    cuda.scratch(query.numel() // query.shape[-1] * (query.shape[-1] + 1) * 4, op=func)
    return grads


# --- the fast path of nn.TransformerEncoderLayer in evaluation ------------------------------------------------------------
# One operator, and PyTorch has no shape function for its inside. The order of calls is that of transformer.cpp and
# attention.cu in ATen/native/transformers, the order of frees was read off the allocator's history on 2.12.1.


@rule("_transformer_encoder_layer_fwd.default")
def encoder_layer(cuda, func, *args, **kwargs):
    """Attention and the two linear layers with the sums in place, before or after the norms."""
    source, width, heads, qkv, qkv_bias, out, out_bias, gelu, norm_first, eps, *rest = args
    first, second, (weight, bias, weight_2, bias_2) = rest[0:2], rest[2:4], rest[4:8]
    _refuse_mask(*rest[8:9])

    def norm(x, weight, bias):
        return F.layer_norm(x, (width,), weight, bias, eps)

    def feed_forward(x):
        inner = aten._addmm_activation(bias, x.view(-1, x.shape[-1]), weight.t(), use_gelu=gelu)
        out = torch.addmm(bias_2, inner, weight_2.t()).view(*x.shape[:-1], weight_2.shape[0])
        del inner  # before the input, as there
        return out

    x = norm(source, *first) if norm_first else source
    x = _self_attention(x, heads, (qkv, qkv_bias), (out, out_bias)).add_(source)
    if not norm_first:
        x = norm(x, *first)
    y = feed_forward(norm(x, *second) if norm_first else x).add_(x)
    return y if norm_first else norm(y, *second)


@rule("_native_multi_head_attention.default")
def multi_head_attention(
    cuda, func, query, key, value, width, heads, qkv, qkv_bias, out, out_bias, mask=None, need_weights=True, *args
):
    """`nn.MultiheadAttention` in evaluation, of one tensor with itself."""
    _refuse_mask(mask)
    if query is not key or query is not value or need_weights:
        raise PredictionError(
            "attention's fast path with weights or several inputs cannot be predicted: pass need_weights=False, or train()."
        )
    return _self_attention(query, heads, (qkv, qkv_bias), (out, out_bias)), None


def _self_attention(x: Any, heads: int, projection: Any, out: Any) -> Any:
    batch, length, width = x.shape
    packed = F.linear(x, *projection)
    parts = packed.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
    attended = attended.transpose(1, 2).reshape(batch, length, width)
    projected = F.linear(attended, *out)
    del attended  # before `packed`, as there
    return projected


def _refuse_mask(mask=None):
    if mask is not None:
        raise PredictionError(
            "a mask in the fast path of nn.TransformerEncoderLayer cannot be predicted: "
            "torch.backends.mha.set_fastpath_enabled(False) takes the other path, on the GPU as well."
        )
