"""Sizes on the simulated GPU, against PyTorch's own counters: kernels do nothing there, the allocator is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from api.real_forward import Function, linear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memlab.allocator.rules import release
from memlab.api.size import size
from memlab.errors import MemlabError
from memlab.prediction.child import Child
from memlab.workloads.images import vgg19
from memlab.workloads.language import Transformer
from memlab.workloads.vision import ResNet, UNet, Vgg

pytestmark = pytest.mark.simulated


def requested() -> int:
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def risen(make: Callable[[], Any]) -> tuple[int, int]:
    """By how much a call raises the bytes that were asked for, and those that are allocated."""
    before = requested(), torch.cuda.memory_allocated()
    kept = make()
    after = requested(), torch.cuda.memory_allocated()
    del kept
    return after[0] - before[0], after[1] - before[1]


def rounded(found: Any) -> int:
    return sum(-one.nbytes % 512 for one in found.kept)


def attention(model: Function, x: Tensor) -> Tensor:
    q, k, v = model.a(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


def autocasts(model: Function, x: Tensor) -> Tensor:
    assert torch.cuda.is_available() and torch.cuda.is_bf16_supported()  # code may ask for the device
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model.b(F.gelu(model.a(x)))


def pictures(side: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, side, side, device="cuda")


def tokens(time: int = 128) -> Tensor:
    return torch.zeros(4, time, dtype=torch.long, device="cuda")


def rows(**how: Any) -> Tensor:
    return torch.randn(64, 8, device="cuda", **how)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "vgg": (Vgg, lambda: pictures(64)),
    "resnet": (ResNet, lambda: pictures(32)),
    "resnet, channels last": (
        lambda: ResNet().to(memory_format=torch.channels_last),
        lambda: pictures(32).to(memory_format=torch.channels_last),
    ),
    "unet": (UNet, lambda: pictures(128)),
    "transformer": (Transformer, tokens),
    "transformer, tied": (lambda: Transformer(tied=True), tokens),
    "vgg19": (vgg19, lambda: pictures(224, 1)),
    "attention": (lambda: Function(attention, a=linear(32, 96)), lambda: torch.randn(2, 16, 32, device="cuda")),
    "attention in bf16": (
        lambda: Function(attention, a=linear(32, 96)).bfloat16(),
        lambda: torch.randn(2, 16, 32, device="cuda", dtype=torch.bfloat16),
    ),
    "autocast in the forward": (lambda: Function(autocasts, a=linear(), b=linear()), rows),
    "dropout": (
        lambda: nn.Sequential(linear(), nn.Dropout(0.3), nn.LayerNorm(8), nn.Dropout(0.5, inplace=True)),
        rows,
    ),
    "norms in bf16": (
        lambda: nn.Sequential(linear(), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.LayerNorm(8)).bfloat16(),
        lambda: rows(dtype=torch.bfloat16),
    ),
    "checkpoint": (
        lambda: Function(
            lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)), a=nn.Sequential(linear(), nn.GELU()), b=linear()
        ),
        rows,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_forward_takes_what_was_said(name):
    make, inputs = CASES[name]
    model, x = make().cuda(), inputs()
    model(x)  # cuBLAS takes its workspace
    found = size(model, x)
    asked, allocated = risen(lambda: model(x))
    assert found.device == "cuda:0"
    assert found.kept_bytes == asked
    rests = (1 << 20) * len(found.kept)  # too small to split
    assert asked <= allocated <= asked + rounded(found) + rests
    assert name != "autocast in the forward" or any(one.dtype == "bfloat16" for one in found.kept)


def test_to_the_byte_with_rounding_where_blocks_are_small():
    model, x = nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh()).cuda(), torch.randn(100, 8, device="cuda")
    model(x)
    found = size(model, x)
    assert risen(lambda: model(x))[1] == found.kept_bytes + rounded(found)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_gradients_and_states_take_what_was_said(name):
    model, x = Transformer().cuda(), tokens()
    found = size(model, x, optimizer=name)
    for _ in range(2):  # the second time no workspace is new
        model.zero_grad(set_to_none=True)
        before = requested()
        model(x).sum().backward()
    assert found.gradient_bytes == requested() - before
    optimizer = getattr(torch.optim, name)(model.parameters())
    before = requested()
    optimizer.step()
    assert found.optimizer_bytes == requested() - before
    steps = 4 * len(list(model.parameters())) if name == "AdamW" else 0
    states = 16 * 4 if release(torch.__version__) < (2, 14) else 0  # of the random numbers of each of four attentions
    assert found.elsewhere_bytes == steps + states
    assert any("lie on another device" in note for note in found.notes) is (found.elsewhere_bytes > 0)


def test_steps_on_the_device_count():
    model, x = linear().cuda(), torch.randn(2, 8, device="cuda")
    kind = lambda parameters: torch.optim.AdamW(parameters, fused=True)  # noqa: E731
    found = size(model, x, optimizer=kind)
    assert (found.optimizer_bytes, found.elsewhere_bytes) == (2 * 72 * 4 + 2 * 4, 0)


def test_asking_takes_nothing_of_the_device_and_disturbs_no_random_numbers():
    model, x = nn.Sequential(linear(), nn.Dropout()).cuda(), torch.randn(4, 8, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.get_rng_state().tolist()
    size(model, x, optimizer="adam")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before[0]
    assert torch.cuda.get_rng_state().tolist() == before[1]


def test_inputs_from_the_cpu_are_taken_to_the_device_of_the_model():
    model = nn.Sequential(linear(), nn.Dropout()).cuda()
    x = torch.randn(4, 8)
    assert size(model, x).parts == size(model, x.cuda()).parts == size(model, (4, 8)).parts
    said = "Inputs lie on cpu and the model on cuda:0: sized as if they were there, a real call has to move them."
    assert said in size(model, x).notes
    assert said in size(model, x).text
    for elsewhere in (x.cuda(), (4, 8), x.to("meta")):
        assert said not in size(model, elsewhere).notes


def test_a_model_on_meta_for_the_default_device():
    with torch.device("meta"):
        model = nn.Sequential(linear(), nn.Dropout())
    with torch.device("cuda"):
        on_cuda = size(model, (4, 8))
    on_cpu = size(model, (4, 8))
    assert (on_cuda.device, on_cpu.device) == ("cuda:0", "cpu")
    assert (on_cuda.activation_bytes, on_cpu.activation_bytes) == (32, 128)  # a mask of bytes, and one of floats
    assert any("CUDA's kernels keep other tensors for dropout" in note for note in on_cpu.notes)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_cudnn_recurrent_layers_are_a_lower_bound_and_work_afterwards(kind):
    model, x = kind(8, 16, 2, dropout=0.5).cuda(), torch.randn(5, 2, 8, device="cuda")
    found = size(model, x)
    assert found.is_lower_bound
    assert model.dropout == 0.5
    out = model(x)[0]
    assert type(out) is Tensor
    asked = risen(lambda: model(x))[0]
    assert found.kept_bytes < asked


def test_tensors_that_are_offloaded_lie_elsewhere():
    def forward(model: Function, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model.a(x).exp()

    model, x = Function(forward, a=linear()).cuda(), rows()
    model(x)
    found = size(model, x)
    assert found.kept_bytes == risen(lambda: model(x))[0]
    assert found.elsewhere_bytes >= x.nbytes


def test_autocast():
    model, x = nn.Sequential(linear(), nn.GELU(), linear()).cuda(), rows()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(x)
        torch.clear_autocast_cache()
        found = size(model, x)
        asked = risen(lambda: model(x))[0]
    assert found.kept_bytes == asked


def test_where_no_process_can_be_forked_nothing_is_made_on_the_device(monkeypatch):
    monkeypatch.setattr(Child, "forks", False)
    model, x = linear(), torch.randn(4, 8)
    for on_cuda in (lambda: size(linear().cuda(), x), lambda: size(model, x.cuda())):
        with pytest.raises(MemlabError, match=r"^sizes for CUDA need a forked process \(Linux\)\. Take the model"):
            on_cuda()
