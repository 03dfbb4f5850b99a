"""Autocast on fake CUDA tensors: the lists of PyTorch's header, the casts, the cache and its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fake_gpus import card, logged

from memlab.fake_cuda import FakeCuda, autocast
from memlab.fake_cuda.kernel_rules import operator

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def named(macro: str) -> set[str]:
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", HEADER.read_text(encoding="utf-8"))
    assert body is not None
    pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {name + (f".{overload}" if overload else "") for name, overload in pairs}


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER),
        ("AT_FORALL_FP32", autocast.SINGLE),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.SINGLE_RESULT),
        ("AT_FORALL_PROMOTE", autocast.WIDEST),
    ],
)
def test_the_lists_are_those_of_the_header(macro, ours):
    # No user code reaches names of dimensions.
    theirs = {name for name in named(macro) if not name.lower().endswith(("dimname", "dimnamelist"))}
    assert theirs - set(ours) == set(), f"{torch.__version__} casts more"
    assert not [name for name in set(ours) - theirs if operator(name)], f"{torch.__version__} does not cast these"
    assert len(ours) == len(set(ours))


def test_our_operators_are_there():
    missing = [n for _, names in autocast.POLICIES for n in names if operator(n) is None]
    assert len(missing) <= 3, missing


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operators_compute_in_the_types_of_cuda(fake, dtype):
    x, w = torch.empty(4, 8, device="cuda"), torch.empty(8, 8, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        low = x @ w
        assert low.dtype == dtype
        assert F.linear(x, w).dtype == dtype
        for single in (low.exp(), low.softmax(-1), low.sum(), low.norm(), F.layer_norm(low, (8,)), F.mse_loss(low, x)):
            assert single.dtype == torch.float32
        assert (low + x).dtype == torch.float32
        assert torch.addcmul(x, low, low).dtype == torch.float32
        assert (low * 2).dtype == dtype
        assert (x.double() @ w.double()).dtype == x.double().norm().dtype == torch.float64
        with torch.autocast("cuda", enabled=False):
            assert (x @ w).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(low.sigmoid(), low.sigmoid())
    assert (x @ w).dtype == torch.float32


def copies(fake, body) -> int:
    """How many copies of the weight a body makes."""
    return logged(fake, body)[1].count(64 * 2)


def test_weights_are_cast_once_until_the_outermost_autocast_ends(fake):
    x, w = torch.empty(3, 8, device="cuda"), torch.empty(8, 8, device="cuda", requires_grad=True)

    def nested():
        with torch.no_grad(), torch.autocast("cuda"):
            for _ in range(3):
                with torch.autocast("cuda"):
                    x @ w
            x @ w

    assert copies(fake, nested) == 1
    assert copies(fake, nested) == 1  # a copy of its own: the first was freed


@pytest.mark.parametrize(("is_leaf", "caches"), [(False, True), (True, False)])
def test_what_is_not_a_leaf_is_cast_each_time_and_all_is_without_the_cache(fake, is_leaf, caches):
    x, w = torch.empty(3, 8, device="cuda"), torch.empty(8, 8, device="cuda", requires_grad=True)

    def body():
        made = w if is_leaf else w * 1
        with torch.no_grad(), torch.autocast("cuda", cache_enabled=caches):
            for _ in range(3):
                x @ made

    assert copies(fake, body) == 3


def test_nothing_is_left_behind():
    clear = torch.clear_autocast_cache
    with FakeCuda(card()):
        assert torch.clear_autocast_cache is not clear
    assert torch.clear_autocast_cache is clear
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
