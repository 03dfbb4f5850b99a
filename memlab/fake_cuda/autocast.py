"""CUDA autocast for fake CUDA tensors: what it casts, and how long it caches the copies.

The C++ kernels check `tensor.is_cuda()`, which is false for a fake CUDA tensor, and would cast nothing. These replace
them at the dispatch key AutocastCUDA. Lists and order of ATen/autocast_mode.h and aten/src/ATen/autocast_mode.cpp (2.11 to
2.15; a test compares the lists with the header that comes with PyTorch).

Limits: tensors of other libraries' classes are cast by their own kernels, if they have any.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memlab.allocator.rules import release
from memlab.fake_cuda.kernel_rules import FLOAT, operator, operators
from memlab.fake_cuda.patches import Patches
from memlab.fake_cuda.tensors import is_fake
from memlab.torch_internals.cuda_names import without_autocast
from memlab.torch_internals.objects import destroy, schema_of

LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""AT_FORALL_LOWER_PRECISION_FP: cast down."""
SINGLE = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "group_norm",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    *(["rms_norm"] if release(torch.__version__) >= (2, 12) else ()),
)  # fmt: skip
"""AT_FORALL_FP32: cast up. Of the PyTorch that runs, as are all operators."""
SINGLE_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""AT_FORALL_FP32_SET_OPT_DTYPE: the result is single, unless the call says otherwise."""
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add",
)  # fmt: skip
"""AT_FORALL_PROMOTE: cast to the widest type among the arguments."""
NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: a single result, by another overload."""


Policy = Callable[[Any, Any, Any, "Cache"], Any]


class Cache:
    """Low-precision copies of leaves in single precision, until the outermost autocast ends."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}
        self.clear = self._copies.clear

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """An argument in another type (`cached_cast`)."""
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return type(value)([self.cast(one, dtype) for one in value])
        if not is_castable(value) or value.dtype == dtype:
            return value
        is_lowered = dtype == torch.get_autocast_dtype("cuda") and value.dtype == FLOAT
        is_plain_leaf = value.requires_grad and value.is_leaf and not value._is_view()
        if not (is_lowered and is_plain_leaf and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        known = self._copies.get(id(value))
        if known is None or known[0]() is not value:
            known = self._copies[id(value)] = (weakref.ref(value), value.to(dtype))
        return known[1]


def is_castable(value: Any) -> bool:
    """Whether autocast looks at an argument (`is_eligible`)."""
    return is_fake(value) and value.is_floating_point() and value.dtype != torch.float64


def casting(dtype: torch.dtype | None) -> Policy:
    """All arguments in this type (None: the dtype of autocast), the last first, as GCC evaluates them."""

    def cast(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
        to = dtype or torch.get_autocast_dtype("cuda")
        named = {name: cache.cast(value, to) for name, value in reversed(kwargs.items())}
        return func(*[cache.cast(one, to) for one in reversed(args)][::-1], **named)

    return cast


lower, single = casting(None), casting(FLOAT)


def single_result(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """With a single result, if none is asked for (`fp32_set_opt_dtype`)."""
    if not is_castable(args[0]):
        return func(*args, **kwargs)
    place = next(i for i, one in enumerate(schema_of(func).arguments) if one.name == "dtype")
    if len(args) > place:
        return func(*args[:place], FLOAT if args[place] is None else args[place], *args[place + 1 :], **kwargs)
    return func(*args, **{**kwargs, "dtype": kwargs.get("dtype") or FLOAT})


def widest(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """In the widest type among the arguments (`promote`)."""
    values = [[value] if not isinstance(value, list | tuple) else value for value in (*args, *kwargs.values())]
    is_wide = any(is_castable(one) and one.dtype == FLOAT for value in values for one in value)
    return (single if is_wide else lower)(func, args, kwargs, cache)


def norm(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """A norm with a single result (`fp32_append_dtype`)."""
    if not is_castable(args[0]):
        return func(*args, **kwargs)
    defaults = [one.default_value for one in schema_of(func).arguments]
    other = operator(NORMS[str(func).removeprefix("aten.")])
    return other(*args, *defaults[len(args) :], dtype=FLOAT)


def refused(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """As on CUDA (AT_FORALL_BANNED)."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
        "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe, or cast the inputs to float32."
    )


POLICIES: tuple[tuple[Policy, tuple[str, ...]], ...] = (
    (lower, LOWER), (single, SINGLE), (single_result, SINGLE_RESULT), (widest, WIDEST),
    (norm, tuple(NORMS)), (refused, ("binary_cross_entropy",)),
)  # fmt: skip


def autocast_as_cuda(cuda: Any, patches: Patches) -> None:
    """Autocast treats fake CUDA tensors as CUDA tensors."""
    cache, library, clear = Cache(), torch.library.Library("aten", "IMPL"), torch.clear_autocast_cache
    patches.callback(destroy(library))
    patches.callback(cache.clear)

    def clear_all():
        cache.clear()
        clear()

    def cast_by(policy: Policy, func: Any) -> Any:
        def kernel(*args, **kwargs):
            # Tensors of other classes (those of shape functions) are not cast: `is_castable`.
            with without_autocast():
                return policy(func, args, kwargs, cache)

        return kernel

    # Called by `torch.autocast.__exit__` when the outermost one ends.
    patches.put(torch, clear_autocast_cache=clear_all)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's kernels are overridden on purpose
        for policy, names in POLICIES:
            for func in operators(names):
                library.impl(func, cast_by(policy, func), "AutocastCUDA", allow_override=True)
