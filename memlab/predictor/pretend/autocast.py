"""CUDA autocast for pretend tensors: what it casts, what it caches, and until when.

The kernels in C++ ask `tensor.is_cuda()`, which is false of a pretend tensor, and would cast nothing. These stand in for them
at the dispatch key AutocastCUDA. Lists and order of ATen/autocast_mode.h and aten/src/ATen/autocast_mode.cpp (2.11 to 2.15;
a test compares the lists with the header that comes with PyTorch).

Limits: tensors of other libraries' classes are cast by their own kernels, if they have any.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlab.predictor.pretend.rules import installer, operator
from memlab.predictor.pretend.tensors import is_pretend

LOWER = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention",
]
"""AT_FORALL_LOWER_PRECISION_FP: cast down."""
SINGLE = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "_upsample_nearest_exact1d",
    "upsample_nearest2d",
    "_upsample_nearest_exact2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "_upsample_bilinear2d_aa",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
]
"""AT_FORALL_FP32: cast up."""
SINGLE_RESULT = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "sum",
    "sum.dim_IntList",
]
"""AT_FORALL_FP32_SET_OPT_DTYPE: the result is single, unless the call says otherwise."""
WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
]
"""AT_FORALL_PROMOTE: cast to the widest type among the arguments."""
NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: a single result, by another overload."""

HALVES = (torch.float16, torch.bfloat16)
FLOAT, DOUBLE = torch.float32, torch.float64
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


class Cache:
    """Low-precision copies of leaves in single precision, until the outermost autocast ends."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}

    def clear(self) -> None:
        """Let go of all copies."""
        self._copies.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """An argument in another type (`cached_cast`)."""
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return type(value)([self.cast(one, dtype) for one in value])
        if not is_castable(value) or value.dtype == dtype:
            return value
        if not _is_kept(value, dtype):
            return value.to(dtype)
        known = self._copies.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        copy = value.to(dtype)
        self._copies[id(value)] = (weakref.ref(value), copy)
        return copy

    def cast_all(self, dtype: torch.dtype, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """All arguments in another type, the last first, as GCC evaluates arguments of a call."""
        named = {name: self.cast(value, dtype) for name, value in reversed(kwargs.items())}
        return [self.cast(one, dtype) for one in reversed(args)][::-1], named


def is_castable(value: Any) -> bool:
    """Whether autocast looks at an argument (`is_eligible`)."""
    return is_pretend(value) and value.is_floating_point() and value.dtype != DOUBLE


def _is_kept(value: Any, dtype: torch.dtype) -> bool:
    if dtype != torch.get_autocast_dtype("cuda") or value.dtype != FLOAT:
        return False
    return bool(value.requires_grad and value.is_leaf and not value._is_view() and torch.is_autocast_cache_enabled())


Policy = Callable[[Any, Any, Any, Cache], Any]


def lower(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """In the type that autocast was given."""
    args, kwargs = cache.cast_all(torch.get_autocast_dtype("cuda"), args, kwargs)
    return func(*args, **kwargs)


def single(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """In single precision."""
    args, kwargs = cache.cast_all(FLOAT, args, kwargs)
    return func(*args, **kwargs)


def single_result(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """With a single result, if none is asked for (`fp32_set_opt_dtype`)."""
    if not is_castable(args[0]):
        return func(*args, **kwargs)
    place = next(i for i, one in enumerate(func._schema.arguments) if one.name == "dtype")
    if len(args) > place:
        args = [*args[:place], FLOAT if args[place] is None else args[place], *args[place + 1 :]]
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "dtype": kwargs.get("dtype") or FLOAT})


def widest(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """In the widest type among the arguments (`promote`)."""
    flat = [
        one for value in (*args, *kwargs.values()) for one in (value if isinstance(value, list | tuple) else [value])
    ]
    wide = any(is_castable(one) and one.dtype == FLOAT for one in flat)
    args, kwargs = cache.cast_all(FLOAT if wide else torch.get_autocast_dtype("cuda"), args, kwargs)
    return func(*args, **kwargs)


def norm(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """A norm with a single result (`fp32_append_dtype`)."""
    if not is_castable(args[0]):
        return func(*args, **kwargs)
    other = operator(f"aten.{NORMS[str(func).removeprefix('aten.')]}")
    full = [one.default_value for one in func._schema.arguments]
    values = [*args, *full[len(args) :]]
    return other(*values, dtype=FLOAT)


def refused(func: Any, args: Any, kwargs: Any, cache: Cache) -> Any:
    """As on CUDA (AT_FORALL_BANNED)."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
        "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which are safe, or cast the inputs to float32."
    )


POLICIES: tuple[tuple[Policy, tuple[str, ...]], ...] = (
    (lower, tuple(LOWER)), (single, tuple(SINGLE)), (single_result, tuple(SINGLE_RESULT)), (widest, tuple(WIDEST)),
    (norm, tuple(NORMS)), (refused, ("binary_cross_entropy",)),
)  # fmt: skip


@installer
@contextlib.contextmanager
def installed(run: Any, patches: Any) -> Iterator[Cache]:
    """Within it autocast treats pretend tensors as CUDA tensors."""
    cache, library = Cache(), torch.library.Library("aten", "IMPL")
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        cache.clear()
        clear()

    try:
        torch.clear_autocast_cache = clear_all  # what `torch.autocast.__exit__` calls as the outermost one ends
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels of PyTorch's are overridden is meant
            for policy, names in POLICIES:
                for name in names:
                    func = operator(f"aten.{name}" if "." in name else f"aten.{name}.default")
                    if func is not None:  # this PyTorch has it
                        library.impl(func, _kernel(func, policy, cache), "AutocastCUDA", allow_override=True)
        yield cache
    finally:
        torch.clear_autocast_cache = clear
        cache.clear()
        library._destroy()


def _kernel(func: Any, policy: Policy, cache: Cache) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Tensors without a class of ours (those of shape functions) are left as they are: `is_castable`.
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return policy(func, args, kwargs, cache)

    return kernel
