"""Calls that fake CUDA does not predict event by event, each with its reason; one that has become equal must go from here.

`KNOWN`: module -> reason -> names of calls; a name that ends with " @7.5" is meant at that compute capability alone.
"""

from __future__ import annotations

import sys

import torch

from memlab.allocator.rules import release


def both(*names: str) -> tuple[str, ...]:
    """In single precision and in bfloat16."""
    return tuple(f"{name} {dtype}" for name in names for dtype in ("f32", "bf16"))


REFUSED = "CUDA refuses the call, the prediction does not"
VALUES = "goes by values, which the simulated GPU does not have (it reads zeros)"
COMPOSED = "decomposed by the shape functions, on CUDA a kernel or a composition of its own"
ORDER = "the same memory, allocated or freed in another order"
SCRATCH = "memory that a library takes for a moment, not modelled"

KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "arithmetic": {
        COMPOSED: both("prod all", "prod all big", "prod last", "prod first"),
        ORDER: both("atan2"),
        VALUES: ("bincount f32",),
    },
    "indexing": {
        SCRATCH: both("masked_scatter"),
    },
    "layers": {
        REFUSED: ("layer_norm mixed bf16", "group_norm mixed bf16"),
        ORDER: both("affine_grid"),
    },
    "losses": {
        REFUSED: ("embedding_bag max bf16", "embedding_bag large max bf16"),
        VALUES: ("ctc native f32",),
    },
    "optimizers": {VALUES: ("ASGD for-loop f32", "LBFGS", "LBFGS wolfe")},
    "recurrent": {
        "zeros stand in for the gradient of a state that is not used": ("lstm last f32", "lstm last f16"),
    },
    "training": {
        REFUSED: ("amp nested f16",),
        "two gradients of a half-precision convolution come in the other order": ("cnn fp16",),
        "cuDNN's and autocast's own way with recurrent weights": ("amp lstm f16", "amp lstm bf16"),
        "convolutions in bfloat16 that cuDNN does not have: columns are unfolded": (
            "cnn bf16 @7.5", "amp conv bf16 @7.5", "amp convT bf16 @7.5", "amp interpolate bf16 @7.5",
        ),
    },
}  # fmt: skip


UNTIL = {"layer_norm mixed bf16": (2, 14)}
"""The first PyTorch without that difference."""


def known(module: str, capability: str) -> dict[str, str]:
    """Name -> reason, of the calls of a module at a compute capability."""
    found, version = {}, release(torch.__version__)
    for reason, names in KNOWN.get(module, {}).items():
        for name in names:
            plain, _, only = name.partition(" @")
            if only in ("", capability) and version < UNTIL.get(plain, (sys.maxsize,)):
                found[plain] = reason
    return found
