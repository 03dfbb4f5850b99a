"""What CUDA kernels allocate: every call on the pretend device, where C++ allocates, and in pretend CUDA, event by event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_calls.sides import ordered

pytestmark = pytest.mark.fakegpu
TESTS = Path(__file__).parents[1]

KNOWN = {
    "refused there, or values that the pretend device lacks": (
        "layer_norm mixed bf16", "group_norm mixed bf16", "embedding_bag max bf16", "gaussian_nll_loss", "amp nested f16",
        "one_hot", "bincount", "ctc",
    ),
    "small memory of rare operators, not modelled": (
        "bce weights",
        "embedding int32", "embedding max_norm", "embedding scale", "embedding_bag", "soft_margin_loss", "multi_margin",
        "multilabel_margin", "multilabel_soft_margin", "cdist", "pdist", "bilinear", "atan2", "prod", "var_mean", "fft", "stft",
        "unfold", "fold", "affine_grid", "topk", "sort (64, 5000)", "sort (4, 100000)", "argsort", "multinomial", "scatter_reduce",
        "index_put acc", "take", "masked_scatter", "lstmcell", "grucell", "rnncell", "lstm last", "count_nonzero",
    ),
    "cuDNN's and autocast's own way with recurrent weights": ("amp lstm",),
    "order of two gradients of a half-precision convolution": ("cnn fp16",),
    "kernels of the workspace chosen by more than is modelled": ("index table",),
    "half-precision attention wider than 128 before compute capability 8": ("d192 f16", "d256 f16"),
}  # fmt: skip


def known(name: str) -> bool:
    return any(name.startswith(start) for starts in KNOWN.values() for start in starts)


def side(which: str, module: str, capability: str, folder: Path) -> dict[str, list[str]]:
    output = folder / f"{which}.json"
    command = [sys.executable, "-m", "kernel_calls.sides", which, module, str(output), capability]
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "FAKEGPU_CC": capability,
        "FAKEGPU_SHM": str(folder / "gpu"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(output.read_text(encoding="utf-8"))


MODULES = ("accumulation", "arithmetic", "attention", "indexing", "layers", "losses", "recurrent", "training")
OTHERS = [
    (module, capability)
    for module in ("attention", "training")
    for capability in ("7.5", "8.6", "8.9", "9.0", "10.0", "12.0")
]


@pytest.mark.parametrize(("module", "capability"), [*((module, "8.0") for module in MODULES), *OTHERS])
def test_kernels_allocate_as_foretold(module, capability, tmp_path):
    there = side("native", module, capability, tmp_path)
    here = side("pretend", module, capability, tmp_path)
    assert there.keys() == here.keys()
    wrong = [name for name in there if ordered(there[name]) != ordered(here[name]) and not known(name)]
    text = "\n".join(
        f"{name}\n  there {' '.join(there[name])[:600]}\n  here  {' '.join(here[name])[:600]}" for name in wrong
    )
    assert not wrong, f"{len(wrong)} of {len(there)} differ:\n{text[:6000]}"
